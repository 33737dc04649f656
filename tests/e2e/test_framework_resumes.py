"""A training that is stopped, and goes on in a new process from what its framework has saved: with a new daemon, and with
the one that has the run still, perhaps at a later step. Losses are those of torch's AdamW, stopped and resumed likewise.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from daemon import Daemon
from framework_accounts import compare, told_by
from framework_setting import BATCHES, EPOCHS

LOOPS = ["hf_trainer", "sft_trainer", "accelerate_checkpoints", "lightning_checkpoints"]
# Every fourth step is the last of an epoch. Accelerate's loop saves where it is stopped, the others at every fifth step.
STOP, RESUME = ("--stop-after", "17"), ("--resume",)


@pytest.fixture(scope="module")
def accounts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """What ballast's and torch's optimizers did, by part of the training."""
    folder = tmp_path_factory.mktemp("resumes")
    stopped = told_by("torch", LOOPS, folder / "torch", *STOP)
    resumed = told_by("torch", LOOPS, folder / "torch", *RESUME)
    with Daemon(folder) as daemon:
        until = told_by("ballast", LOOPS, folder / "ballast", *STOP, "--server", daemon.server)
        shutil.copytree(folder / "ballast", folder / "copy")
        living = told_by("ballast", LOOPS, folder / "copy", *RESUME, "--server", daemon.server)
    with Daemon(folder) as daemon:
        new = told_by("ballast", LOOPS, folder / "ballast", *RESUME, "--server", daemon.server)
    return {"stopped": (until, stopped), "new daemon": (new, resumed), "living daemon": (living, resumed)}


@pytest.mark.parametrize("loop", LOOPS)
def test_goes_on_as_with_torchs_optimizer(loop: str, accounts: dict[str, tuple[Any, Any]], subtests: Any) -> None:
    for part, (ours, theirs) in accounts.items():
        with subtests.test(part):
            compare(loop, ours[loop], theirs[loop])
    # It goes on where it was, and does not begin anew.
    assert len(accounts["new daemon"][1][loop]["losses"]) < BATCHES * EPOCHS
