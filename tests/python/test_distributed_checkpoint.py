"""torch.distributed.checkpoint saves and loads a run's state, and makes no step for it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dcp

import ballast
from models import layered, same_bits, weights_of

AdamW = Callable[..., ballast.AdamW]
EXACT = {"master": "fp32", "state": "fp32"}


def train(model: torch.nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("loaded", [False, True])
def test_it_saves_what_torchs_own_has_and_makes_no_step(loaded: bool, adamw: AdamW, run: str) -> None:
    model, beside, theirs = layered(seed=1), layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), lr=0.5, **EXACT)
    undisturbed = adamw(beside.named_parameters(), lr=0.5, run=f"{run}-beside", **EXACT)
    peer = torch.optim.AdamW(theirs.parameters(), lr=0.5)
    if loaded:
        optimizer.load_state_dict(optimizer.state_dict())
    for one, other in ((model, optimizer), (beside, undisturbed), (theirs, peer)):
        train(one, other, 2)
    before, status = weights_of(model), optimizer.run_status()
    saved, wanted = dcp.get_optimizer_state_dict(model, optimizer), dcp.get_optimizer_state_dict(theirs, peer)
    assert saved["state"].keys() == wanted["state"].keys()
    for name, state in wanted["state"].items():
        assert saved["state"][name].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(saved["state"][name][key], value, rtol=1e-4, atol=1e-7)
    assert same_bits(weights_of(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]
    after = optimizer.run_status()
    assert (after.step, after.received_bytes) == (status.step, status.received_bytes)
    train(model, optimizer, 2)
    train(beside, undisturbed, 2)
    assert same_bits(weights_of(model), weights_of(beside))


def test_a_new_process_goes_on_from_files(adamw: AdamW, run: str, tmp_path: Path) -> None:
    """As its documentation has it: the state of a new optimizer is the form that is filled in."""
    model, second = layered(seed=1), layered(seed=2)
    optimizer = adamw(model.named_parameters(), lr=0.1, **EXACT)
    train(model, optimizer, 3)
    both = {"model": dcp.get_model_state_dict(model), "optim": dcp.get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(both, checkpoint_id=tmp_path, no_dist=True)
    again = adamw(second.named_parameters(), lr=0.2, run=f"{run}-again", **EXACT)
    form = {"model": dcp.get_model_state_dict(second), "optim": dcp.get_optimizer_state_dict(second, again)}
    checkpoint.load(form, checkpoint_id=tmp_path, no_dist=True)
    dcp.set_state_dict(second, again, model_state_dict=form["model"], optim_state_dict=form["optim"])
    assert [group["lr"] for group in again.param_groups] == [0.1]
    train(model, optimizer, 3)
    train(second, again, 3)
    assert same_bits(weights_of(model), weights_of(second))


def test_a_rollback_in_the_middle(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), lr=0.1, **EXACT)
    train(model, optimizer, 2)
    saved = copy.deepcopy(dcp.get_state_dict(model, optimizer))
    train(model, optimizer, 2)
    wanted = weights_of(model)
    dcp.set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    train(model, optimizer, 2)
    assert same_bits(weights_of(model), wanted)
    assert optimizer.last_result is not None and optimizer.last_result.step == 6


def test_one_rank_of_two_saves_alone(adamw: AdamW) -> None:
    models = [layered(seed=1), layered(seed=1)]
    one, other = (adamw(model.named_parameters(), rank=rank, world=2) for rank, model in enumerate(models))
    one.connect()
    other.connect()
    one._starting_state.settle(one._membership.session)
    saved = dcp.get_optimizer_state_dict(models[0], one)
    assert saved["state"].keys() == dict(models[0].named_parameters()).keys()
    assert one.run_status().step == 0


def test_the_empty_state_is_copied_as_what_it_is(adamw: AdamW, run: str) -> None:
    state = adamw(layered(seed=1).named_parameters()).state
    for other in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state)), state.copy()):
        assert type(other) is type(state) and not other and vars(other) == vars(state)


def test_the_models_part_works(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    train(model, optimizer)
    assert dcp.get_model_state_dict(model).keys() == model.state_dict().keys()
    assert not optimizer.state
