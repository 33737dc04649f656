"""State of the trainer that the daemon keeps with each step."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

import ballast
from conftest import Program
from daemon import Daemon
from models import layered, same_bits, weights_of, until
from stateful import Place

AdamW = Callable[..., ballast.AdamW]


def make_step(optimizer: ballast.AdamW, model: torch.nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def test_a_killed_trainer_is_gone_on_with_to_the_bit(run: str, program: Callable[..., Program]) -> None:
    def steps(trainer: Program, count: int) -> list[str]:
        heard = []
        for _ in range(count):
            trainer.go_on("on")
            heard.append(trainer.hear())
        return heard

    whole = program("with_state", run=f"{run}-whole")
    assert whole.hear() == "restored False"
    expected = steps(whole, 6)
    first = program("with_state")
    assert first.hear() == "restored False"
    assert steps(first, 3) == expected[:3]
    first.send(signal.SIGKILL)
    first.end()
    second = program("with_state")
    assert second.hear() == "restored True"
    assert steps(second, 3) == expected[3:]


def test_state_comes_back_with_the_options_of_the_groups(adamw: AdamW) -> None:
    model, place = layered(seed=1), Place()
    with adamw(model.named_parameters(), lr=0.5) as optimizer:
        optimizer.register_client_state("place", place)
        assert not optimizer.connect()
        for lr in (0.25, 0.125):
            optimizer.param_groups[0]["lr"] = lr
            place.next += 1
            make_step(optimizer, model)
    fresh = Place()
    optimizer = adamw(model.named_parameters(), lr=0.5)
    optimizer.register_client_state("place", fresh)
    assert optimizer.connect()
    assert (fresh.next, optimizer.param_groups[0]["lr"]) == (2, 0.125)
    assert not optimizer.connect()
    make_step(optimizer, model)


def test_weights_and_state_of_the_daemon(adamw: AdamW) -> None:
    model, other = layered(seed=1), layered(seed=2)
    with adamw(model.named_parameters()) as optimizer:
        optimizer.register_client_state("place", Place())
        optimizer.connect()
        make_step(optimizer, model)
    optimizer = adamw(other.named_parameters(), weights="server")
    optimizer.register_client_state("place", Place())
    assert optimizer.connect()
    assert same_bits(weights_of(model), weights_of(other))
    make_step(optimizer, other)


def test_registered_state_asks_for_connect(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    optimizer.register_client_state("place", Place())
    with pytest.raises(ballast.Rejected, match="call connect\\(\\) before the loop"):
        model(torch.ones(2, 8)).sum().backward()
    optimizer.connect()
    make_step(optimizer, model)
    with pytest.raises(ballast.Rejected, match="'late'.*put back already.*register before connect"):
        optimizer.register_client_state("late", Place())


def test_a_name_that_the_daemon_lacks_is_told(adamw: AdamW) -> None:
    model = layered(seed=1)
    with adamw(model.named_parameters()) as optimizer:
        optimizer.register_client_state("old", Place())
        optimizer.connect()
        make_step(optimizer, model)
    optimizer = adamw(model.named_parameters())
    optimizer.register_client_state("new", Place())
    with pytest.warns(UserWarning, match="no client state named new"):
        assert optimizer.connect()


def test_state_without_a_use_here_is_left_alone(adamw: AdamW) -> None:
    model = layered(seed=1)
    with adamw(model.named_parameters(), lr=0.5) as optimizer:
        optimizer.register_client_state("place", Place())
        optimizer.connect()
        make_step(optimizer, model)
    optimizer = adamw(model.named_parameters(), lr=0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_step(optimizer, model)
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("bad", [object(), lambda: 1, {1: Place()}])
def test_what_cannot_be_read_back_is_refused_by_name_and_the_step_goes_on(bad: Any, adamw: AdamW) -> None:
    model, kept = layered(seed=1), [bad]
    optimizer = adamw(model.named_parameters())
    optimizer.register_client_state("odd", lambda: kept[0], lambda _: None)
    optimizer.connect()
    with pytest.raises(ballast.Rejected, match="client state 'odd' cannot be kept: only dicts"):
        make_step(optimizer, model)
    kept[0] = 1
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied


def test_too_much_is_refused_and_the_step_goes_on(adamw: AdamW) -> None:
    model, kept = layered(seed=1), [torch.zeros(1 << 18)]
    optimizer = adamw(model.named_parameters())
    optimizer.register_client_state("large", lambda: kept[0], lambda _: None)
    optimizer.connect()
    with pytest.raises(ballast.Rejected, match="client state has 10[45].... bytes, at most 1048576"):
        make_step(optimizer, model)
    kept[0] = torch.zeros(1)
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied


def test_strange_registrations_are_refused(adamw: AdamW, daemon: Daemon) -> None:
    optimizer = adamw(layered(seed=1).named_parameters())
    optimizer.register_client_state("place", Place())
    with pytest.raises(ballast.Rejected, match="'place' is registered already"):
        optimizer.register_client_state("place", Place())
    with pytest.raises(
        ballast.Rejected, match="int has no state_dict\\(\\) and load_state_dict\\(\\); give two functions"
    ):
        optimizer.register_client_state("number", 3)


@pytest.mark.filterwarnings("ignore:the client state of run .* is 1 step older")
@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("skipped", [False, True])
def test_who_comes_back_knows_whether_the_step_of_its_state_was_skipped(
    adamw: AdamW, skipped: bool, torn: bool
) -> None:
    """Its loop steps the scheduler after step(), in which the state was taken, unless the step was skipped. torn: it has
    died within the next one."""
    model = layered(seed=1)
    with adamw(model.named_parameters(), nonfinite="skip_step") as optimizer:
        optimizer.register_client_state("place", Place())
        assert not optimizer.connect() and not optimizer.step_was_skipped
        make_step(optimizer, model)
        if skipped:
            model(torch.full((2, 8), float("nan"))).sum().backward()
            optimizer.step()
        assert optimizer.step_was_skipped == skipped
        if torn:
            before = optimizer.run_status().received_bytes
            model(torch.ones(2, 8)).sum().backward()
            until(lambda: optimizer.run_status().received_bytes > before)
    optimizer = adamw(model.named_parameters(), nonfinite="skip_step")
    optimizer.register_client_state("place", Place())
    assert optimizer.connect()
    assert optimizer.step_was_skipped == skipped
    make_step(optimizer, model)
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize("as_object", [True, False])
def test_who_died_before_step_comes_back_with_the_learning_rate_of_the_others(adamw: AdamW, as_object: bool) -> None:
    """In release the step that it died in has changed the weights, and no client state came with it."""

    def made() -> tuple[ballast.AdamW, torch.nn.Module, LRScheduler]:
        model = layered(seed=1)
        optimizer = adamw(model.named_parameters(), lr=1e-2)
        scheduler = CosineAnnealingLR(optimizer, 10)
        registered = (scheduler,) if as_object else (scheduler.state_dict, scheduler.load_state_dict)
        optimizer.register_client_state("scheduler", *registered)
        return optimizer, model, scheduler

    optimizer, model, scheduler = made()
    with optimizer:
        optimizer.connect()
        make_step(optimizer, model)
        scheduler.step()
        of_a_step = optimizer.run_status().received_bytes
        model(torch.ones(2, 8)).sum().backward()
        until(lambda: optimizer.run_status().received_bytes == 2 * of_a_step)
    optimizer, model, scheduler = made()
    with pytest.warns(UserWarning, match="is 1 step older than the run: it ended without this rank, and 1 changed w"):
        assert optimizer.connect().step == 2
    assert [end is not None and end.outcome for end in optimizer.ends_since_state] == ["APPLIED", "APPLIED"]
    if not optimizer.step_was_skipped:
        scheduler.step()
    assert scheduler.last_epoch == (2 if as_object else 1)
    make_step(optimizer, model)
