"""What a daemon that was started anew says of the runs that it has read back: whether their trainers had left."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import ballast
from daemon import Daemon
from durable import RUN, checkpoints, ctl, runs_of, train, trained
from models import layered, until

STEPS = 4
FINISHED, WAITING, LOST = ("FINISHED", 0), ("WAITING", 0), ("WAITING", 1)


def state(daemon: Daemon) -> tuple[str, int]:
    """The run's state, and how many of its ranks are lost."""
    [run] = runs_of(daemon.server)
    with urllib.request.urlopen(daemon.metrics_url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    [lost] = [line.split()[-1] for line in lines if line.startswith("ballast_run_ranks_lost{")]
    return run["state"].removeprefix("RUN_STATE_"), int(lost)


def told(checkpoint: Path) -> dict[str, Any]:
    """Its run.json; nothing where another checkpoint has just taken its place."""
    try:
        found: dict[str, Any] = json.loads((checkpoint / "run.json").read_text())
    except FileNotFoundError:
        return {}
    return found


@pytest.mark.parametrize("every", [STEPS, 1000], ids=["the last step is on the disk already", "it is not"])
def test_a_finished_run_is_finished_after_a_kill(tmp_path: Path, every: int) -> None:
    """With its last step, and without another checkpoint of that."""
    with Daemon(storage=tmp_path) as daemon:
        train(daemon.server, STEPS, checkpoint_every_steps=every)
        until(lambda: [told(one).get("ranksHeld") for one in checkpoints(tmp_path)] == [0])  # the one before is gone
        assert state(daemon) == FINISHED
        daemon.kill()
    [only] = checkpoints(tmp_path)
    assert told(only)["step"] == str(STEPS)
    with Daemon(storage=tmp_path) as daemon:
        assert state(daemon) == FINISHED
        daemon.drain()
    assert checkpoints(tmp_path) == [only], "nothing more is to be written of it"


@pytest.mark.parametrize("durability", ["checkpoint", "journal_sync"])
def test_a_run_whose_trainer_is_lost_is_missing_it_after_a_restart(tmp_path: Path, durability: str) -> None:
    """Until one comes, and whatever is written meanwhile."""
    options: dict[str, Any] = {"checkpoint_every_seconds": 1, "durability": durability}
    with Daemon(storage=tmp_path) as daemon:
        parameters = layered(seed=3, width=33).parameters()
        optimizer = ballast.AdamW(parameters, lr=0.01, server=daemon.server, run=RUN, **options)
        optimizer.connect()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.sum().backward()
        optimizer.step()
        daemon.drain()
    with Daemon(storage=tmp_path) as daemon:
        assert state(daemon) == LOST
        daemon.drain()
    with Daemon(storage=tmp_path) as daemon:
        assert state(daemon) == LOST
        train(daemon.server, STEPS, **options)
        until(lambda: state(daemon) == FINISHED)


def trainer(server: str, steps: int, **options: Any) -> ballast.AdamW:
    """After so many steps, and still there."""
    model = layered(seed=3, width=33)
    optimizer = ballast.AdamW(model.parameters(), lr=0.01, server=server, run=RUN, **options)
    for _ in range(steps):
        model(torch.ones(8, 33)).square().mean().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "grpc"])
def test_a_trainer_that_leaves_after_a_rewind_leaves_a_checkpoint(tmp_path: Path, shm: bool) -> None:
    """Though it makes no step more: what the run went back to is on the disk."""
    storage = tmp_path / "storage"
    storage.mkdir()
    with ExitStack() as ends:
        # Not in tmp_path: the path of a socket has 80 bytes at most.
        sockets = ends.enter_context(TemporaryDirectory(prefix="ballast-states-"))
        flags = [f"--shm_socket={sockets}/shm"] if shm else []
        daemon = ends.enter_context(Daemon(storage=storage, flags=flags))
        optimizer = trainer(daemon.server, 9, snapshots=3, snapshot_every=2)
        assert ctl("rewind", RUN, "--to", 4, server=daemon.server).returncode == 0
        optimizer.close()
        until(lambda: state(daemon) == FINISHED)
        until(lambda: [told(one).get("ranksHeld") for one in checkpoints(storage)] == [0])
        daemon.kill()
    with Daemon(storage=storage) as daemon:
        assert state(daemon) == FINISHED
        assert runs_of(daemon.server)[0]["step"] == 4


@pytest.mark.parametrize("killed", [False, True], ids=["drained", "killed"])
def test_a_trainer_that_leaves_after_the_daemons_restart_has_left(tmp_path: Path, killed: bool) -> None:
    """It was evaluating meanwhile, and makes no step more."""
    with Daemon(storage=tmp_path) as daemon:
        optimizer = trainer(daemon.server, STEPS, checkpoint_every_steps=STEPS)
        until(lambda: bool(checkpoints(tmp_path)))
        daemon.kill() if killed else daemon.drain()
    with Daemon(daemon.port, storage=tmp_path) as daemon:
        assert state(daemon) == LOST
        optimizer.close()
        until(lambda: state(daemon) == FINISHED)
        assert runs_of(daemon.server)[0]["step"] == STEPS


def test_a_finished_run_is_as_old_after_a_restart(tmp_path: Path) -> None:
    """It finished when its last checkpoint was written, and not when the daemon started; its step is in the metrics."""
    trained(tmp_path, STEPS, checkpoint_every_steps=1000)
    left = time.monotonic()
    with Daemon(storage=tmp_path) as daemon:
        [run] = runs_of(daemon.server)
        assert run["idle_seconds"] > time.monotonic() - left > 0
        assert "no step was made since" in ctl("run", RUN, server=daemon.server).stdout
        with urllib.request.urlopen(daemon.metrics_url, timeout=10) as answer:
            assert f'\nballast_step{{run_id="{RUN}"}} {STEPS}\n' in answer.read().decode()


def test_of_what_an_earlier_version_wrote_nothing_is_said(tmp_path: Path) -> None:
    """tests/checkpoints/format-1 does not tell."""
    golden = Path(__file__).parents[1] / "checkpoints" / "format-1" / "golden"
    shutil.copytree(golden, tmp_path / "runs" / "golden")
    with Daemon(storage=tmp_path) as daemon:
        assert state(daemon) == WAITING
