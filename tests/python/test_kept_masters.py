"""changed_weights="upload", where the daemon's master is more than the parameter holds: who changes one element loses that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ballast
from models import same_bits
from side_by_side import side_by_side

Make = Callable[..., Any]
NARROW = [
    (torch.bfloat16, {}),
    (torch.bfloat16, {"master": "fp32"}),
    (torch.bfloat16, {"master": "flash24"}),
    (torch.float16, {}),
    (torch.float32, {"serving": "int8-tensor"}),
    (torch.float32, {"serving": "fp8-e4m3"}),
]


def weights(dtype: torch.dtype) -> nn.Parameter:
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 1
    values[1] = 3.0  # the largest
    return nn.Parameter(values.to(dtype))


def train(optimizer: Any, weight: nn.Parameter, steps: int, change: Callable[[Tensor, int], object] | None) -> None:
    for step in range(steps):
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if change is not None:
            with torch.no_grad():
                change(weight, step)


def change_one(weight: Tensor, step: int) -> None:
    weight[0] = 1.5 if step % 2 else 2.5


def master_of(optimizer: Any) -> Tensor:
    master: Tensor = optimizer.state_dict()["state"][0]["master"]
    return master


@pytest.mark.parametrize(("dtype", "formats"), NARROW, ids=str)
def test_the_masters_of_unchanged_elements_are_kept(
    dtype: torch.dtype, formats: dict[str, Any], make: Make, run: str
) -> None:
    """Steps that are too small for the parameter's dtype add up, as where nothing is changed."""
    options = {"lr": 1e-4, "rounding": "nearest", "changed_weights": "upload", **formats}
    changed, whole = weights(dtype), weights(dtype)
    one = make(ballast.AdamW, [("weight", changed)], **options)
    train(one, changed, 30, change_one)
    other = make(ballast.AdamW, [("weight", whole)], run=f"{run}-whole", **options)
    train(other, whole, 30, None)
    assert same_bits([master_of(one)[1:]], [master_of(other)[1:]])
    assert one.run_status().generation == 30  # all but the last change were uploaded
    train(one, changed, 1, None)
    assert (master_of(one)[0] - 1.5).abs() < 1e-3  # and are trained on


def test_a_tensor_that_was_changed_as_a_whole_has_no_other_masters(make: Make) -> None:
    weight = weights(torch.bfloat16)
    optimizer = make(ballast.AdamW, [weight], lr=1e-5, changed_weights="upload")
    train(optimizer, weight, 3, lambda weight, step: weight.mul_(0.5))
    given = weight.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, weight, 1, None)
    assert torch.equal(weight, given) and torch.equal(master_of(optimizer), given.float())


@pytest.mark.parametrize(("dtype", "formats"), NARROW, ids=str)
def test_every_rank_goes_on_with_them(dtype: torch.dtype, formats: dict[str, Any], make: Make, run: str) -> None:
    both, whole = [weights(dtype) for _ in range(2)], weights(dtype)
    options = {"lr": 1e-4, "rounding": "nearest", "changed_weights": "upload", **formats}
    ranks = [make(ballast.AdamW, [("weight", one)], rank=rank, world=2, **options) for rank, one in enumerate(both)]
    side_by_side(2, lambda rank: train(ranks[rank], both[rank], 10, change_one))
    other = make(ballast.AdamW, [("weight", whole)], run=f"{run}-whole", **options)
    train(other, whole, 10, None)
    assert same_bits([both[0].detach()], [both[1].detach()])
    assert same_bits([master_of(ranks[1])[1:]], [master_of(other)[1:]])
