"""Ctrl-C at any moment of a step, or of joining a run, down to what Python does between a call of the client's and keeping
its answer: the step is here as it is with the daemon, and training goes on."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from contextlib import suppress
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn

import ballast
import ballast.session
from ballast.pending import fields_of
from ballast.weights import Weights
from interrupts import interrupted_at
from models import assert_close, layered, same_bits, weights_of

AdamW = Callable[..., ballast.AdamW]
EXACT: dict[str, Any] = {"state_dtype": "fp32", "master_weight_bits": 32, "commit": "staged"}
# Where a session tells the client of a step, hears of it, and takes its weights.
PLACES = {"begin", "_call", "end", "_end", "discard", "_leave", "finish", "_take", "_mark", "move_version", "written"}


def is_place(code: CodeType) -> bool:
    return "/ballast/" in code.co_filename and code.co_name in PLACES


def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, drops: bool = False) -> None:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
    model(inputs).square().mean().backward()
    if drops:
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("drops", [False, True])
def test_a_staged_step_is_made_or_dropped(drops: bool, adamw: AdamW) -> None:
    model, twin = layered(seed=1)[:2], layered(seed=1)[:2]
    optimizer = adamw(model.named_parameters(), **EXACT)
    theirs = adamw(twin.named_parameters(), **EXACT, run=f"{optimizer.run}-twin")
    optimizer.connect()
    made = 0
    for number in itertools.count():
        interrupted = interrupted_at(number, lambda: train(model, optimizer, number, drops), "opcode", is_place)
        optimizer.zero_grad()  # drops a step that has begun
        optimizer.step()  # waits for one that was ended
        applied = optimizer.run_status().steps_applied
        if applied > made:
            train(twin, theirs, number)
        made = applied
        if not interrupted:
            break
    assert number > 100
    assert made == 0 if drops else 0 < made < number
    train(model, optimizer, number)
    train(twin, theirs, number)
    assert same_bits(weights_of(model), weights_of(twin))


@pytest.mark.parametrize("commit", ["release", "staged"])
def test_who_begins_anew_is_told_to_end_a_step_that_cannot_be_dropped(commit: str, adamw: AdamW) -> None:
    """As a notebook's cell that is run again."""
    model = layered(seed=1)[:2]
    optimizer = adamw(model.named_parameters(), commit=commit)
    told = 0
    for number in itertools.count():
        interrupted = interrupted_at(number, lambda: train(model, optimizer, number), "opcode", is_place)
        with suppress(ballast.Rejected):
            optimizer.zero_grad()
        try:
            train(model, optimizer, number)
        except ballast.Rejected as refusal:
            assert re.search(r"[Cc]all step\(\)|step\(\), now, takes them all", str(refusal)), refusal
            told += 1
            optimizer.step()
            train(model, optimizer, number)
        if not interrupted:
            break
    assert (told > 0) == (commit == "release") and number > 100


def test_a_released_step_is_ended_by_the_next_call(adamw: AdamW) -> None:
    model = layered(seed=1)[:2]
    optimizer = adamw(model.named_parameters())
    train(model, optimizer, 0)
    for number in itertools.count():
        interrupted = interrupted_at(number, lambda: train(model, optimizer, number), "opcode", is_place)
        with suppress(ballast.Rejected):
            optimizer.zero_grad()  # which says what to do with one that has begun
        optimizer.step()
        kept = weights_of(model)
        optimizer.pull()
        assert same_bits(kept, weights_of(model))
        if not interrupted:
            break
    assert number > 100


def test_a_rank_that_was_taken_as_ctrl_c_came_is_taken_again(adamw: AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon has let this trainer in, and it has not got to know."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model, twin = layered(seed=1), layered(seed=1)
    optimizer, theirs = adamw(model.named_parameters(), **EXACT), torch.optim.AdamW(twin.parameters())
    with monkeypatch.context() as patched:
        patched.setattr(Weights, "__init__", interrupt)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                optimizer.connect()
    for number in range(3):
        train(model, optimizer, number)
        train(twin, theirs, number)
    assert_close(model, twin)


@pytest.fixture
def interrupts_wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Ctrl-C comes as the next step's end is waited for, and that is raised when it is in."""

    def arm() -> None:
        def interrupt(*_: Any) -> None:
            monkeypatch.setattr(ballast.session, "fields_of", fields_of)
            raise KeyboardInterrupt

        monkeypatch.setattr(ballast.session, "fields_of", interrupt)

    monkeypatch.setattr(ballast.session, "_INTERRUPTED_S", 60.0)
    return arm


@pytest.mark.parametrize("commit", ["release", "staged"])
def test_a_checkpoint_is_loaded_the_model_first_after_ctrl_c_in_a_step(
    commit: str, adamw: AdamW, interrupts_wait: Callable[[], None]
) -> None:
    """As frameworks that resume do."""
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), **{**EXACT, "commit": commit})
    theirs = torch.optim.AdamW(twin.parameters())
    pairs: list[tuple[nn.Module, torch.optim.Optimizer]] = [(model, optimizer), (twin, theirs)]
    for one, opt in pairs:
        train(one, opt, 0)
    kept = [copy.deepcopy((one.state_dict(), opt.state_dict())) for one, opt in pairs]
    interrupts_wait()
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, 1)
    for (one, opt), (weights, state) in zip(pairs, kept, strict=True):
        one.load_state_dict(weights)
        opt.load_state_dict(state)
        train(one, opt, 2)
    assert_close(model, twin)


