"""A run that grows in the middle of a training: groups are added, parameters unfrozen, options changed, as in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from models import layered, same_bits, weights_of
from side_by_side import side_by_side
from test_moments import EXACT, RULES, difference, train

Make = Callable[..., Any]
AdamW = Callable[..., ballast.AdamW]
Ranks = list[tuple[nn.Sequential, ballast.AdamW]]
COMMITS: list[dict[str, Any]] = [{}, {"commit": "staged"}, {"overlap_forward": True}]
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def settle(optimizer: Any) -> None:
    """What the next first gradient does before it leaves."""
    steps = optimizer._steps
    steps._settled(steps.joined())


def stored(optimizer: Any) -> dict[int, dict[str, torch.Tensor]]:
    found: dict[int, dict[str, torch.Tensor]] = optimizer.state_dict()["state"]
    return found


def same_state(one: dict[int, dict[str, torch.Tensor]], other: dict[int, dict[str, torch.Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        one[i].keys() == other[i].keys() and all(torch.equal(one[i][name], other[i][name]) for name in one[i])
        for i in one
    )


@pytest.mark.parametrize("frozen", [[0], [1], [2], [0, 1]], ids=str)
@pytest.mark.parametrize("options", COMMITS, ids=str)
def test_what_is_unfrozen_trains_as_in_torch(adamw: AdamW, options: dict[str, Any], frozen: list[int]) -> None:
    ours, theirs = layered(seed=1), layered(seed=1)
    for model in (ours, theirs):
        for layer in frozen:
            model[layer].requires_grad_(False)
    optimizer = adamw(ours.named_parameters(), **OPTIONS, **EXACT, **options)
    peer = torch.optim.AdamW(theirs.parameters(), **OPTIONS)
    for layer in [*frozen, None]:
        train(ours, optimizer, range(3))
        train(theirs, peer, range(3))
        if layer is not None:
            ours[layer].requires_grad_(True)
            theirs[layer].requires_grad_(True)
    optimizer.wait()
    assert difference(ours, theirs) < 1e-6
    made = 3 * (len(frozen) + 1)
    assert optimizer.last_result is not None and optimizer.last_result.step == made
    assert optimizer.run_status().steps_applied == made
    updates = [int(peer.state[parameter]["step"]) for parameter in theirs.parameters()]
    assert [int(state["step"]) for state in stored(optimizer).values()] == updates


@pytest.mark.parametrize(("kind", "peer", "options"), RULES, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("commit", ["release", "staged"])
def test_a_group_is_added_as_in_torch(make: Make, kind: Any, peer: Any, options: dict[str, Any], commit: str) -> None:
    ours, theirs = layered(seed=1), layered(seed=1)
    optimizer = make(kind, ours[1].named_parameters(prefix="1"), **options, **EXACT, commit=commit)
    reference = peer(theirs[1].parameters(), **options)
    for layer, lr in ((0, 0.02), (2, 0.005)):
        train(ours, optimizer, range(3))
        train(theirs, reference, range(3))
        optimizer.add_param_group({"params": ours[layer].named_parameters(prefix=str(layer)), "lr": lr})
        reference.add_param_group({"params": theirs[layer].parameters(), "lr": lr})
    train(ours, optimizer, range(3))
    train(theirs, reference, range(3))
    assert difference(ours, theirs) < 1e-6
    assert optimizer.last_result.step == 9


@pytest.mark.parametrize("options", COMMITS, ids=str)
def test_eps_and_other_options_change_as_in_torch(adamw: AdamW, options: dict[str, Any]) -> None:
    ours, theirs = layered(seed=1), layered(seed=1)
    optimizer = adamw(ours.named_parameters(), **OPTIONS, **EXACT, **options)
    peer = torch.optim.AdamW(theirs.parameters(), **OPTIONS)
    for values in ({}, {"eps": 1e-2}, {"betas": (0.5, 0.9), "eps": 1e-3}):
        optimizer.param_groups[0].update(values)
        peer.param_groups[0].update(values)
        train(ours, optimizer, range(3))
        train(theirs, peer, range(3))
    optimizer.wait()
    assert difference(ours, theirs) < 1e-6


@pytest.mark.parametrize("options", [{}, {"state": "bf16"}, {"tensor_clip": "adagc"}], ids=str)
def test_what_was_there_keeps_its_bits(adamw: AdamW, options: dict[str, Any]) -> None:
    """In the run's own formats; and it goes on as one that did not grow, but for what the new layer does."""
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model[:2].named_parameters(), lr=1e-2, **options)
    other = adamw(twin[:2].named_parameters(), lr=1e-2, run=f"{optimizer.run}-twin", **options)
    for which, by in ((model, optimizer), (twin, other)):
        which[2].requires_grad_(False)
        train(which, by, range(4))
    before, kept = stored(optimizer), weights_of(model)
    optimizer.add_param_group({"params": nn.Parameter(torch.ones(3)), "eps": 1e-3})
    settle(optimizer)
    assert optimizer.run_status().generation == 3
    assert same_state(stored(optimizer), before) and same_bits(weights_of(model), kept)
    train(model, optimizer, range(4, 8))
    train(twin, other, range(4, 8))
    assert same_bits(weights_of(model), weights_of(twin))
    assert same_state(stored(optimizer), stored(other))


