"""FSDP2 by way of Lightning: two ranks that torchrun starts, clipped, accumulated, and gone on with from a checkpoint."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from daemon import ROOT, Daemon, plain_environment
from framework_accounts import PYTHON

TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_lightnings_module_that_shards_itself_trains_and_resumes_as_with_torchs_optimizer(tmp_path: Path) -> None:
    environment = {**plain_environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    program = ROOT / "tests" / "e2e" / "lightning_sharded.py"
    with Daemon(tmp_path) as daemon:
        command = [*TORCHRUN, program, daemon.server, tmp_path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    ours, theirs = told["ballast"], told["torch"]
    assert len(theirs["losses"]) > 30 and theirs["losses"][-1] < 0.8 * theirs["losses"][0]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours["ends"] == pytest.approx(theirs["ends"], rel=1e-6)
