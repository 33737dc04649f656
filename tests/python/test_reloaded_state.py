"""load_state_dict(state_dict()), as Accelerate's wrapper does when it is made: it changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ballast
from models import assert_close, layered, same_bits, weights_of

AdamW = Callable[..., ballast.AdamW]


def fit(model: torch.nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def reload(optimizer: torch.optim.Optimizer) -> None:
    """As accelerate.optimizer.AcceleratedOptimizer does, which moves the state to a device in between."""
    optimizer.load_state_dict(_moved(optimizer.state_dict()))


def _moved(state: Any) -> Any:
    if isinstance(state, (list, tuple)):
        return type(state)(_moved(item) for item in state)
    if isinstance(state, dict):
        return type(state)({key: _moved(value) for key, value in state.items()})
    return state.to("cpu") if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("options", [{}, {"overlap_forward": True}, {"commit": "staged"}], ids=str)
def test_loading_its_own_state_changes_nothing(options: dict[str, Any], adamw: AdamW, run: str) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer, other = adamw(model.named_parameters(), **options), adamw(twin.named_parameters(), run=f"{run}-twin")
    reload(optimizer)
    assert optimizer._membership.session is None, "nothing is sent"
    optimizer.connect()
    for step in range(1, 4):
        reload(optimizer)
        groups = [dict(group) for group in optimizer.param_groups]
        fit(model, optimizer)
        fit(twin, other)
        reload(optimizer)
        assert [dict(group) for group in optimizer.param_groups] == groups
        assert optimizer.last_result is not None and optimizer.last_result.step == step
        assert not optimizer.step_was_skipped
    assert same_bits(weights_of(model), weights_of(twin))


def test_a_state_is_loaded_while_a_step_returns(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), overlap_forward=True)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.5
    fit(model, optimizer)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("joined", [False, True])
def test_moments_that_were_loaded_stay_until_they_are_sent(joined: bool, adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for _ in range(3):
        fit(twin, theirs)
    model.load_state_dict(twin.state_dict())
    optimizer = adamw(model.named_parameters(), lr=1e-2, state="fp32", master="fp32")
    optimizer.load_state_dict(theirs.state_dict())
    if joined:
        optimizer.connect()
    reload(optimizer)
    kept, given = optimizer.state_dict()["state"], theirs.state_dict()["state"]
    assert kept.keys() == given.keys()
    for index, state in given.items():
        for name, value in state.items():
            torch.testing.assert_close(kept[index][name], value, rtol=0, atol=0)
    fit(model, optimizer)
    fit(twin, theirs)
    made, wanted = optimizer.state_dict()["state"], theirs.state_dict()["state"]
    for index, state in wanted.items():
        for name, value in state.items():
            torch.testing.assert_close(made[index][name], value, rtol=1e-5, atol=1e-8)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"overlap_forward": True}, {"commit": "staged"}], ids=str)
def test_the_state_from_before_the_first_step_begins_all_anew(
    weights: bool, options: dict[str, Any], adamw: AdamW
) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    exact = {"lr": 0.1, "master": "fp32", "state": "fp32", "rounding": "nearest"}
    optimizer, other = adamw(model.named_parameters(), **exact, **options), torch.optim.AdamW(twin.parameters(), lr=0.1)
    pairs: list[tuple[torch.nn.Module, torch.optim.Optimizer]] = [(model, optimizer), (twin, other)]
    for one, its in pairs:
        start = copy.deepcopy((one.state_dict(), its.state_dict()))
        for _ in range(3):  # as folds of one data set
            if weights:
                one.load_state_dict(start[0])
            its.load_state_dict(start[1])
            for _ in range(3):
                fit(one, its)
    optimizer.wait()
    assert_close(model, twin)
    assert optimizer.state_dict()["state"][0]["step"] == 3


def test_the_state_from_before_the_first_step_leaves_a_run_that_another_trainer_takes_up(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    start = optimizer.state_dict()
    fit(model, optimizer)
    optimizer.close()
    again = adamw(model.named_parameters())
    again.load_state_dict(start)
    fit(model, again)
    assert again.state_dict()["state"][0]["step"] == 2