def test_state_goes_to_torch_and_back_after_it(adamw: AdamW) -> None:
    ours, theirs = layered(seed=1), layered(seed=1)
    ours[0].requires_grad_(False)
    theirs[0].requires_grad_(False)
    optimizer = adamw(ours.named_parameters(), **OPTIONS, **EXACT)
    peer = torch.optim.AdamW(theirs.parameters(), **OPTIONS)
    train(ours, optimizer, range(3))
    train(theirs, peer, range(3))
    ours[0].requires_grad_(True)
    theirs[0].requires_grad_(True)
    train(ours, optimizer, range(3, 5))
    train(theirs, peer, range(3, 5))
    saved, kept = optimizer.state_dict(), copy.deepcopy(ours.state_dict())
    train(ours, optimizer, range(5, 7))
    gone_on = weights_of(ours)
    ours.load_state_dict(kept)
    optimizer.load_state_dict(saved)
    train(ours, optimizer, range(5, 7))
    assert same_bits(weights_of(ours), gone_on)
    theirs.load_state_dict(kept)
    peer.load_state_dict(saved)
    train(theirs, peer, range(5, 7))
    assert difference(ours, theirs) < 1e-6


def test_state_that_was_loaded_comes_with_what_is_added(adamw: AdamW, run: str) -> None:
    """Both before the same first gradient, of a run that exists and of one that does not."""
    theirs = layered(seed=1)
    peer = torch.optim.AdamW(theirs.parameters(), **OPTIONS)
    train(theirs, peer, range(3))
    for steps_before in (0, 2):
        ours, expected = copy.deepcopy(theirs), copy.deepcopy(theirs)
        optimizer = adamw(ours[1:].named_parameters(), **OPTIONS, **EXACT, run=f"{run}-{steps_before}")
        optimizer.connect()
        train(ours, optimizer, range(steps_before))
        ours.zero_grad()  # of the layer that the optimizer has not yet
        ours.load_state_dict(theirs.state_dict())
        optimizer.add_param_group({"params": ours[0].parameters()})
        state = peer.state_dict()
        order = [2, 3, 4, 5, 0, 1]  # the group that was added has the first layer
        state["state"] = {place: state["state"][index] for place, index in enumerate(order)}
        state["param_groups"] = [
            {**state["param_groups"][0], "params": [0, 1, 2, 3]},
            {**state["param_groups"][0], "params": [4, 5]},
        ]
        optimizer.load_state_dict(state)
        beside = torch.optim.AdamW(expected.parameters(), **OPTIONS)
        beside.load_state_dict(peer.state_dict())
        train(ours, optimizer, range(5, 8))
        train(expected, beside, range(5, 8))
        assert difference(ours, expected) < 1e-6


