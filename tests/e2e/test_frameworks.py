"""Unmodified HF Trainer, TRL, Accelerate and Lightning, and a recipe as torchtune's: each trains as with torch's AdamW."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from daemon import ROOT, Daemon, plain_environment

PYTHON = ROOT / "build" / "frameworks-venv" / "bin" / "python"
# By process: importing a framework takes longer than training with it.
GROUPS = {
    "transformers": ["hf_trainer", "hf_trainer_unclipped", "hf_trainer_class", "hf_trainer_bf16", "sft_trainer"],
    "accelerate": ["recipe", "accelerate_loop", "accelerate_released", "accelerate_skips"],
    "lightning": ["lightning_loop", "lightning_bf16"],
}
TELL_NORMS = ["recipe", "accelerate_loop", *GROUPS["transformers"]]


def told_by(kind: str, loops: list[str], folder: Path, *more: str) -> dict[str, Any]:
    environment = {
        **plain_environment(),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [PYTHON, ROOT / "tests" / "e2e" / "framework_loops.py", kind, folder, *loops, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.fixture(scope="module", params=GROUPS)
def accounts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What torch's and ballast's optimizers did in the loops of one group."""
    assert PYTHON.exists(), f"{PYTHON} is missing: run deploy/setup.sh frameworks"
    folder = tmp_path_factory.mktemp(request.param)
    with Daemon(folder) as daemon:
        theirs = told_by("torch", GROUPS[request.param], folder / "torch")
        ours = told_by("ballast", GROUPS[request.param], folder / "ballast", "--server", daemon.server)
    return request.param, ours, theirs


def test_each_trains_as_with_torchs_optimizer(accounts: Any, subtests: Any) -> None:
    group, all_ours, all_theirs = accounts
    for loop in GROUPS[group]:
        with subtests.test(loop):
            compare(loop, all_ours[loop], all_theirs[loop])


def test_trainer_goes_on_from_its_checkpoint_in_a_new_process_with_a_new_daemon(tmp_path: Path) -> None:
    loop = ["hf_trainer"]
    for phase in (["--stop-after", "20"], ["--resume"]):
        theirs = told_by("torch", loop, tmp_path / "torch", *phase)["hf_trainer"]
        with Daemon(tmp_path) as daemon:
            ours = told_by("ballast", loop, tmp_path / "ballast", *phase, "--server", daemon.server)["hf_trainer"]
        compare("hf_trainer", ours, theirs)


def compare(loop: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    # Forwards in bf16 round what differs in the last bit of fp32 to what differs in the last of bf16.
    in_bf16 = loop.endswith("bf16")
    near = 2e-3 if in_bf16 else 1e-6
    assert len(theirs["losses"]) >= 10
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=near, nan_ok=True)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=10 * near)
    assert (loop in TELL_NORMS) == bool(theirs["norms"])
    assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-12)
    assert ours["ends"].keys() == theirs["ends"].keys()
    for parameter, (total, largest) in ours["ends"].items():
        assert in_bf16 or [total, largest] == pytest.approx(theirs["ends"][parameter], rel=1e-5, abs=1e-6), parameter


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
