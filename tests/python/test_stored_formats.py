"""A run whose tensors are stored otherwise from some step on: options of param_groups that say how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

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
