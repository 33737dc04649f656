"""A model of very many small parameters: what a tensor costs by itself must not stand in the way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import ballast

PARAMETERS, ELEMENTS = 20_000, 16


def test_twenty_thousand_parameters_train(adamw: Callable[..., ballast.AdamW]) -> None:
    parameters = {f"layers.{i % 64}.w{i}": nn.Parameter(torch.full((ELEMENTS,), 1.0 + i)) for i in range(PARAMETERS)}
    optimizer = adamw(parameters.items(), lr=0.5, weight_decay=0.0, master="fp32", state="fp32")
    for step in range(1, 4):
        sum(parameter.sum() for parameter in parameters.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
        result = optimizer.last_result
        assert result is not None and (result.step, result.outcome) == (step, "APPLIED")
    # The gradient is 1 at every step, so that each takes lr off.
    first = 1.0 + torch.arange(PARAMETERS)
    torch.testing.assert_close(
        torch.stack([p.data[-1] for p in parameters.values()]),
        first - 1.5,
        rtol=1e-5,
        atol=1e-5,
    )
