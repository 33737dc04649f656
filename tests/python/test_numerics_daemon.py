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


@pytest.mark.parametrize("state", ["companded8", "flash8"])
def test_the_daemon_finds_the_codes_again_that_loaded_moments_were_decoded_from(
    adamw: Callable[..., ballast.AdamW], state: str
) -> None:
    """Of blocks whose largest code is not reached, and code 0 of a variance, as NUMERICS.md says; what was never decoded is
    encoded as numerics does."""
    rng = np.random.default_rng(1)
    moments = {}
    for slot, largest in (("momentum", 127), ("variance", 255)):
        made = numerics.encode(np.abs(rng.standard_normal(4096)).astype(np.float32), state, slot)
        top = largest - (state == "companded8")  # which stochastic rounding may make of the largest
        made.planes[slot][:] = rng.integers(0, top, 4096)
        made.planes[slot][::32] = top
        made.planes[slot][1::32] = 0
        moments[slot] = numerics.decode(made)
        moments[slot][64:96] = np.abs(rng.standard_normal(32))
    again = numerics.decode(numerics.encode(moments["variance"], state, "variance"))
    assert (again[96:] != moments["variance"][96:]).any() or state == "flash8"
    parameter = torch.nn.Parameter(torch.ones(4096))
    theirs = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(4096)
    theirs.step()
    kept = theirs.state_dict()
    kept["state"][0] |= {name: torch.from_numpy(moments[slot]) for name, slot in NAMES.items()}
    optimizer = adamw([("weight", parameter)], state=state, master="fp32", commit="staged")
    optimizer.load_state_dict(kept)
    parameter.sum().backward()  # the moments are there
    loaded = optimizer.state_dict()["state"][0]
    for name, slot in NAMES.items():
        wanted = moments[slot].copy()
        wanted[64:96] = numerics.decode(numerics.encode(moments[slot][64:96], state, slot))
        assert np.array_equal(loaded[name].numpy(), wanted)


NAMES = {"exp_avg": "momentum", "exp_avg_sq": "variance"}
