"""The daemon's optimizers against those that people use: torch's, torch-optimi's and unit-scaling's.

The gradients of 1,000 steps of a real model are recorded once and fed to both sides, so that a difference is the
update's own. The peers run in double precision and again in fp32; the daemon's (fp32 master, fp32 state) may be as far from
double precision as the peer's own fp32 is, and a little more.
"""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ballast import numerics

STEPS = 1000
CONTEXT = 8


class CharacterModel(nn.Module):
    """Predicts a character from the 8 before it: 18,000 parameters, embedding rows that are rarely met among them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 16)
        self.hidden, self.out = nn.Linear(16 * CONTEXT, 64), nn.Linear(64, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(self.embedding(tokens).flatten(1))))


Recorded = tuple[list[np.ndarray], list[list[np.ndarray]]]


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """(initial weights, gradients by step) of the model on the text of a standard module, trained by torch's AdamW."""
    torch.manual_seed(1)
    text = torch.tensor(list(inspect.getsource(argparse).encode("ascii", "ignore")))
    model = CharacterModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    initial = [p.detach().numpy().copy() for p in model.parameters()]
    gradients = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT, (32, 1))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text[starts + torch.arange(CONTEXT)]), text[starts[:, 0] + CONTEXT])
        loss.backward()
        gradients.append([p.grad.numpy().copy() for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return initial, gradients


def ours(recorded: Recorded, rule: str, hyper: dict[str, float]) -> list[np.ndarray]:
    initial, gradients = recorded
    weights = [numerics.encode(w, "fp32") for w in initial]
    states = [numerics.new_state(rule, w.shape, "fp32", "fp32") for w in initial]
    for t, step in enumerate(gradients, 1):
        for weight, state, grad in zip(weights, states, step, strict=True):
            numerics.step(rule, weight, grad, state, hyper, t, statistics="off")
    return [numerics.decode(weight) for weight in weights]


def theirs(recorded: Recorded, make: Callable[[list[nn.Parameter]], Any], dtype: torch.dtype) -> list[np.ndarray]:
    initial, gradients = recorded
    parameters = [nn.Parameter(torch.tensor(w, dtype=dtype)) for w in initial]
    optimizer = make(parameters)
    for step in gradients:
        for parameter, grad in zip(parameters, step, strict=True):
            parameter.grad = torch.tensor(grad, dtype=dtype)
        optimizer.step()
    return [p.detach().double().numpy() for p in parameters]


def compare(recorded: Recorded, rule: str, hyper: dict[str, float], make: Callable[[list[nn.Parameter]], Any]) -> None:
    """Distances to the peer in double precision, over the weights' norms: ours against that of the peer's own fp32."""
    mine, exact = ours(recorded, rule, hyper), theirs(recorded, make, torch.float64)
    single = theirs(recorded, make, torch.float32)
    for start, a, b, c in zip(recorded[0], mine, single, exact, strict=True):
        norm = np.linalg.norm(c)
        assert np.linalg.norm(c - start) > 0.02 * norm, "it has hardly moved: the comparison says nothing"
        distance, allowed = np.linalg.norm(a - c) / norm, np.linalg.norm(b - c) / norm
        print(f"{rule}: ours {distance:.2e}, the peer's fp32 {allowed:.2e}")
        assert distance <= 1.25 * allowed + 2e-7


TORCH = [
    ("adam", {"lr": 1e-3}, lambda p: torch.optim.Adam(p, lr=1e-3)),
    ("adam", {"lr": 1e-3, "weight_decay": 0.05}, lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.05)),
    (
        "adamw",
        {"lr": 3e-3, "beta2": 0.99, "weight_decay": 0.1},
        lambda p: torch.optim.AdamW(p, lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1),
    ),
    ("adamw", {"eps": 1e-3}, lambda p: torch.optim.AdamW(p, eps=1e-3)),
    ("sgd", {"lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1)),
    ("sgd", {"lr": 0.05, "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    (
        "sgd",
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01),
    ),
    (
        "sgd",
        {"lr": 0.05, "momentum": 0.9, "nesterov": 1, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
]


@pytest.mark.parametrize(("rule", "hyper", "make"), TORCH, ids=[f"{rule}-{hyper}" for rule, hyper, _ in TORCH])
def test_torchs_optimizers(recorded: Recorded, rule: str, hyper: dict[str, float], make: Callable) -> None:
    compare(recorded, rule, hyper, make)


def optimi() -> Any:
    return pytest.importorskip("optimi", reason="torch-optimi is not installed: these rules have no peer here")


PLAIN = {"foreach": False, "triton": False}


def test_optimis_stable_adamw(recorded: Recorded) -> None:
    hyper = {"lr": 3e-3, "weight_decay": 0.1}
    compare(recorded, "stable_adamw", hyper, lambda p: optimi().StableAdamW(p, **hyper, **PLAIN))


def test_optimis_decoupled_sgd(recorded: Recorded) -> None:
    hyper = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    compare(recorded, "sgdw", hyper, lambda p: optimi().SGD(p, **hyper, dampening=False, decouple_wd=True, **PLAIN))


def test_optimis_decoupled_learning_rate(recorded: Recorded) -> None:
    """`lr_peak`: the decay is weight_decay * lr / lr_peak, however small the learning rate is."""
    hyper = {"lr": 1e-3, "weight_decay": 2e-4, "beta2": 0.99, "eps": 1e-6}

    def make(p: list[nn.Parameter]) -> Any:
        return optimi().AdamW(p, lr=1e-3, max_lr=4e-3, decouple_lr=True, weight_decay=2e-4, **PLAIN)

    compare(recorded, "adamw", hyper | {"lr_peak": 4e-3}, make)


def test_optimis_lion(recorded: Recorded) -> None:
    """A sign that rounding turns costs 2 lr: a few elements among 18,000 in 1,000 steps."""
    hyper = {"lr": 3e-4, "weight_decay": 0.1}
    peer = theirs(recorded, lambda p: optimi().Lion(p, **hyper, **PLAIN), torch.float64)
    mine = ours(recorded, "lion", hyper)
    difference = np.concatenate([np.abs(a - b).ravel() for a, b in zip(mine, peer, strict=True)])
    print(f"median {np.median(difference):.1e}, turned signs {np.mean(difference > hyper['lr']):.1e}")
    assert np.median(difference) < 5e-6
    assert np.mean(difference > hyper["lr"]) < 1e-3
    assert difference.max() < 4.5 * hyper["lr"]


# --- unit scaling ---------------------------------------------------------------------------------------------------


def adam_lr_scale(kind: str, shape: tuple[int, ...], depth: int | None) -> float:
    """u-muP's factor on Adam's learning rate (arXiv 2407.17465); an embedding's fan-in is its width."""
    scale = 1.0 if depth is None else depth**-0.5
    return scale * (math.prod(shape[1:]) ** -0.5 if kind == "weight" else 1.0)


@pytest.mark.parametrize("depth", [None, 1, 12])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [("weight", (48, 32)), ("weight", (8, 4, 5)), ("bias", (48,)), ("norm", (32,)), ("output", (48, 32))],
)
def test_the_table_of_learning_rates_is_unit_scalings(kind: str, shape: tuple[int, ...], depth: int | None) -> None:
    unit_scaling = pytest.importorskip("unit_scaling", reason="unit-scaling is not installed: its table is not checked")
    from unit_scaling.optim import lr_scale_func_adam

    parameter = unit_scaling.Parameter(torch.zeros(shape), mup_type=kind, mup_scaling_depth=depth)
    assert lr_scale_func_adam(parameter) == pytest.approx(adam_lr_scale(kind, shape, depth), rel=1e-12)


def test_a_unit_scaled_tensor_trains_as_unit_scalings_adamw_trains_it(recorded: Recorded) -> None:
    """Independent decay is lr_peak at the effective learning rate: weight_decay comes off at every step, whole."""
    unit_scaling = pytest.importorskip("unit_scaling", reason="unit-scaling is not installed: its AdamW is not checked")
    import unit_scaling.optim

    lr, decay = 0.05, 1e-3
    scale = adam_lr_scale("weight", (64, 128), 4)
    initial, gradients = [recorded[0][1]], [[step[1]] for step in recorded[1]]

    def make(p: list[nn.Parameter]) -> Any:
        p[0] = unit_scaling.Parameter(p[0].data, mup_type="weight", mup_scaling_depth=4)
        return unit_scaling.optim.AdamW(p, lr=lr, weight_decay=decay)

    effective = lr * scale
    hyper = {"lr": effective, "lr_peak": effective, "weight_decay": decay}
    compare((initial, gradients), "adamw", hyper, make)
