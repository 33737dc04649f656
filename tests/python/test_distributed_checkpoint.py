"""torch.distributed.checkpoint, which would make a step of the run to save it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict as dcp

import ballast
from models import layered, same_bits, weights_of

AdamW = Callable[..., ballast.AdamW]

CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "get_optimizer_state_dict": lambda model, optimizer, _: dcp.get_optimizer_state_dict(model, optimizer),
    "get_state_dict": lambda model, optimizer, _: dcp.get_state_dict(model, optimizer),
    "set_optimizer_state_dict": lambda model, optimizer, saved: dcp.set_optimizer_state_dict(model, optimizer, saved),
    "set_state_dict": lambda model, optimizer, saved: dcp.set_state_dict(
        model, optimizer, model_state_dict=model.state_dict(), optim_state_dict=saved
    ),
}


def saved_elsewhere() -> Any:
    """What it made of torch's own AdamW."""
    model = layered(seed=1)
    return dcp.get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))


def train(model: torch.nn.Module, optimizer: ballast.AdamW) -> None:
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("loaded", [False, True])
def test_it_is_refused_before_anything_is_sent(call: str, loaded: bool, adamw: AdamW, run: str) -> None:
    model, beside = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), lr=0.5)
    undisturbed = adamw(beside.named_parameters(), lr=0.5, run=f"{run}-beside")
    if loaded:
        optimizer.load_state_dict(optimizer.state_dict())
    for _ in range(2):
        train(model, optimizer)
        train(beside, undisturbed)
    before, status = weights_of(model), optimizer.run_status()
    with pytest.raises(
        ballast.Rejected, match=f"checkpoint cannot save or load.*'{run}'.*real step.*get_model_state_dict"
    ):
        CALLS[call](model, optimizer, saved_elsewhere())
    assert same_bits(weights_of(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]
    after = optimizer.run_status()
    assert (after.step, after.received_bytes) == (status.step, status.received_bytes)
    # Moments too: the next steps are those of a run that nobody asked.
    for _ in range(2):
        train(model, optimizer)
        train(beside, undisturbed)
    assert optimizer.last_result is not None and (optimizer.last_result.step, bool(optimizer.last_result)) == (4, True)
    assert same_bits(weights_of(model), weights_of(beside))


def test_the_empty_state_is_copied_as_what_it_is(adamw: AdamW, run: str) -> None:
    state = adamw(layered(seed=1).named_parameters()).state
    for other in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state)), state.copy()):
        assert type(other) is type(state) and not other and vars(other) == {"_run": run}


def test_the_models_part_works(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    train(model, optimizer)
    assert dcp.get_model_state_dict(model).keys() == model.state_dict().keys()
    assert not optimizer.state and optimizer.state_dict()["state"] == {}
