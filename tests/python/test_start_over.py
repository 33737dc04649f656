"""Deleting runs from Python, and beginning one anew under its name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ballast
from ballast import _core, runs
from conftest import Program
from daemon import Daemon
from models import layered

AdamW = Callable[..., ballast.AdamW]


def trained(adamw: AdamW, steps: int = 1, **options: object) -> ballast.AdamW:
    layers = layered(seed=1)
    optimizer = adamw(layers.named_parameters(), **options)
    for _ in range(steps):
        layers(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    return optimizer


def names(admin: _core.Client) -> list[str]:
    return [status["run_id"] for status in admin.list_runs()["runs"]]


def test_a_run_is_deleted_and_its_memory_freed(adamw: AdamW, daemon: Daemon, admin: _core.Client, run: str) -> None:
    trained(adamw).close()
    held = admin.get_server()["memory_reserved_bytes"]
    freed = ballast.delete_run(run, server=daemon.server)
    assert run not in names(admin)
    assert freed == held - admin.get_server()["memory_reserved_bytes"] > 0


def test_a_run_that_is_not_there_is_named(daemon: Daemon) -> None:
    with pytest.raises(ballast.Rejected, match="no run 'nowhere'") as told:
        ballast.delete_run("nowhere", server=daemon.server)
    assert told.value.code == "NOT_FOUND"


def test_a_run_in_training_is_deleted_by_force_alone(adamw: AdamW, daemon: Daemon, run: str) -> None:
    optimizer = trained(adamw)
    with pytest.raises(ballast.Rejected, match=f"'{run}' has a trainer attached"):
        ballast.delete_run(run, server=daemon.server)
    assert ballast.delete_run(run, server=daemon.server, force=True) > 0
    with pytest.raises(ballast.BallastError, match=f"no run '{run}'"):
        optimizer.pull()


def test_a_trainer_that_is_not_back_from_a_rewind_keeps_its_run(
    adamw: AdamW, daemon: Daemon, admin: _core.Client, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = trained(adamw, steps=2, snapshots=1, snapshot_every=1)
    admin.rewind(run, None, None, "operator")
    with pytest.raises(ballast.Rejected, match=rf"'{run}': rank 0 \(.+\) has not come back since the rewind") as told:
        ballast.delete_run(run, server=daemon.server)
    assert told.value.code == "FAILED_PRECONDITION"
    monkeypatch.setattr(runs, "_LEASE_WAIT_S", 0.0)
    second = adamw(layered(seed=1).named_parameters(), start_over=True)
    with pytest.raises(ballast.Rejected, match=f"start_over=True: run '{run}'.*has not come back.*delete_run"):
        second.connect()
    assert optimizer.run_status().step == 2
    optimizer.close()
    assert ballast.delete_run(run, server=daemon.server) > 0


def test_starting_over_begins_at_the_first_step_with_these_weights(adamw: AdamW) -> None:
    trained(adamw, steps=3).close()
    again = trained(adamw, start_over=True)
    assert again.last_result is not None and again.last_result.step == 1
    again.close()
    beside = layered(seed=2)
    third = adamw(beside.named_parameters(), lr=0.5, start_over=True)  # another description, too
    before = beside[0].weight.detach().clone()
    beside(torch.ones(2, 8)).sum().backward()
    third.step()
    assert not torch.equal(beside[0].weight, before)
    assert third.last_result is not None and third.last_result.step == 1


def test_starting_over_a_run_that_is_not_there_creates_it(adamw: AdamW) -> None:
    optimizer = trained(adamw, start_over=True)
    assert optimizer.last_result is not None and optimizer.last_result.step == 1


def test_starting_over_is_refused_while_somebody_trains(adamw: AdamW, run: str) -> None:
    first = trained(adamw)
    second = adamw(layered(seed=1).named_parameters(), start_over=True)
    with pytest.raises(ballast.Rejected, match=f"start_over=True: run '{run}'.*trainer attached.*delete_run"):
        second.connect()
    assert first.run_status().step == 1
    first.close()
    assert not second.connect()  # nobody is in its way now


def test_a_lost_trainers_lease_is_awaited(program: Callable[..., Program], adamw: AdamW) -> None:
    lost = program("torn")
    assert lost.hear() == "pushed"
    lost.close()  # killed in its first step
    optimizer = trained(adamw, start_over=True)
    assert optimizer.last_result is not None and optimizer.last_result.outcome == "APPLIED"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 0, "world": 2}, r"start_over=True and world=2.*ballast\.delete_run"),
        ({"weights": "server"}, "start_over=True and weights='server'"),
        ({"weights": "match"}, "start_over=True and weights='match'"),
    ],
    ids=str,
)
def test_what_contradicts_it_is_refused_by_name(options: dict[str, object], said: str, adamw: AdamW) -> None:
    with pytest.raises(ballast.Rejected, match=said):
        adamw([nn.Parameter(torch.zeros(3))], start_over=True, **options)


def test_it_is_a_switch(adamw: AdamW) -> None:
    with pytest.raises(ballast.Rejected, match="start_over='yes': it must be True or False"):
        adamw([nn.Parameter(torch.zeros(3))], start_over="yes")
