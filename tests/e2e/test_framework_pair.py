"""Accelerate in two processes whose loaders are not equally long."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from daemon import ROOT, Daemon, plain_environment
from framework_accounts import PYTHON


def test_accelerates_loaders_of_two_ranks_end_in_step(tmp_path: Path) -> None:
    """The rank with more batches makes the shorter last step where the other one does, and its next epoch is the same one."""
    with Daemon(tmp_path) as daemon:
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        command = [PYTHON, ROOT / "tests" / "e2e" / "accelerate_pair.py", daemon.server, tmp_path / "store"]
        ranks = [
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**plain_environment(), **world, "RANK": rank, "LOCAL_RANK": rank},
            )
            for rank in ("0", "1")
        ]
        try:
            told = [rank.communicate(timeout=280) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(error[-3000:] for _, error in told)
    answers = [json.loads(out.splitlines()[-1]) for out, _ in told]
    assert [answer.pop("batches") for answer in answers] == [5, 4]
    same = {"synchronized": [False, False, True, True] * 2, "steps": 4, "applied": True, "epochs": 2, "left": False}
    assert answers == [same, same]
    assert "which is all that rank 1 had; dropped: 1 of rank 0" in told[0][1]
