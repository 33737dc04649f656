"""An optimizer's state is in its run: what is done to `.state`, to hooks on state dicts, and to state of what is frozen."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from models import assert_close, layered

AdamW = Callable[..., ballast.AdamW]
FP32 = {"master": "fp32", "state": "fp32", "rounding": "nearest"}
INPUT = torch.arange(24.0).reshape(3, 8) / 24


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        (model(INPUT) - step).pow(2).mean().backward()
        optimizer.step()


def beside_torch(adamw: AdamW) -> tuple[nn.Module, Any, nn.Module, Any]:
    model, twin = layered(seed=1), layered(seed=1)
    return (
        model,
        adamw(model.named_parameters(), lr=1e-2, **FP32),
        twin,
        torch.optim.AdamW(twin.named_parameters(), lr=1e-2),
    )


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "clear": lambda optimizer, _: optimizer.state.clear(),
    "pop": lambda optimizer, p: optimizer.state.pop(p, None),
    "popitem": lambda optimizer, _: optimizer.state.popitem(),
    "setting": lambda optimizer, p: optimizer.state.__setitem__(p, {}),
    "deleting": lambda optimizer, p: optimizer.state.__delitem__(p),
    "update": lambda optimizer, p: optimizer.state.update({p: {}}),
    "setdefault": lambda optimizer, p: optimizer.state.setdefault(p, {}),
    "state.parameter.": lambda optimizer, p: optimizer.state[p],
    "setting .state": lambda optimizer, p: setattr(optimizer, "state", defaultdict(dict, {p: {}})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_who_would_reset_it_by_hand_is_told_how(change: str, adamw: AdamW) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = adamw([parameter])
    with pytest.raises(ballast.Rejected, match=f"{change}.*is in its run, '{optimizer.run}'.*make another optimizer"):
        CHANGES[change](optimizer, parameter)
    assert len(optimizer.state) == 0 and parameter not in optimizer.state


def test_it_may_be_set_empty_before_there_is_any(adamw: AdamW) -> None:
    """As fastai's Learner.freeze() does."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = adamw([parameter])
    optimizer.state = defaultdict(dict)
    parameter.sum().backward()
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied
    with pytest.raises(ballast.Rejected, match="setting .state.*is in its run"):
        optimizer.state = defaultdict(dict)
    loaded = adamw([nn.Parameter(torch.ones(3))], run=f"{optimizer.run}-loaded")
    loaded.load_state_dict(optimizer.state_dict())
    with pytest.raises(ballast.Rejected, match="setting .state.*is in its run"):
        loaded.state = defaultdict(dict)


def test_an_entry_that_is_taken_out_of_the_state_dict_begins_anew(adamw: AdamW) -> None:
    model, ours, twin, theirs = beside_torch(adamw)
    for net, optimizer in ((model, ours), (twin, theirs)):
        train(net, optimizer, 3)
        state = optimizer.state_dict()
        del state["state"][0]
        optimizer.load_state_dict(state)
        train(net, optimizer, 3)
    assert_close(model, twin)


def test_moments_of_what_is_frozen_wait_for_it(adamw: AdamW) -> None:
    model, ours, twin, theirs = beside_torch(adamw)
    train(twin, theirs, 4)
    model.load_state_dict(twin.state_dict())
    saved = copy.deepcopy(theirs.state_dict())
    for net in (model, twin):
        net[0].requires_grad_(False)
    ours.load_state_dict(saved)
    for net, optimizer in ((model, ours), (twin, theirs)):
        train(net, optimizer, 2)
        assert sorted(optimizer.state_dict()["state"]) == list(range(6))
    # A checkpoint of the phase has them too.
    again = layered(seed=2)
    resumed = adamw(again.named_parameters(), lr=1e-2, run=f"{ours.run}-resumed", **FP32)
    again.load_state_dict(model.state_dict())
    again[0].requires_grad_(False)
    resumed.load_state_dict(ours.state_dict())
    for net, optimizer in ((model, ours), (twin, theirs), (again, resumed)):
        net[0].requires_grad_(True)
        train(net, optimizer, 3)
    assert_close(model, twin)
    assert_close(again, twin)


def test_hooks_that_change_what_is_loaded_are_heard(adamw: AdamW) -> None:
    model, ours, twin, theirs = beside_torch(adamw)

    def without_the_rest(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {key: value for key, value in state["state"].items() if key < 2}}

    for net, optimizer in ((model, ours), (twin, theirs)):
        train(net, optimizer, 3)
        optimizer.register_load_state_dict_pre_hook(without_the_rest)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(net, optimizer, 3)
    assert_close(model, twin)


def test_hooks_on_what_is_saved_see_the_state_once_and_may_change_it(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), **FP32)
    optimizer.register_client_state("place", lambda: {"epoch": 1}, lambda _: None)  # each step keeps the options
    heard: list[int] = []

    def halve(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        heard.append(len(state["state"]))
        return {**state, "state": {k: {n: v.bfloat16() for n, v in one.items()} for k, one in state["state"].items()}}

    optimizer.register_state_dict_pre_hook(lambda _: heard.append(-1))
    optimizer.register_state_dict_post_hook(halve)
    optimizer.connect()
    train(model, optimizer, 2)
    assert heard == []
    saved = optimizer.state_dict()
    assert heard == [-1, 6]
    assert {value.dtype for one in saved["state"].values() for value in one.values()} == {torch.bfloat16}


@pytest.mark.parametrize("weights", ["server", "match"])
def test_the_runs_own_state_may_be_loaded_beside_the_option_weights(adamw: AdamW, run: str, weights: str) -> None:
    """As a script does that resumes a run which the daemon still has. Another state is refused, and the option named."""
    formats: dict[str, Any] = {"run": run, "master": "fp32", "state": "fp32", "weights": weights}
    model = layered(seed=1)
    with adamw(model.named_parameters(), **{**formats, "weights": None}) as optimizer:
        train(model, optimizer, 2)
        earlier = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 1)
        saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    model = layered(seed=2)
    model.load_state_dict(saved[0])
    with adamw(model.named_parameters(), **formats) as optimizer:
        optimizer.load_state_dict(saved[1])
        train(model, optimizer, 1)
        assert optimizer.last_result is not None and optimizer.last_result.step == 4
    optimizer = adamw(model.named_parameters(), **formats)
    optimizer.load_state_dict(earlier)
    with pytest.raises(ballast.Rejected, match=f"was given others: leave that call out, or weights='{weights}'"):
        train(model, optimizer, 1)
