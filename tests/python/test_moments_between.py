"""State that goes from a run to one of another rule, or whose tensors are stored and served otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ballast
from ballast import numerics
from ballast.bf16_words import are_served_of, to_flash24
from models import layered, same_bits
from side_by_side import side_by_side
from test_moments import EXACT, difference, train

Make = Callable[..., Any]
ADAM = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
NONE = {"lr": 0.01, "momentum": 0.0}


# --- the bias of moments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.AdamW, ballast.AdamW], ids=["torch", "ballast"])
def test_stable_adamw_goes_on_from_adamws_state(make: Make, run: str, kind: Any) -> None:
    """Where gradients stay as they are, RMS_t is 1, and StableAdamW is AdamW."""
    weight = nn.Parameter(torch.linspace(-1, 1, 64))
    gradient = torch.linspace(0.5, 1.5, 64)
    own = {"run": f"{run}-adamw", **EXACT} if kind is ballast.AdamW else {}
    adamw = make(kind, [weight], **ADAM, **own) if own else kind([weight], **ADAM)
    step(adamw, weight, gradient, 5)
    saved, twin = copy.deepcopy(adamw.state_dict()), nn.Parameter(weight.detach().clone())
    stable = make(ballast.StableAdamW, [twin], **ADAM, **EXACT)
    stable.load_state_dict(saved)
    step(stable, twin, gradient, 3)
    step(adamw, weight, gradient, 3)
    torch.testing.assert_close(twin, weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stable.state_dict()["state"][0]["exp_avg_sq"], gradient.square())


@pytest.mark.parametrize("kind", [ballast.AdamW, ballast.Adam])
def test_stable_adamws_state_goes_to_others_and_back(make: Make, run: str, kind: Any) -> None:
    weight, gradient = nn.Parameter(torch.linspace(-1, 1, 64)), torch.linspace(0.5, 1.5, 64)
    stable = make(ballast.StableAdamW, [weight], **ADAM, **EXACT)
    step(stable, weight, gradient, 5)
    saved = copy.deepcopy(stable.state_dict())
    other = make(
        kind, [nn.Parameter(weight.detach().clone())], **{**ADAM, "weight_decay": 0.0}, run=f"{run}-2", **EXACT
    )
    other.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "weight_decay": 0.0}]})
    moved = other.param_groups[0]["params"][0]
    before = moved.detach().clone()
    step(other, moved, gradient, 1)
    torch.testing.assert_close(before - moved, torch.full((64,), 0.01), rtol=1e-3, atol=0)
    assert "rule" not in other.param_groups[0]
    stable.close()
    again = make(ballast.StableAdamW, [weight], **ADAM, run=f"{run}-3", **EXACT)
    again.load_state_dict(copy.deepcopy(other.state_dict()))
    step(again, weight, gradient, 1)
    torch.testing.assert_close(again.state_dict()["state"][0]["exp_avg"], gradient, rtol=1e-4, atol=0)


def test_its_own_state_comes_back_to_stable_adamw_to_the_bit(make: Make, run: str) -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 64))
    stable = make(ballast.StableAdamW, [weight], **ADAM)
    step(stable, weight, torch.linspace(0.5, 1.5, 64), 5)
    saved = copy.deepcopy(stable.state_dict())
    stable.close()
    groups = [{key: value for key, value in group.items() if key != "rule"} for group in saved["param_groups"]]
    for name, state_dict in (("a", saved), ("b", {**saved, "param_groups": groups})):  # an earlier version's
        again = make(ballast.StableAdamW, [weight], **ADAM, run=f"{run}-{name}")
        again.load_state_dict(copy.deepcopy(state_dict))
        again.connect()
        for slot, values in again.state_dict()["state"][0].items():
            assert torch.equal(values, saved["state"][0][slot])
        again.close()


def step(optimizer: Any, weight: nn.Parameter, gradient: torch.Tensor, times: int) -> None:
    for _ in range(times):
        (weight * gradient).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (ballast.Lion, ballast.AdamW, "holds exp_avg, and the rule adamw keeps exp_avg, exp_avg_sq"),
        (ballast.SGD, ballast.Muon, "has 'dampening', and the rule here is muon: SGD's is a sum"),
        (ballast.Muon, ballast.SGD, "has 'ns_steps', and the rule here is sgd: SGD's is a sum"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_means_something_else_to_another_rule_is_refused(
    make: Make, run: str, one: Any, other: Any, said: str
) -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    options = {"lr": 0.01, **({"momentum": 0.9} if one is ballast.SGD else {})}
    first = make(one, [weight], **options, **EXACT)
    step(first, weight, torch.ones(8, 8), 2)
    saved = copy.deepcopy(first.state_dict())
    first.close()
    with pytest.raises(ballast.Rejected, match=said):
        make(other, [weight], lr=0.01, run=f"{run}-2", **EXACT).load_state_dict(saved)


# --- SGD without momentum ------------------------------------------------------------------------------------------------


def test_sgd_without_momentum_has_no_buffer_as_torchs(make: Make, run: str) -> None:
    """Who goes on with momentum in another run begins with the next gradient."""
    ours, theirs = layered(seed=1), layered(seed=1)
    first, peer = make(ballast.SGD, ours.named_parameters(), **NONE, **EXACT), torch.optim.SGD(
        theirs.parameters(), **NONE
    )
    train(ours, first, range(3))
    train(theirs, peer, range(3))
    saved = copy.deepcopy(first.state_dict())
    assert all("momentum_buffer" not in state for state in saved["state"].values())
    first.close()
    second = make(ballast.SGD, ours.named_parameters(), **NONE, **EXACT, run=f"{run}-2")
    second.load_state_dict(saved)
    for group in (*second.param_groups, *peer.param_groups):
        group["momentum"] = 0.9
    train(ours, second, range(3, 6))
    train(theirs, peer, range(3, 6))
    assert difference(ours, theirs) < 1e-6


def test_ranks_that_load_it_where_the_run_is_go_on(make: Make) -> None:
    """One alone has asked for it; the others see that it is the run's, though the daemon has a buffer."""
    models = [layered(seed=1) for _ in range(2)]
    ranks = [make(ballast.SGD, m.named_parameters(), **NONE, **EXACT, rank=r, world=2) for r, m in enumerate(models)]
    side_by_side(2, lambda rank: train(models[rank], ranks[rank], range(3)))
    saved = ranks[1].state_dict()
    for rank in ranks:
        rank.load_state_dict(copy.deepcopy(saved))
    side_by_side(2, lambda rank: train(models[rank], ranks[rank], range(3, 5)))
    assert ranks[0].run_status().generation == 1
    assert [int(state["step"]) for state in ranks[0].state_dict()["state"].values()] == [5] * 6