def test_a_step_whose_end_came_with_ctrl_c_is_heard_of_once(adamw: AdamW, interrupts_wait: Callable[[], None]) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    interrupts_wait()
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, 0)
    assert optimizer.last_result is not None and optimizer.last_result.step == 1
    optimizer.step()  # as who was interrupted calls it again
    assert not optimizer.step_was_skipped and optimizer.run_status().step == 1
    optimizer.step()
    assert optimizer.step_was_skipped


@pytest.fixture
def interrupted_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[ballast.AdamW], None]:
    """Calls step(), in which Ctrl-C comes, and its end does not come soon after."""

    def act(optimizer: ballast.AdamW) -> None:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(ballast.session, "fields_of", interrupt)
            patched.setattr(ballast.session, "fields_within", lambda *_: None)
            optimizer.step()

    return act


def backward(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    return loss


BEGINNINGS: dict[str, Callable[[nn.Module, ballast.AdamW], object]] = {
    "zero_grad": lambda _, optimizer: optimizer.zero_grad(),
    "module.zero_grad": lambda model, _: model.zero_grad(),
    "forward": lambda *_: None,
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("commit", ["release", "staged"])
def test_who_begins_the_next_step_has_the_interrupted_one_first(
    commit: str,
    beginning: str,
    overlap: bool,
    adamw: AdamW,
    interrupted_step: Callable[[ballast.AdamW], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a notebook's cell that is run again."""
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), **{**EXACT, "commit": commit, "overlap_forward": overlap})
    theirs = torch.optim.AdamW(twin.parameters())
    for number in range(4):
        theirs.zero_grad()
        backward(twin)
        theirs.step()
        BEGINNINGS[beginning](model, optimizer)
        backward(model)
        if number == 1 and not overlap:
            interrupted_step(optimizer)
        elif number == 1:
            monkeypatch.setattr(ballast.session.Session, "leave_waiting", interrupted_in_leave_waiting(monkeypatch))
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        else:
            optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.step == optimizer.run_status().steps_applied == 4
    assert_close(model, twin)


def interrupted_in_leave_waiting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    kept = ballast.session.Session.leave_waiting

    def interrupt(_: Any) -> None:
        monkeypatch.setattr(ballast.session.Session, "leave_waiting", kept)
        raise KeyboardInterrupt

    return interrupt


def test_zero_grad_waits_for_the_interrupted_step_and_step_tells_of_it(
    adamw: AdamW, interrupted_step: Callable[[ballast.AdamW], None]
) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    backward(model)
    interrupted_step(optimizer)
    assert optimizer.last_result is None
    optimizer.zero_grad()
    assert optimizer.last_result is not None and optimizer.last_result.step == 1
    optimizer.step()  # as who was interrupted calls it again
    assert not optimizer.step_was_skipped and optimizer.run_status().step == 1


def test_micro_batches_begin_after_the_interrupted_step(
    adamw: AdamW, interrupted_step: Callable[[ballast.AdamW], None]
) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), gradient_accumulation_steps=2)
    for interrupted in (True, False):
        for final in (False, True):
            with optimizer.accumulate(final=final):
                backward(model)
        interrupted_step(optimizer) if interrupted else optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.step == 2


@pytest.mark.parametrize(
    ("commit", "message"),
    [
        ("release", "modified by an inplace operation"),  # as torch says
        ("staged", "step 1 were in place.* they are now: run forward and backward again"),
    ],
)
def test_a_gradient_of_a_forward_before_the_interrupted_step_is_refused_once(
    commit: str, message: str, adamw: AdamW, interrupted_step: Callable[[ballast.AdamW], None]
) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit=commit)
    early = model(torch.ones(4, 8)).square().mean()
    backward(model)
    interrupted_step(optimizer)
    with pytest.raises(RuntimeError, match=message):
        early.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    backward(model)
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.step == 2
