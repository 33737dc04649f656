"""Runs on the daemon's disk, as a trainer asks for them and hears of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from ballast import _core
from ballast.commit import step_rules
from daemon import Daemon
from models import layered, same_bits, until, weights_of
from side_by_side import side_by_side

AdamW = Callable[..., ballast.AdamW]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def storing(storage: Path) -> Iterator[Daemon]:
    with Daemon(storage=storage) as started:
        yield started


@contextmanager
def training(daemon: Daemon, run: str, **options: Any) -> Iterator[tuple[nn.Module, ballast.AdamW]]:
    model = layered(seed=1)
    with ballast.AdamW(model.named_parameters(), server=daemon.server, run=run, **options) as optimizer:
        yield model, optimizer


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 8)).square().mean().backward()


def train(model: nn.Module, optimizer: ballast.AdamW, steps: int = 1) -> None:
    for _ in range(steps):
        backward(model)
        optimizer.step()


def durable_step(optimizer: ballast.AdamW) -> int:
    return int(optimizer.run_status().durability.durable_step)


def folder_of(storage: Path, run: str) -> Path:
    return storage / "runs" / run


# --- the options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("checkpoint_every_steps", 0, "a whole number from 1 to"),
        ("checkpoint_every_steps", 2**32, "a whole number from 1 to"),
        ("checkpoint_every_steps", 10.0, "a whole number from 1 to"),
        ("checkpoint_every_steps", True, "a whole number from 1 to"),
        ("checkpoint_every_seconds", 0, "above 0 and at most 1e6 seconds"),
        ("checkpoint_every_seconds", 2e6, "above 0 and at most 1e6 seconds"),
        ("checkpoint_every_seconds", float("nan"), "above 0 and at most 1e6 seconds"),
        ("checkpoint_every_seconds", "10min", "above 0 and at most 1e6 seconds"),
        ("checkpoints_kept", 1, "a whole number from 2 to 100"),
        ("checkpoints_kept", 101, "a whole number from 2 to 100"),
        ("checkpoints_kept", "all", "a whole number from 2 to 100"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(option: str, value: Any, wanted: str) -> None:
    with pytest.raises(ballast.Rejected, match=f"^{option}=.*: it must be None.* {wanted}"):
        step_rules({option: value})


def test_the_constructor_checks_them(adamw: AdamW) -> None:
    with pytest.raises(ballast.Rejected, match="^checkpoints_kept=1: it must be None or a whole number"):
        adamw(layered(seed=1).named_parameters(), checkpoints_kept=1)


def test_the_description_has_what_is_asked_for_alone() -> None:
    assert "checkpoint" not in step_rules({}).spec()
    assert "checkpoint" not in step_rules({"checkpoint_every_steps": None, "checkpoints_kept": None}).spec()
    assert step_rules({"checkpoint_every_steps": 50}).spec()["checkpoint"] == {"every_steps": 50}
    every = {"checkpoint_every_steps": 50, "checkpoint_every_seconds": 30, "checkpoints_kept": 3}
    assert step_rules(every).spec()["checkpoint"] == {"every_steps": 50, "every_seconds": 30.0, "retain": 3}


def test_the_run_is_made_with_them(storing: Daemon, run: str) -> None:
    def policy(name: str, **options: Any) -> dict[str, Any]:
        with training(storing, name, **options) as (_, optimizer):
            optimizer.connect()
            found: dict[str, Any] = optimizer._membership.connected().get_run(name)["spec"]["checkpoint"]
            return found

    without = {"durability": "CHECKPOINT", "journal_steps": 0}
    assert policy(f"{run}-default") == {"every_steps": 0, "every_seconds": 600.0, "retain": 2} | without
    steps = policy(f"{run}-steps", checkpoint_every_steps=7)
    assert steps == {"every_steps": 7, "every_seconds": 0.0, "retain": 2} | without
    both = {"checkpoint_every_steps": 7, "checkpoint_every_seconds": 0.5, "checkpoints_kept": 5}
    assert policy(f"{run}-both", **both) == {"every_steps": 7, "every_seconds": 0.5, "retain": 5} | without
    journal = policy(f"{run}-journal", durability="journal", journal_steps=4)
    assert (journal["durability"], journal["journal_steps"]) == ("JOURNAL", 4)


def test_another_policy_is_refused_by_the_options_name(storing: Daemon, run: str) -> None:
    with training(storing, run, checkpoint_every_steps=7) as (_, optimizer):
        optimizer.connect()
    with training(storing, run, checkpoint_every_steps=8) as (_, optimizer):
        with pytest.raises(ballast.Rejected, match="checkpoint_every_steps is 7, asked for is 8"):
            optimizer.connect()


# --- without storage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [{"checkpoint_every_steps": 5}, {"checkpoints_kept": 3}], ids=str)
def test_a_daemon_without_storage_refuses_the_options_by_name(adamw: AdamW, option: dict[str, Any]) -> None:
    optimizer = adamw(layered(seed=1).named_parameters(), **option)
    with pytest.raises(ballast.Rejected, match=f"{next(iter(option))}.* is given, but this daemon has no storage"):
        optimizer.connect()


def test_a_daemon_without_storage_makes_no_checkpoint(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    train(model, optimizer)
    with pytest.raises(ballast.Rejected, match="storage") as refused:
        optimizer.checkpoint()
    assert refused.value.code == "FAILED_PRECONDITION"
    assert optimizer.run_status().durability is None
    assert optimizer.last_result is not None and optimizer.last_result.durable_step == 0
    train(model, optimizer)  # nothing happened


# --- a checkpoint ---------------------------------------------------------------------------------------------------


def test_the_last_step_is_durable_when_it_returns(storing: Daemon, storage: Path, run: str) -> None:
    with training(storing, run) as (model, optimizer):
        train(model, optimizer, 2)
        assert durable_step(optimizer) == 0
        assert optimizer.checkpoint() == 2
        assert durable_step(optimizer) == 2
        (folder,) = folder_of(storage, run).iterdir()
        assert folder.name.endswith("-step-2") and (folder / "manifest.json").exists()
        train(model, optimizer)
        assert optimizer.last_result is not None and optimizer.last_result.durable_step == 2
        status = optimizer.run_status().durability
        assert status.checkpoint_bytes > 0 and 0 <= status.checkpoint_age_s < 600
        assert (status.last_failure, status.restored) == ("", "")


def test_a_step_that_is_there_is_not_written_twice(storing: Daemon, storage: Path, run: str) -> None:
    with training(storing, run) as (model, optimizer):
        train(model, optimizer)
        assert [optimizer.checkpoint(), optimizer.checkpoint()] == [1, 1]
        assert len(list(folder_of(storage, run).iterdir())) == 1


def test_before_the_first_step_there_is_nothing_to_write(storing: Daemon, run: str) -> None:
    with training(storing, run) as (_, optimizer):
        with pytest.raises(ballast.Rejected) as refused:
            optimizer.checkpoint()
        assert refused.value.code == "FAILED_PRECONDITION"


def test_in_the_middle_of_a_step_it_is_refused(storing: Daemon, run: str) -> None:
    with training(storing, run) as (model, optimizer):
        train(model, optimizer)
        backward(model)
        with pytest.raises(ballast.Rejected, match="step 2 is open: call step\\(\\) first"):
            optimizer.checkpoint()
        optimizer.step()
        assert optimizer.checkpoint() == 2


def test_with_overlap_it_waits_for_the_step(storing: Daemon, run: str) -> None:
    with training(storing, run, overlap_forward=True) as (model, optimizer):
        train(model, optimizer, 3)
        assert optimizer.checkpoint() == 3


def test_by_steps_the_daemon_writes_by_itself(storing: Daemon, run: str) -> None:
    with training(storing, run, checkpoint_every_steps=2) as (model, optimizer):
        train(model, optimizer, 2)
        until(lambda: durable_step(optimizer) == 2)
        train(model, optimizer)
        assert optimizer.last_result is not None and optimizer.last_result.durable_step == 2


def test_every_rank_gets_the_same_step(storing: Daemon, storage: Path, run: str) -> None:
    def work(rank: int) -> list[int]:
        with training(storing, run, rank=rank, world=2) as (model, optimizer):
            durable = []
            for _ in range(3):
                train(model, optimizer)
                durable.append(optimizer.checkpoint())
            return durable

    assert side_by_side(2, work) == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("options", [{}, {"commit": "staged"}], ids=["release", "staged"])
def test_one_rank_suffices_while_others_go_on(storing: Daemon, run: str, options: dict[str, Any]) -> None:
    """The other rank has begun the next step by then, which cannot end without the one that waits."""
    run = f"{run}-{len(options)}"
    admin = _core.Client.connect(storing.server, 60.0, 60.0)

    def second_is_ahead() -> bool:
        (status,) = [status for status in admin.list_runs()["runs"] if status["run_id"] == run]
        return any(awaited["rank"] == 0 for awaited in status["awaited"])

    def work(rank: int) -> int:
        with training(storing, run, rank=rank, world=2, **options) as (model, optimizer):
            train(model, optimizer, 2)
            durable = 0
            if rank == 0:
                until(second_is_ahead)
                durable = optimizer.checkpoint()
            train(model, optimizer)
            assert optimizer.last_result is not None and optimizer.last_result.applied
            return durable

    assert side_by_side(2, work) == [2, 0]
    admin.close()


# --- runs that are over ---------------------------------------------------------------------------------------------


def test_checkpoints_go_with_their_run_unless_they_are_kept(storing: Daemon, storage: Path, run: str) -> None:
    for keep in (True, False):
        name = f"{run}-{keep}".lower()
        with training(storing, name) as (model, optimizer):
            train(model, optimizer)
            optimizer.checkpoint()
        assert folder_of(storage, name).exists()
        ballast.delete_run(name, server=storing.server, keep_checkpoints=keep)
        assert folder_of(storage, name).exists() == keep


def test_a_run_outlives_a_daemon_that_is_killed(tmp_path: Path, run: str) -> None:
    with Daemon(storage=tmp_path) as first, training(first, run) as (model, optimizer):
        train(model, optimizer, 3)
        assert optimizer.checkpoint() == 3
        kept = weights_of(model)
        train(model, optimizer)
        first.kill()
    with Daemon(storage=tmp_path) as second, training(second, run, weights="server") as (model, optimizer):
        assert same_bits(weights_of(model), kept)
        assert optimizer.run_status().durability.restored != ""
        train(model, optimizer)
        assert optimizer.last_result is not None
        assert (optimizer.last_result.step, optimizer.last_result.durable_step) == (4, 3)