# --- formats -------------------------------------------------------------------------------------------------------------


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
    other.load_state_dict(saved)
    other.param_groups[0]["lr"] = 0.0
    step(other, weight, torch.zeros_like(weight), 1)
    master, wanted = (sd["state"][0]["master"] for sd in (other.state_dict(), saved))
    torch.testing.assert_close(master, wanted, rtol=2.0**-16, atol=0)


@pytest.mark.parametrize("master", ["flash24", "flash32", "split24", "split32", "bf16"])
def test_what_is_served_in_bf16_is_known_as_the_masters_and_flash24_makes_it_again(master: str) -> None:
    """Of every fp32 near these words: powers of two, odd and even ones, subnormals and the largest."""
    words = [
        0x0000,
        0x0001,
        0x007F,
        0x0080,
        0x0081,
        0x00FF,
        0x3F7F,
        0x3F80,
        0x3F81,
        0x3F82,
        0x7F7E,
        0x8000,
        0xBF80,
        0xBF81,
    ]
    near = np.concatenate([np.arange(word << 16, (word + 1) << 16, dtype=np.uint32) for word in words]).view(np.float32)
    made = numerics.encode(near, master)
    masters = torch.from_numpy(numerics.decode(made))
    plane = "weight" if master == "bf16" else "weight.hi"
    weights = torch.from_numpy(made.planes[plane][: near.size].view(np.int16)).view(torch.bfloat16)
    assert are_served_of(weights, masters)
    other = weights.clone()
    other[7 * 65536 + 5] *= 1.01
    assert not are_served_of(other, masters)
    if master == "flash24":
        again = numerics.encode(to_flash24(masters, weights).numpy(), master)
        assert same_bits([torch.from_numpy(numerics.decode(again))], [masters])
        served = torch.from_numpy(again.planes[plane][: near.size].view(np.int16)).view(torch.bfloat16)
        assert torch.equal(served, weights)


