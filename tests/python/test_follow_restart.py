"""A daemon that is killed under its trainers, and started again: they live on, and follow their run to where it is then, as
after a rewind."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import ballast
from daemon import Daemon
from following import KINDS, SELDOM, SYNC, Training
from models import layered, perceptron, spirals, weights_of
from side_by_side import side_by_side
from stateful import Place

RUN = "followed"
WITH_GRPC = KINDS | {"grpc": {"transport": "grpc"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "storage"
    made.mkdir()
    return made


def training_on(daemon: Daemon, **options: Any) -> Training:
    torch.manual_seed(7)
    return Training(partial(ballast.AdamW, server=daemon.server, run=RUN, reconnect_timeout=60), **options)


def undisturbed(folder: Path, **options: Any) -> list[str]:
    with Daemon(storage=folder) as daemon:
        training = training_on(daemon, **options)
        made = training.steps(10)
        training.optimizer.close()
        daemon.kill()
    for path in (folder / "runs").iterdir():
        path.rename(folder.parent / path.name)  # the folder is for the disturbed one
    return made


@pytest.mark.parametrize("durability, back", [(SYNC, 6), (SELDOM, 4)], ids=["journal", "checkpoint"])
@pytest.mark.parametrize("kind", WITH_GRPC)
def test_between_two_steps_the_last_durable_one_is_gone_back_to(
    kind: str, durability: dict[str, Any], back: int, folder: Path
) -> None:
    options = durability | WITH_GRPC[kind]
    wanted = undisturbed(folder, **options)
    with Daemon(storage=folder) as first:
        training = training_on(first, **options)
        assert training.steps(4) == wanted[:4]
        assert training.optimizer.checkpoint() == 4
        assert training.steps(2) == wanted[4:6]
        first.kill()
        with Daemon(first.port, storage=folder):
            assert training.step() == wanted[back - 1]  # it raised, was caught, and the scheduler was stepped
            assert training.rewound == [back]
            assert training.steps(10 - back) == wanted[back:]
            training.optimizer.close()


@pytest.mark.parametrize("kind", WITH_GRPC)
def test_in_the_middle_of_a_backward(kind: str, folder: Path) -> None:
    options = SYNC | WITH_GRPC[kind]
    wanted = undisturbed(folder, **options)
    with Daemon(storage=folder) as first, ExitStack() as later:
        training = training_on(first, **options)
        training.steps(6)

        def restart(_: torch.Tensor) -> None:
            hook.remove()
            first.kill()
            later.enter_context(Daemon(first.port, storage=folder))

        hook = next(training.model.parameters()).register_hook(restart)
        assert training.step() == wanted[5]
        assert training.rewound == [6]
        assert training.steps(4) == wanted[6:]
        training.optimizer.close()


def test_all_ranks_follow(folder: Path) -> None:
    steps, world = 12, 3

    def train(rank: int, daemon: Daemon, later: ExitStack | None, model: torch.nn.Module) -> str:
        place = Place()
        named = {"server": daemon.server, "run": RUN, "rank": rank, "world": world, "reconnect_timeout": 60}
        with ballast.AdamW(model.named_parameters(), lr=1e-2, **named, **(SYNC if later else {})) as optimizer:
            optimizer.register_client_state("place", place)
            optimizer.connect()
            killed = later is None or rank != 1
            while place.next < steps:
                if place.next == 7 and not killed:
                    killed = True
                    daemon.kill()
                    later.enter_context(Daemon(daemon.port, storage=folder))
                points, labels = spirals(seed=world * place.next + rank)
                place.next += 1
                try:
                    F.cross_entropy(model(points), labels).backward()
                    optimizer.step()
                except ballast.RunRewound as rewound:
                    assert place.next == rewound.step == 7
        return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights_of(model))).hexdigest()

    models = [perceptron(seed=1) for _ in range(world)]
    with Daemon() as daemon:
        wanted = side_by_side(world, lambda rank: train(rank, daemon, None, models[rank]))
    models = [perceptron(seed=1) for _ in range(world)]
    with Daemon(storage=folder) as daemon, ExitStack() as later:
        assert side_by_side(world, lambda rank: train(rank, daemon, later, models[rank])) == wanted


def test_a_run_without_registered_state_follows_with_its_weights(folder: Path) -> None:
    model = layered(seed=1)
    with Daemon(storage=folder) as first:
        optimizer = ballast.AdamW(
            model.named_parameters(), server=first.server, run=RUN, reconnect_timeout=60, **SELDOM
        )
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert optimizer.checkpoint() == 1
        kept = weights_of(model)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        first.kill()
        with Daemon(first.port, storage=folder):
            with pytest.raises(
                ballast.RunRewound, match="restarted and read run 'followed' back from its disk"
            ) as told:
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
            assert (told.value.step, told.value.client_state, told.value.followed) == (1, None, True)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights_of(model), kept, strict=True))
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            assert optimizer.last_result is not None and optimizer.last_result.step == 2
            optimizer.close()


def test_another_run_of_that_name_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """The daemon came back over an empty folder, and another trainer was quicker."""
    empty = tmp_path / "empty"
    empty.mkdir()
    model, other = layered(seed=1), layered(seed=2)
    with Daemon(storage=folder) as first:
        optimizer = ballast.AdamW(model.named_parameters(), server=first.server, run=RUN, reconnect_timeout=60)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        first.kill()
        with Daemon(first.port, storage=empty) as second:
            with ballast.AdamW(other.named_parameters(), server=second.server, run=RUN) as quicker:
                other(torch.ones(2, 8)).sum().backward()
                quicker.step()
            with pytest.raises(ballast.Rejected, match="no longer holds run 'followed'"):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
            optimizer.close()


def test_connect_tells_what_was_restored_and_brings_its_weights(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def joined(daemon: Daemon) -> tuple[ballast.Joined, ballast.AdamW, torch.nn.Module, Place]:
        model, place = layered(seed=1), Place()
        optimizer = ballast.AdamW(model.named_parameters(), server=daemon.server, run=RUN, **SELDOM)
        optimizer.register_client_state("place", place)
        return optimizer.connect(), optimizer, model, place

    with Daemon(storage=folder) as daemon:
        found, optimizer, model, place = joined(daemon)
        assert (bool(found), found.step, found.client_state, found.restored) == (False, 0, None, "")
        place.next = 5
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        kept = weights_of(model)
        optimizer.close()
        found, optimizer, model, place = joined(daemon)  # in the place of the first: nothing was restored
        assert (bool(found), found.step, found.restored, place.next) == (True, 1, "", 5)
        optimizer.close()
        daemon.drain()
    assert "read it back" not in capfd.readouterr().err
    with Daemon(storage=folder) as daemon:
        found, optimizer, model, place = joined(daemon)
        assert (bool(found), found.step, found.client_state) == (True, 1, {"place": {"next": 5}})
        assert found.restored.startswith(str(folder / "runs" / RUN)) and found.restored.endswith("-step-1")
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights_of(model), kept, strict=True))
        said = f"run '{RUN}' goes on after step 1: the daemon has read it back from {found.restored}"
        assert capfd.readouterr().err.count(said) == 1
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.close()


def test_weights_that_the_option_wants_compared_are_compared(folder: Path) -> None:
    with Daemon(storage=folder) as daemon:
        for weights in (None, "match"):
            model = layered(seed=1)
            with ballast.AdamW(model.named_parameters(), server=daemon.server, run=RUN, weights=weights) as optimizer:
                optimizer.register_client_state("place", Place())
                assert bool(optimizer.connect()) == (weights == "match")
                if weights == "match":
                    with pytest.raises(ballast.Rejected, match="differ from those of run 'followed' at step 1"):
                        model(torch.ones(2, 8)).sum().backward()
                else:
                    model(torch.ones(2, 8)).sum().backward()
                    optimizer.step()
