"""Muon: against torch.optim.Muon step by step, beside AdamW in one run, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ballast
from ballast import numerics
from models import losses_of, perceptron, weights_of

Make = Callable[..., Any]
EXACT = {"master": "fp32", "state": "fp32"}
# Of one step's update: what two ways of rounding five products to bf16 differ in. Of a single row they do not average out.
NEAR, NEAR_OF_A_ROW = 0.03, 0.08

torchs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no torch.optim.Muon")


def normals(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@torchs_muon
@pytest.mark.parametrize("shape", [(40, 150), (150, 40), (64, 64), (1, 20), (20, 1)], ids=str)
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_torchs(shape: tuple[int, int], adjust: str | None, nesterov: bool) -> None:
    """The same gradients into both: the momentum to a few roundings, each step's change of the weights to those of bf16."""
    weights = nn.Parameter(torch.from_numpy(normals(0, shape)))
    theirs = torch.optim.Muon([weights], lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust)
    done = None
    hyper = {"lr": 0.02, "nesterov": float(nesterov), "match_rms": float(adjust is not None)}
    for t in range(1, 11):
        gradient = normals(t, shape)
        before = weights.detach().clone()
        weights.grad = torch.from_numpy(gradient)
        theirs.step()
        # From torch's weights, so that a step's difference does not add up.
        state = None if done is None else done.state
        done = numerics.step("muon", before.numpy(), gradient, state, hyper, t, master="fp32", state_format="fp32")
        np.testing.assert_allclose(
            numerics.decode(done.state["momentum"]), theirs.state[weights]["momentum_buffer"].numpy(), atol=1e-6
        )
        ours, wanted = torch.from_numpy(numerics.decode(done.weight)) - before, weights.detach() - before
        assert (ours - wanted).norm() <= (NEAR if min(shape) > 1 else NEAR_OF_A_ROW) * wanted.norm(), t


@pytest.mark.parametrize("shape", [(48, 96), (96, 48)])
def test_updates_are_nearly_orthogonal(shape: tuple[int, int]) -> None:
    done = numerics.step("muon", np.zeros(shape, np.float32), normals(1, shape), hyper={"lr": 1.0}, master="fp32")
    factor = max(1.0, shape[0] / shape[1]) ** 0.5
    values = np.linalg.svd(numerics.decode(done.weight) / factor, compute_uv=False)
    assert 0.6 < values.min() and values.max() < 1.25


def test_a_gradient_that_is_not_finite_leaves_its_block_and_the_rest_moves() -> None:
    gradient = normals(1, (40, 150))
    gradient[3, 7] = np.nan
    done = numerics.step("muon", normals(0, (40, 150)), gradient, hyper={"lr": 0.1}, master="fp32", state_format="fp32")
    moved = (numerics.decode(done.weight) - normals(0, (40, 150))).ravel()
    block = (3 * 150 + 7) // 32 * 32
    assert done.statistics.rejected == 1 and not moved[block : block + 32].any()
    assert np.isfinite(moved).all() and (moved != 0).sum() == moved.size - 32


@torchs_muon
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_it_trains_as_torchs_muon_beside_torchs_adamw(adjust: str | None, make: Make) -> None:
    ours, theirs = perceptron(seed=1), perceptron(seed=1)
    optimizer = make(
        ballast.Muon, ours.named_parameters(), lr=0.02, adjust_lr_fn=adjust, adamw="4.*", adamw_lr=5e-3, **EXACT
    )
    named = dict(theirs.named_parameters())
    matrices = [p for name, p in named.items() if p.dim() == 2 and not name.startswith("4.")]
    rest = [p for name, p in named.items() if p.dim() < 2 or name.startswith("4.")]
    pair = Pair(
        torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn=adjust), torch.optim.AdamW(rest, lr=5e-3, weight_decay=0.1)
    )
    one, other = losses_of(ours, optimizer, steps=40), losses_of(theirs, pair, steps=40)
    assert other[-1] < 0.7 * other[0]
    assert one == pytest.approx(other, rel=0.02)


