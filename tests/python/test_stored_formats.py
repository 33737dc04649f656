"""A run whose tensors are stored otherwise from some step on: options of param_groups that say how."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ballast import progress, rank_zero

import ballast
from models import layered, same_bits, weights_of
from side_by_side import side_by_side
from test_growth import OPTIONS, same_state, settle, stored
from test_moments import difference, train

AdamW = Callable[..., ballast.AdamW]
WIDE = {"master": "fp32", "state": "fp32"}
NARROW = {"master": "bf16", "state": "bf16"}


@pytest.mark.parametrize("options", [{}, {"commit": "staged"}, {"overlap_forward": True}], ids=str)
def test_wider_formats_keep_every_bit_and_train_as_torch_from_there(adamw: AdamW, options: dict[str, Any]) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), **OPTIONS, gradient_dtype="fp32", **options)
    train(model, optimizer, range(3))
    before = stored(optimizer)
    optimizer.param_groups[0].update(WIDE)
    settle(optimizer)
    assert same_state(stored(optimizer), before)
    peer = torch.optim.AdamW(twin.parameters(), **OPTIONS)
    twin.load_state_dict(model.state_dict())
    peer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(3, 9))
    train(twin, peer, range(3, 9))
    optimizer.wait()
    assert difference(model, twin) < 1e-6


@pytest.mark.parametrize("world", [1, 8])
def test_narrower_formats_round_what_there_is_and_every_rank_follows(adamw: AdamW, world: int) -> None:
    """Weights here are wider than the daemon's, until the next step brings those."""
    models = [layered(seed=1) for _ in range(world)]
    optimizers = [
        adamw(model.named_parameters(), **OPTIONS, **WIDE, rank=rank, world=world) for rank, model in enumerate(models)
    ]
    side_by_side(world, lambda rank: train(models[rank], optimizers[rank], range(3)))
    before = stored(optimizers[0])

    def go_on(rank: int) -> None:
        optimizers[rank].param_groups[0].update(NARROW)
        train(models[rank], optimizers[rank], range(3, 5))

    side_by_side(world, go_on)
    for model in models:
        assert same_bits(weights_of(model), weights_of(models[0]))
        assert all(torch.equal(weight, weight.bfloat16().float()) for weight in weights_of(model))
    assert [int(state["step"]) for state in stored(optimizers[0]).values()] == [5] * len(before)
    result = optimizers[0].last_result
    assert result is not None and result.applied and result.step == 5


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("serving", "then"), [("int8-row", None), (None, "fp8-e4m3"), ("fp8-e4m3", "int8-tensor")])
def test_weights_are_served_otherwise(adamw: AdamW, serving: Any, then: Any, dtype: torch.dtype, world: int) -> None:
    """Every rank has what the step before has brought, until the next one brings what is served since."""
    models = [layered(seed=1, dtype=dtype) for _ in range(world)]
    ranks = [
        adamw(model.named_parameters(), **OPTIONS, serving=serving, rank=rank, world=world)
        for rank, model in enumerate(models)
    ]

    def go_on(rank: int) -> None:
        fit(models[rank], ranks[rank])
        ranks[rank].param_groups[0]["serving"] = then
        fit(models[rank], ranks[rank])

    side_by_side(world, go_on)
    assert ranks[0].last_result is not None and ranks[0].last_result.applied
    assert [int(state["step"]) for state in stored(ranks[0]).values()] == [2] * 6
    landed = weights_of(models[0])
    for rank, model in zip(ranks, models):
        rank.pull()
        assert same_bits(weights_of(model), landed)


def fit(model: torch.nn.Module, optimizer: ballast.AdamW) -> None:
    model(torch.ones(2, 8, dtype=model[0].weight.dtype)).float().square().mean().backward()
    optimizer.step()


