"""Versions that have names, and a run that is restored: to a step before theirs, after it was deleted, and on another machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ballast
from daemon import Daemon
from durable import RUN, ctl
from models import perceptron, same_bits, weights_of
from test_follow_daemon import LONG_S, optimizer_of, train

TAGGED = ballast.Follow(tags=3)
GOOD, LATE = 2, 4  # steps; a checkpoint is of the first


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    made = tmp_path / "storage"
    made.mkdir()
    return made


def tagged(daemon: Daemon) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Trains, with a checkpoint and the name `good` of one step and `late` of a later one; the weights of both."""
    trained = perceptron(1)
    with optimizer_of(trained, daemon, RUN, follow=TAGGED) as optimizer:
        train(trained, optimizer, GOOD)
        assert optimizer.checkpoint() == GOOD
        assert optimizer.tag("good") == GOOD
        good = weights_of(trained)
        train(trained, optimizer, LATE - GOOD)
        assert optimizer.tag("late") == LATE
        return good, weights_of(trained)


def assert_named(daemon: Daemon, name: str, step: int, weights: list[torch.Tensor]) -> None:
    module = perceptron(2)
    with ballast.follow(module, server=daemon.server, run=RUN, at=name) as follower:
        assert follower.wait(timeout=LONG_S) and follower.step == step
        assert same_bits(weights_of(module), weights)


def restore(daemon: Daemon, *words: object) -> None:
    said = ctl("restore", RUN, *words, server=daemon.server)
    assert said.returncode == 0, said.stderr


def test_a_name_of_a_step_that_is_undone_keeps_its_weights(storage: Path) -> None:
    with Daemon(storage=storage) as daemon:
        good, late = tagged(daemon)
        restore(daemon, "--step", GOOD)
        assert_named(daemon, "late", LATE, late)
        trained = perceptron(1)
        with optimizer_of(trained, daemon, RUN, follow=TAGGED, weights="server") as optimizer:
            train(trained, optimizer, 1)
            assert optimizer.tags() == {"good": GOOD, "late": LATE}
            assert optimizer.tag("again") == GOOD + 1
        daemon.drain()
    with Daemon(storage=storage) as daemon:
        assert_named(daemon, "good", GOOD, good)
        assert_named(daemon, "late", LATE, late)


def test_names_stay_with_checkpoints_that_outlive_their_run(storage: Path) -> None:
    with Daemon(storage=storage) as daemon:
        good, late = tagged(daemon)
        assert ctl("delete", RUN, "--keep-checkpoints", server=daemon.server).returncode == 0
        restore(daemon, "--step", GOOD)
        assert_named(daemon, "good", GOOD, good)
        assert_named(daemon, "late", LATE, late)
        assert ctl("delete", RUN, server=daemon.server).returncode == 0
        assert not (storage / "runs" / RUN / "tags").exists()


def test_a_run_that_is_brought_to_another_machine_has_the_names_that_are_brought_too(
    storage: Path, tmp_path: Path
) -> None:
    with Daemon(storage=storage) as daemon:
        good, _ = tagged(daemon)
        daemon.drain()
    imports, elsewhere = tmp_path / "imports", tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(storage / "runs" / RUN, imports / RUN)
    with Daemon(storage=elsewhere, flags=[f"--storage.import_dir={imports}"]) as daemon:
        restore(daemon, "--from", imports / RUN, "--step", GOOD)
        with pytest.raises(ballast.Rejected, match="no version of the name 'good'; names: none"):
            ballast.Subscriber(daemon.server, RUN, at="good")
        daemon.drain()
    shutil.copytree(imports / RUN / "tags", elsewhere / "runs" / RUN / "tags")
    with Daemon(storage=elsewhere) as daemon:
        assert_named(daemon, "good", GOOD, good)
