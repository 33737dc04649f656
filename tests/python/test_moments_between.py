"""State that goes from a run to one whose tensors are stored and served otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ballast

Make = Callable[..., Any]


def step(optimizer: Any, weight: nn.Parameter, gradient: torch.Tensor, times: int) -> None:
    for _ in range(times):
        (weight * gradient).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "then", [{"master": "split24"}, {"master": "split32"}, {"master": "fp32", "serving": "int8-row"}]
)
@pytest.mark.parametrize(
    "first", [{"master": "fp32"}, {"master": "split32"}, {"master": "fp32", "serving": "int8-tensor"}]
)
def test_masters_go_to_a_run_that_stores_or_serves_them_otherwise(
    make: Make, run: str, dtype: torch.dtype, first: dict[str, Any], then: dict[str, Any]
) -> None:
    """Though it would round them otherwise on the way to the trainer."""
    weight = nn.Parameter(torch.linspace(-1, 1, 4096).reshape(64, 64).to(dtype))
    one = make(ballast.AdamW, [weight], lr=1e-3, **first)
    step(one, weight, torch.linspace(0.5, 1.5, 4096).reshape(64, 64).to(dtype), 2)
    saved = copy.deepcopy(one.state_dict())
    one.close()
    other = make(ballast.AdamW, [weight], lr=1e-3, run=f"{run}-2", **then)
    other.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], **other_formats(other)}]})
    other.param_groups[0]["lr"] = 0.0
    step(other, weight, torch.zeros_like(weight), 1)
    master, wanted = (sd["state"][0]["master"] for sd in (other.state_dict(), saved))
    torch.testing.assert_close(master, wanted, rtol=2.0**-16, atol=0)


def other_formats(optimizer: ballast.AdamW) -> dict[str, Any]:
    return {key: optimizer.param_groups[0][key] for key in ("master", "serving")}
