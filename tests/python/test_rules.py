"""Every optimizer trains, and those that torch has train as torch's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ballast
from models import distances, layered, losses_of, perceptron

Make = Callable[..., Any]
EXACT = {"master": "fp32", "state": "fp32"}

TORCHS: dict[str, tuple[type[ballast.Optimizer], type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (ballast.Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adam without decay": (ballast.Adam, torch.optim.Adam, {}),
    "AdamW": (ballast.AdamW, torch.optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.99), "weight_decay": 0.1}),
    "SGD": (ballast.SGD, torch.optim.SGD, {"lr": 0.1}),
    "SGD with decay": (ballast.SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "SGD with momentum": (ballast.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD with dampening": (ballast.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "SGD with Nesterov": (ballast.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


@pytest.mark.parametrize("name", TORCHS)
def test_with_exact_formats_it_is_torchs(name: str, make: Make) -> None:
    """The same recorded gradients into both."""
    kind, torchs, options = TORCHS[name]
    ours, theirs = perceptron(seed=1), perceptron(seed=1)
    one = make(kind, ours.named_parameters(), **options, **EXACT)
    other = torchs(theirs.parameters(), **options)
    for label, error in distances(ours, one, theirs, other, steps=10).items():
        assert error < 1e-5, f"{label}: {error:.2e}"


@pytest.mark.parametrize("kind", [ballast.Adam, ballast.AdamW, ballast.SGD])
def test_arguments_and_defaults_are_torchs(kind: Any, make: Make) -> None:
    ours = make(kind, perceptron(seed=1).parameters()).defaults
    theirs = getattr(torch.optim, kind.__name__)(perceptron(seed=1).parameters()).defaults
    shared = {"lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov"} & theirs.keys()
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}


TRAINED: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (ballast.Adam, {"lr": 1e-2}),
    "AdamW": (ballast.AdamW, {"lr": 1e-2}),
    "StableAdamW": (ballast.StableAdamW, {"lr": 1e-2}),
    "SGD": (ballast.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD decoupled": (ballast.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "decoupled": True}),
    "Lion": (ballast.Lion, {"lr": 2e-3, "weight_decay": 1e-2}),
    "CollageLight": (ballast.CollageLight, {"lr": 1e-2}),
    "CollagePlus": (ballast.CollagePlus, {"lr": 1e-2}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TRAINED)
def test_with_its_default_formats_the_loss_goes_down(name: str, dtype: torch.dtype, make: Make) -> None:
    kind, options = TRAINED[name]
    model = perceptron(seed=1).to(dtype)
    optimizer = make(kind, model.named_parameters(), **options)
    losses = losses_of(model, optimizer, steps=60)
    assert losses[0] > 0.6
    assert losses[-1] < 0.7 * losses[0], losses[-1]
    assert optimizer.last_result.applied


def one_step(make: Make, kind: Any, weight: float, grad: float, **options: Any) -> float:
    w = torch.nn.Parameter(torch.full((4,), weight))
    optimizer = make(kind, [("w", w)], **options)
    w.grad = torch.full((4,), grad)
    optimizer.step()
    return w[0].item()


def test_lion_takes_the_sign(make: Make) -> None:
    assert one_step(make, ballast.Lion, 1.0, 3e-7, lr=0.125, weight_decay=0.5, **EXACT) == 1 - 0.0625 - 0.125


def test_decoupled_sgd_decays_by_lr(make: Make) -> None:
    after = one_step(make, ballast.SGD, 1.0, 0.25, lr=0.5, weight_decay=0.5, decoupled=True, **EXACT)
    assert after == 0.75 - 0.125


def test_stable_adamw_holds_back_a_tensor_whose_gradient_jumps(make: Make) -> None:
    """RMS of the step after a jump from 1 to 100 with beta2 = .5: sqrt(100^2 / v), v = (1/3) 1 + (2/3) 100^2."""
    w = torch.nn.Parameter(torch.ones(4))
    optimizer = make(ballast.StableAdamW, [w], lr=1e-3, betas=(0.0, 0.99), weight_decay=0.0, eps=1e-12, **EXACT)
    for grad, beta in ((1.0, 0.0), (100.0, 0.99 * (1 - 0.99) / (1 - 0.99**2))):
        before, v = w[0].item(), grad**2 if beta == 0 else beta + (1 - beta) * grad**2
        w.grad = torch.full((4,), grad)
        optimizer.step()
        rms = grad / v**0.5
        assert before - w[0].item() == pytest.approx(1e-3 / max(1, rms) * rms, rel=1e-3)
    assert rms > 1.2


def test_a_rule_without_a_second_moment_has_no_rms(make: Make) -> None:
    model = layered(seed=1)
    optimizer = make(ballast.Lion, model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert optimizer.run_status().rms_ratio_max is None
    assert optimizer.run_status().optimizer == "lion/split24/companded8"


def test_decouple_lr_decays_by_the_share_of_the_peak(make: Make) -> None:
    model = layered(seed=1)
    optimizer = make(ballast.AdamW, model.named_parameters(), lr=1e-2, weight_decay=0.5, decouple_lr=True, **EXACT)
    assert optimizer.param_groups[0]["lr_peak"] == 1e-2
    optimizer.param_groups[0]["lr"] = 2.5e-3
    weight = model[0].weight
    before = weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(weight, before * (1 - 0.5 * 0.25))


def test_decouple_lr_needs_a_peak(make: Make) -> None:
    """Decay would follow lr, once a schedule has raised it."""
    with pytest.raises(ballast.Rejected, match="decouple_lr=True of a group that begins with lr=0.*give lr_peak="):
        make(ballast.AdamW, layered(seed=1).parameters(), lr=0.0, decouple_lr=True)
    optimizer = make(ballast.AdamW, layered(seed=1).parameters(), lr=0.0, decouple_lr=True, lr_peak=0.01)
    assert optimizer.param_groups[0]["lr_peak"] == 0.01
    model = layered(seed=1)
    for bias in (model[0].bias, model[1].bias, model[2].bias):  # a group of AdamW's own, with nothing to train
        bias.requires_grad_(False)
    muon = make(ballast.Muon, model.named_parameters(), decouple_lr=True)
    assert [group["lr_peak"] for group in muon.param_groups] == [1e-3, None]


def test_decouple_lr_needs_a_decoupled_decay(make: Make) -> None:
    for kind in (ballast.Adam, ballast.SGD, ballast.CollageLight):
        with pytest.raises(ballast.Rejected, match="decouple_lr and lr_peak.*decoupled weight decay"):
            make(kind, layered(seed=1).parameters(), decouple_lr=True)


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (ballast.SGD, {"momentum": 1.0}),
        (ballast.SGD, {"nesterov": True}),
        (ballast.SGD, {"dampening": -1}),
        (ballast.Lion, {"betas": (0.9, 1.0)}),
        (ballast.StableAdamW, {"eps": 0}),
        (ballast.AdamW, {"lr_peak": 0.0}),
        (ballast.AdamW, {"master": "fp64"}),
        (ballast.AdamW, {"state": "int4"}),
        (ballast.AdamW, {"serving": "fp8-e5m2"}),
        (ballast.AdamW, {"gradient_dtype": "int8-row"}),
    ],
    ids=str,
)
def test_an_impossible_option_is_refused(kind: Any, option: dict[str, Any], make: Make) -> None:
    with pytest.raises(ballast.Rejected, match=f"{next(iter(option))}="):
        make(kind, layered(seed=1).parameters(), **option)


def test_an_unknown_argument_is_a_type_error(make: Make) -> None:
    with pytest.raises(TypeError, match="SGD.*'beta'"):
        make(ballast.SGD, layered(seed=1).parameters(), beta=1)


def test_formats_that_the_rule_is_not_built_for_are_refused_with_the_reason(make: Make) -> None:
    optimizer = make(ballast.CollagePlus, layered(seed=1).parameters(), master="split24")
    with pytest.raises(ballast.Rejected, match="collage_plus is not built for master split24: it needs master mcf"):
        optimizer.connect()


def test_a_change_of_momentum_in_a_step_is_refused(make: Make) -> None:
    model = layered(seed=1)
    optimizer = make(ballast.SGD, model.parameters(), momentum=0.5)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.param_groups[0]["momentum"] = 0.25
    with pytest.raises(ballast.Rejected, match="momentum of param_groups.0. changed from 0.5 to 0.25"):
        optimizer.step()
