"""ballast.numerics makes the daemon's bits: the same gradients into both, and the weights are equal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import ballast
from ballast import numerics

STEPS = 20
OPTIONS = {
    "default": {},
    "nearest": {"rounding": "nearest"},
    "fp32 state": {"state_dtype": "fp32"},
    "32-bit weights": {"master_weight_bits": 32},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_on_the_daemon_ends_with_these_bits(adamw: Callable[..., ballast.AdamW], name: str) -> None:
    options = OPTIONS[name]
    torch.manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(130, 70))  # three tiles, the last one ragged
    weight = numerics.encode(parameter.detach().numpy(), f"split{options.get('master_weight_bits', 24)}")
    state = numerics.new_state("adamw", (130, 70), weight.format, options.get("state_dtype", "companded8"))
    hyper = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    rounding, key = options.get("rounding", "stochastic"), numerics.tensor_key("layer.weight")
    optimizer = adamw([("layer.weight", parameter)], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, **options)
    for t in range(1, STEPS + 1):
        grad = torch.randn(130, 70)
        (parameter * grad).sum().backward()  # the gradient is `grad`, to the bit
        optimizer.step()
        numerics.step("adamw", weight, grad.numpy(), state, hyper, t, rounding=rounding, key=key)
    ours, theirs = numerics.decode(weight), parameter.detach().numpy()
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))