def test_only_one_group_is_stored_otherwise(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizers = [
        adamw([{"params": which[0].parameters()}, {"params": which[1:].parameters()}], **OPTIONS, run=f"{name}-stored")
        for name, which in (("one", model), ("other", twin))
    ]
    for which, optimizer in zip((model, twin), optimizers):
        train(which, optimizer, range(3))
    before = stored(optimizers[0])
    optimizers[0].param_groups[0].update(NARROW)
    settle(optimizers[0])
    after = stored(optimizers[0])
    rest = [index for index in before if index > 1]
    assert same_state({i: after[i] for i in rest}, {i: before[i] for i in rest})
    for index in (0, 1):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(after[index][name], before[index][name].bfloat16().float())
    for which, optimizer in zip((model, twin), optimizers):
        train(which, optimizer, range(3, 4))
    assert not same_bits(weights_of(model[0]), weights_of(twin[0]))


@pytest.mark.parametrize("policy", ["refuse", "upload"])
def test_weights_that_were_changed_before_the_same_step_are_not_lost(adamw: AdamW, policy: Any) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), **OPTIONS, **WIDE, changed_weights=policy)
    other = adamw(twin.named_parameters(), **OPTIONS, **WIDE, changed_weights=policy, run=f"{optimizer.run}-twin")
    for which, by in ((model, optimizer), (twin, other)):
        train(which, by, range(2))
        with torch.no_grad():
            which[0].weight.fill_(1.5)
            which[1].weight.mul_(2).div_(2)  # and back
        by.param_groups[0]["state" if by is other else "master"] = "bf16"
    for which, by in ((model, optimizer), (twin, other)):
        if policy == "refuse":
            with pytest.raises(ballast.Rejected, match="the weights of '0.weight' were changed after step 2"):
                train(which, by, range(2, 3))
            assert by.run_status().steps_applied == 2
            continue
        train(which, by, range(2, 3))
        assert (which[0].weight - 1.5).abs().max() < 0.1


def test_a_rank_that_has_not_heard_of_a_rewind_follows_it(adamw: AdamW) -> None:
    """Rank 0 goes back, and then both change the format: that rank 1 is at another step is seen, though its weights would
    be rounded in any case."""
    models = [layered(seed=1) for _ in range(2)]
    ranks = [
        adamw(model.named_parameters(), **OPTIONS, **WIDE, rank=rank, world=2, snapshots=2, snapshot_every=1)
        for rank, model in enumerate(models)
    ]
    side_by_side(2, lambda rank: train(models[rank], ranks[rank], range(4)))
    ranks[0].rewind(to=3)
    rewound = []

    def go_on(rank: int) -> None:
        ranks[rank].param_groups[0].update(NARROW)
        try:
            train(models[rank], ranks[rank], range(3, 4))
        except ballast.RunRewound as back:
            rewound.append((rank, back.step))
            models[rank].zero_grad()
            train(models[rank], ranks[rank], range(3, 4))

    side_by_side(2, go_on)
    assert rewound == [(1, 3)]
    assert same_bits(weights_of(models[0]), weights_of(models[1]))
    assert ranks[1].last_result is not None and ranks[1].last_result.step == 4


def test_a_rank_that_was_ended_by_a_rewind_waits_for_rank_zeros_change(
    adamw: AdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, and rank 1 is far ahead of rank 0: its session is over already, by the rewind, when it asks for the change."""
    models = [layered(seed=1) for _ in range(2)]
    ranks = [
        adamw(model.named_parameters(), **OPTIONS, **WIDE, rank=rank, world=2, snapshots=2, snapshot_every=1)
        for rank, model in enumerate(models)
    ]
    side_by_side(2, lambda rank: train(models[rank], ranks[rank], range(4)))
    ranks[0].rewind(to=3)
    waits, ahead = [], threading.Event()

    def pauses(*args: float) -> Iterator[None]:
        waits.append(args)
        if len(waits) == 2:  # for the end of its session, and then for the change
            ahead.set()
        return progress.pauses(*args)

    monkeypatch.setattr(rank_zero, "pauses", pauses)

    def go_on(rank: int) -> None:
        ranks[rank].param_groups[0].update(NARROW)
        if rank == 0:
            assert ahead.wait(60)
            return train(models[0], ranks[0], range(3, 4))
        try:
            with pytest.raises(ballast.RunRewound):
                train(models[1], ranks[1], range(3, 4))
        finally:
            ahead.set()
        models[1].zero_grad()
        train(models[1], ranks[1], range(3, 4))

    side_by_side(2, go_on)
    assert same_bits(weights_of(models[0]), weights_of(models[1]))


def test_what_was_saved_before_does_not_take_the_formats_back(adamw: AdamW) -> None:
    """Neither state_dict() nor client state: how a run stores its tensors is no part of its state."""
    model = layered(seed=1)
    first = adamw(model.named_parameters(), **OPTIONS)
    first.register_client_state("count", lambda: 7, lambda count: None)
    first.connect()
    train(model, first, range(2))
    saved = first.state_dict()
    first.param_groups[0].update(WIDE)
    settle(first)
    first.load_state_dict({**saved, "state": {}})
    generation = first.run_status().generation
    first.close()
    second = adamw(model.named_parameters(), **OPTIONS, **WIDE, weights="match")
    second.register_client_state("count", lambda: 7, lambda count: None)
    assert second.connect()
    assert {key: second.param_groups[0][key] for key in WIDE} == WIDE
    train(model, second, range(2, 3))
    assert second.run_status().generation == generation