@pytest.mark.parametrize("frozen", [1, 2])
def test_micro_batches_go_on_where_a_run_grows(adamw: AdamW, frozen: int) -> None:
    """The gradient of the last layer is made before any other, and so before the run grows."""
    ours, theirs = layered(seed=1), layered(seed=1)
    ours[frozen].requires_grad_(False)
    theirs[frozen].requires_grad_(False)
    optimizer = adamw(ours.named_parameters(), **OPTIONS, **EXACT, gradient_accumulation_steps=2)
    peer = torch.optim.AdamW(theirs.parameters(), **OPTIONS)
    for step in range(6):
        if step == 3:
            ours[frozen].requires_grad_(True)
            theirs[frozen].requires_grad_(True)
        for micro in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + micro))
            with optimizer.accumulate(final=micro == 1):
                ours(x).square().sum().backward()
            theirs(x).square().sum().backward()
        for one in (optimizer, peer):
            one.step()
            one.zero_grad()
    assert difference(ours, theirs) < 1e-6


# --- several ranks --------------------------------------------------------------------------------------------------


def team(adamw: AdamW, world: int, **options: Any) -> Ranks:
    models = [layered(seed=1) for _ in range(world)]
    return [
        (model, adamw(model[1:].named_parameters(), **OPTIONS, rank=rank, world=world, **EXACT, **options))
        for rank, model in enumerate(models)
    ]


def together(ranks: Ranks, work: Callable[..., Any]) -> list[Any]:
    return side_by_side(len(ranks), lambda rank: work(*ranks[rank]))


def grow(model: nn.Sequential, optimizer: ballast.AdamW) -> None:
    optimizer.add_param_group({"params": model[0].named_parameters(prefix="new"), "lr": 0.02})
    optimizer.param_groups[0]["eps"] = 1e-4


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("commit", ["release", "staged"])
def test_all_ranks_grow_together_as_torch_does(adamw: AdamW, world: int, commit: str) -> None:
    ranks, theirs = team(adamw, world, commit=commit), layered(seed=1)
    peer = torch.optim.AdamW(theirs[1:].parameters(), **OPTIONS)
    together(ranks, lambda model, optimizer: train(model, optimizer, range(3)))
    train(theirs, peer, range(3))

    def go_on(model: nn.Sequential, optimizer: ballast.AdamW) -> None:
        grow(model, optimizer)
        train(model, optimizer, range(3, 6))

    together(ranks, go_on)
    peer.add_param_group({"params": theirs[0].parameters(), "lr": 0.02})
    peer.param_groups[0]["eps"] = 1e-4
    train(theirs, peer, range(3, 6))
    for model, optimizer in ranks:
        assert same_bits(weights_of(model), weights_of(ranks[0][0]))
        assert difference(model, theirs) < 1e-6
        assert optimizer.last_result is not None and optimizer.last_result.step == 6


@pytest.mark.parametrize("formats", [{}, {"state": "bf16"}, {"master": "bf16"}], ids=str)
def test_weights_that_were_touched_and_put_back_keep_no_rank_from_growing(
    adamw: AdamW, formats: dict[str, str]
) -> None:
    """As by an average that is put in their place for an evaluation."""
    ranks = team(adamw, 4)
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2)))

    def go_on(model: nn.Sequential, optimizer: ballast.AdamW) -> None:
        with torch.no_grad():
            for parameter in model[1:].parameters():
                parameter.mul_(2).div_(2)
        grow(model, optimizer)
        optimizer.param_groups[0].update(formats)
        train(model, optimizer, range(2, 4))

    together(ranks, go_on)
    for model, optimizer in ranks:
        assert same_bits(weights_of(model), weights_of(ranks[0][0]))
        assert optimizer.last_result is not None and optimizer.last_result.step == 4