class Pair:
    """Two of torch's as one, whose gradients go with the step, as ours do."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self._optimizers = optimizers

    def step(self, **_: Any) -> None:
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_what_is_no_matrix_is_a_group_of_adamws(make: Make) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(20, 8), "conv": nn.Conv2d(3, 6, 5), "norm": nn.LayerNorm(8)})
    optimizer = make(ballast.Muon, model.named_parameters(), lr=0.02, adamw=["*embed*"], adamw_lr=1e-3)
    matrices, rest = optimizer.param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert [names[id(p)] for p in matrices["params"]] == ["conv.weight"]
    assert [names[id(p)] for p in rest["params"]] == ["embed.weight", "conv.bias", "norm.weight", "norm.bias"]
    assert (matrices["lr"], rest["lr"], rest["rule"], rest["betas"], rest["weight_decay"]) == (
        0.02,
        1e-3,
        "adamw",
        (0.9, 0.999),
        0.1,
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = weights_of(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    schedule.step()
    assert all((p != was).any() for p, was in zip(model.parameters(), before))
    assert (matrices["lr"], rest["lr"]) == (0.01, 5e-4)
    assert optimizer.run_status().optimizer.startswith("muon/split24/companded8")


def torch_keys() -> set[str]:
    """What a group of torch.optim.Muon has, without which its step() fails."""
    return {"lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"}


def test_its_state_is_torchs(make: Make) -> None:
    model = perceptron(seed=1)
    optimizer = make(ballast.Muon, model.named_parameters(), lr=0.02, adamw_lr=1e-3)
    losses_of(model, optimizer, steps=3)
    state = optimizer.state_dict()
    slots = [set(one) - {"step", "master"} for one in state["state"].values()]
    matrices = len(state["param_groups"][0]["params"])
    assert slots == [{"momentum_buffer"}] * matrices + [{"exp_avg", "exp_avg_sq"}] * (len(slots) - matrices)
    assert 0 < matrices < len(slots)
    assert state["param_groups"][0].keys() >= torch_keys()


def test_a_run_goes_on_from_its_state(make: Make, run: str) -> None:
    """To the bit, with formats that keep all: a new run that is given weights and state makes the steps of the old one."""
    model, twin = perceptron(seed=1), perceptron(seed=2)
    optimizer = make(ballast.Muon, model.named_parameters(), lr=0.02, adamw_lr=1e-3, **EXACT)
    losses_of(model, optimizer, steps=3)
    twin.load_state_dict(model.state_dict())
    other = make(ballast.Muon, twin.named_parameters(), lr=0.02, adamw_lr=1e-3, run=f"{run}-2", **EXACT)
    other.load_state_dict(optimizer.state_dict())
    assert losses_of(twin, other, steps=3) == losses_of(model, optimizer, steps=3)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no lr for AdamW": ({}, "adamw_lr is not given"),
    "a pattern without a match": (
        {"adamw": ["*embed*"], "adamw_lr": 1e-3},
        r"pattern '\*embed\*' matches no parameter; there are 0",
    ),
    "other coefficients": (
        {"ns_coefficients": (2.0, -1.5, 0.5), "adamw_lr": 1e-3},
        "ns_coefficients=.*the daemon has .3.4445",
    ),
    "no coefficients": ({"ns_coefficients": None, "adamw_lr": 1e-3}, "ns_coefficients=None: the daemon has"),
    "other steps": ({"ns_steps": 3, "adamw_lr": 1e-3}, "ns_steps=3: the daemon has 5 alone"),
    "another adjustment": ({"adjust_lr_fn": "none", "adamw_lr": 1e-3}, "'original' or 'match_rms_adamw'"),
    "a master without it": ({"master": "bf16", "adamw_lr": 1e-3}, "rule muon is not built for master bf16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_refused_by_name(case: str, make: Make) -> None:
    options, words = REFUSED[case]
    with pytest.raises(ballast.Rejected, match=words):
        make(ballast.Muon, perceptron(seed=1).named_parameters(), lr=0.02, **options).connect()


def test_a_pattern_needs_names(make: Make) -> None:
    with pytest.raises(ballast.Rejected, match="give model.named_parameters"):
        make(ballast.Muon, perceptron(seed=1).parameters(), lr=0.02, adamw=["*"], adamw_lr=1e-3)


def test_groups_may_name_the_rule_themselves(make: Make) -> None:
    model = perceptron(seed=1)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = make(ballast.Muon, [{"params": matrices}, {"params": rest, "rule": "adamw", "lr": 1e-3}], lr=0.02)
    assert losses_of(model, optimizer, steps=40)[-1] < 0.45
    with pytest.raises(ballast.Rejected, match="rule='lion' of a param_group: it must be one of 'muon', 'adamw'"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "rule": "lion"})


def test_groups_for_weight_decay_are_split(make: Make) -> None:
    """As HF Trainer and others make them, by what is decayed."""
    model = perceptron(seed=1)
    decayed = [(name, p) for name, p in model.named_parameters() if p.dim() == 2]
    others = [(name, p) for name, p in model.named_parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = make(ballast.Muon, groups, lr=0.02, adamw=["4.*"], adamw_lr=1e-3)
    assert [(len(g["params"]), g.get("rule"), g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (2, None, 0.02, 0.01),
        (1, "adamw", 1e-3, 0.01),
        (3, "adamw", 1e-3, 0.0),
    ]
    assert losses_of(model, optimizer, steps=40)[-1] < 0.45


def test_a_parameter_without_a_name_keeps_its_places(make: Make) -> None:
    model = perceptron(seed=1)
    optimizer = make(ballast.Muon, model.parameters(), lr=0.02, adamw_lr=1e-3, formats={"param.1": {"master": "fp32"}})
    losses_of(model, optimizer, steps=1)
    by_size = {id(p): f"param.{i}" for i, p in enumerate(model.parameters())}
    named = [by_size[id(p)] for group in optimizer.param_groups for p in group["params"]]
    assert named == ["param.0", "param.2", "param.4", "param.1", "param.3", "param.5"]


@pytest.mark.parametrize("shape", [(4, 6, 3), (2, 3, 4, 5)])
def test_three_dimensions_are_refused_and_filters_are_rows(shape: tuple[int, ...], make: Make) -> None:
    weight = nn.Parameter(torch.zeros(shape))
    if len(shape) == 3:
        with pytest.raises(ballast.Rejected, match=r"'w' has the shape \(4, 6, 3\).*Name it in adamw="):
            make(ballast.Muon, [("w", weight)], lr=0.02)
        return
    optimizer = make(ballast.Muon, [("w", weight)], lr=1.0, weight_decay=0.0, **EXACT)
    weight.grad = torch.from_numpy(normals(1, shape))
    optimizer.step()
    values = torch.linalg.svdvals(weight.detach().reshape(2, 60))
    assert 0.6 < values.min() and values.max() < 1.25


@pytest.mark.parametrize("wrong", ["a tensor", "a group", "a word"])
def test_what_is_no_list_is_refused_as_by_the_others(wrong: str, make: Make) -> None:
    weight = nn.Parameter(torch.zeros(3, 4))
    if wrong == "a tensor":
        with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
            make(ballast.Muon, weight, lr=0.02)
    elif wrong == "a word":
        with pytest.raises(ballast.Rejected, match="is a str: give tensors"):
            make(ballast.Muon, ["w"], lr=0.02)
    else:
        assert len(make(ballast.Muon, {"params": [weight]}, lr=0.02).param_groups) == 1


def test_frozen_vectors_want_no_lr_and_tied_weights_are_apart_once(make: Make) -> None:
    frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
    tied = nn.Parameter(torch.randn(5, 4))
    entries = [("w", nn.Parameter(torch.randn(3, 4))), ("b", frozen)]
    first = make(ballast.Muon, entries, lr=0.02)
    assert len(first.param_groups) == 2
    first.close()
    optimizer = make(ballast.Muon, [*entries, ("embed", tied), ("head", tied)], lr=0.02, adamw="*embed*", adamw_lr=1e-3)
    assert [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups] == [[(3, 4)], [(4,), (5, 4)]]


def test_a_group_keeps_its_rule(make: Make) -> None:
    model = perceptron(seed=1)
    optimizer = make(ballast.Muon, model.named_parameters(), lr=0.02, adamw_lr=1e-3)
    losses_of(model, optimizer, steps=1)
    optimizer.param_groups[1]["rule"] = "muon"
    with pytest.raises(
        ballast.Rejected, match="rule of param_groups.1. changed from 'adamw' to 'muon'.*keeps its rule"
    ):
        losses_of(model, optimizer, steps=1)
    optimizer.param_groups[1]["rule"] = "adamw"
    losses_of(model, optimizer, steps=1)
    other = {**optimizer.state_dict(), "state": {}}
    other["param_groups"] = other["param_groups"][::-1]
    with pytest.raises(ballast.Rejected, match="in the order in which they were saved"):
        optimizer.load_state_dict(other)


def test_state_of_another_rule_is_refused(make: Make, run: str) -> None:
    """An AdamW's, whose groups are split as these are."""
    model = perceptron(seed=1)
    optimizer = make(ballast.Muon, model.named_parameters(), lr=0.02, adamw_lr=1e-3)
    twin = perceptron(seed=1)
    groups = [[p for p in twin.parameters() if (p.dim() == 2) is matrices] for matrices in (True, False)]
    theirs = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3)
    for p in twin.parameters():
        p.grad = torch.ones_like(p)
    theirs.step()
    with pytest.raises(ballast.Rejected, match="holds exp_avg, exp_avg_sq, and the rule muon keeps momentum_buffer"):
        optimizer.load_state_dict(theirs.state_dict())