def test_flash24s_masters_come_back_to_the_bit(make: Make, run: str) -> None:
    """Also where one lies halfway between two bf16 numbers, which 11 of these do."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(5000, generator=generator).bfloat16())
    gradient = torch.randn(5000, generator=generator).bfloat16()
    one = make(ballast.AdamW, [weight], lr=1e-3, master="flash24", rounding="nearest")
    step(one, weight, gradient, 3)
    saved = copy.deepcopy(one.state_dict())
    assert (saved["state"][0]["master"].view(torch.int32) & 0xFFFF == 0x8000).any()
    twin = nn.Parameter(weight.detach().clone())
    other = make(ballast.AdamW, [twin], lr=1e-3, run=f"{run}-2", master="flash24", rounding="nearest")
    other.load_state_dict(copy.deepcopy(saved))
    for optimizer, trained in ((one, weight), (other, twin)):
        optimizer.param_groups[0]["lr"] = 0.0
        step(optimizer, trained, gradient, 1)
    assert torch.equal(other.state_dict()["state"][0]["master"], saved["state"][0]["master"])
    for optimizer, trained in ((one, weight), (other, twin)):
        optimizer.param_groups[0]["lr"] = 1e-3
        step(optimizer, trained, gradient, 2)
    ours, theirs = (optimizer.state_dict()["state"][0] for optimizer in (other, one))
    assert same_bits([twin.detach()], [weight.detach()]) and same(ours, theirs)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


FORMATS = ("master", "state", "master_weight_bits", "state_dtype", "rounding", "serving", "gradient_dtype")
ADAMWS = [ballast.AdamW, ballast.StableAdamW, ballast.CollageLight, ballast.CollagePlus]


@pytest.mark.parametrize("joined", [False, True], ids=["new", "joined"])
def test_the_formats_of_a_state_dict_are_not_taken_over(joined: bool, make: Make, run: str) -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 64))
    one = make(ballast.AdamW, [weight], lr=0.01, weight_decay=0.3, serving="int8-row")
    step(one, weight, torch.linspace(0.5, 1.5, 64), 2)
    saved = copy.deepcopy(one.state_dict())
    asked = {"rounding": "nearest", "gradient_dtype": "bf16", "serving": None, **EXACT}
    twin = nn.Parameter(weight.detach().clone())
    other = make(ballast.AdamW, [twin], run=f"{run}-2", **asked)
    formats = {option: other.param_groups[0][option] for option in FORMATS}
    if joined:
        other.connect()
    other.load_state_dict(saved)
    assert {option: other.param_groups[0][option] for option in FORMATS} == formats
    assert (other.param_groups[0]["lr"], other.param_groups[0]["weight_decay"]) == (0.01, 0.3)
    step(other, twin, torch.linspace(0.5, 1.5, 64), 1)
    assert (twin.detach().view(torch.int32) & 0xFF).any()  # fp32's bits: split24 has none here
    assert other.run_status().generation == 1  # nothing was amended


@pytest.mark.parametrize("then", ADAMWS)
@pytest.mark.parametrize("first", ADAMWS)
def test_an_adamws_state_goes_to_any_other_as_each_stores_it_by_default(
    make: Make, run: str, first: Any, then: Any
) -> None:
    weight, gradient = nn.Parameter(torch.linspace(-1, 1, 64)), torch.linspace(0.5, 1.5, 64)
    one = make(first, [weight], lr=0.01)
    step(one, weight, gradient, 3)
    saved = copy.deepcopy(one.state_dict())
    other = make(then, [nn.Parameter(weight.detach().clone())], lr=0.01, run=f"{run}-2")
    formats = {option: other.param_groups[0][option] for option in FORMATS}
    other.load_state_dict(saved)
    step(other, other.param_groups[0]["params"][0], gradient, 1)
    assert {option: other.param_groups[0][option] for option in FORMATS} == formats
    assert other.state_dict()["state"][0]["step"] == 4