def test_added_groups_need_an_lr_for_adamw_and_decay_by_their_own_peak(make: Make, run: str) -> None:
    model = perceptron(seed=1)
    optimizer = make(ballast.Muon, [("w", model[0].weight)], lr=0.02)
    with pytest.raises(ballast.Rejected, match="adamw_lr is not given"):
        optimizer.add_param_group({"params": [("b", model[0].bias)]})
    assert len(optimizer.param_groups) == 1
    optimizer.close()
    other = make(ballast.Muon, model.named_parameters(), lr=0.02, adamw_lr=3e-4, decouple_lr=True, run=f"{run}-2")
    assert [group["lr_peak"] for group in other.param_groups] == [0.02, 3e-4]


@pytest.mark.parametrize("alone", [True, False])
def test_a_staged_step_that_is_looked_at_before_gives_the_same_bits(alone: bool, make: Make, run: str) -> None:
    """Tensors over matrices are not tried before; the step does not wait for them, also where there are no others."""

    def trained(name: str, **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Linear(16, 8, bias=not alone)
        with make(ballast.Muon, model.named_parameters(), lr=0.02, adamw_lr=1e-3, run=name, **options) as optimizer:
            for step in range(3):
                model(torch.from_numpy(normals(step, (4, 16)))).square().sum().backward()
                optimizer.step()
                assert optimizer.last_result.applied
        return weights_of(model)

    looked_at = trained(f"{run}-1", commit="staged", spikes=ballast.Spikes(action="skip"))
    assert all(torch.equal(a, b) for a, b in zip(looked_at, trained(f"{run}-2"), strict=True))


def test_a_run_is_rewound_to_the_bit(make: Make) -> None:
    model = perceptron(seed=1)
    optimizer = make(ballast.Muon, model.named_parameters(), lr=0.02, adamw_lr=1e-3, snapshots=2, snapshot_every=1)
    losses_of(model, optimizer, steps=2)
    optimizer.rewind(to=1)
    optimizer.pull()
    again = losses_of(model, optimizer, steps=2)
    other = perceptron(seed=1)
    twin = make(ballast.Muon, other.named_parameters(), lr=0.02, adamw_lr=1e-3, run=f"{optimizer.run}-2")
    assert losses_of(other, twin, steps=3)[1:] == again
