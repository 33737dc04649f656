"""UnitScaledFloat8Linear beside the package unit-scaling, and a unit-scaled transformer through the daemon in fp8 alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ballast
import unit_scaling as uu
from ballast import nn as bnn
from unit_scaling.optim import lr_scale_func_adam, scaled_parameters

AdamW = Callable[..., ballast.AdamW]
CONSTRAINTS = ("to_output_scale", "to_grad_input_scale", None)
VOCABULARY, WIDTH = 17, 32


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


# --- the layer beside the package's ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [uu.Linear, uu.LinearReadout])
@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_packages_layer_of_rounded_operands(kind: Any, constraint: str | None, bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(24, 16, bias=bias, constraint=constraint))
    theirs = copy.deepcopy(model)
    parameters = list(model.parameters())
    assert bnn.switch(model, "*", bnn.UnitScaledFloat8Linear) == ["0"]
    assert type(model[0]) is bnn.UnitScaledFloat8Linear and list(model.parameters()) == parameters
    assert model[0].weight.mup_type == theirs[0].weight.mup_type
    x, gradient = e4m3(randn(2, 5, 24)).requires_grad_(), randn(2, 5, 16, seed=2).to(torch.float8_e5m2).float()
    of_output = model[0]._factors()[0]
    with torch.no_grad():
        theirs[0].weight.copy_(e4m3(theirs[0].weight))
    results = []
    for one in (model, theirs):
        x.grad = None
        y = one(x)
        y.backward(gradient)
        results.append([y.detach(), x.grad, *(p.grad for p in one.parameters())])
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)
    assert (
        of_output == pytest.approx(24 ** -(1.0 if kind is uu.LinearReadout else 0.5))
        or constraint == "to_grad_input_scale"
    )


def test_signals_have_about_the_scale_one() -> None:
    torch.manual_seed(0)
    layer, x = bnn.UnitScaledFloat8Linear(256, 256), randn(512, 256).requires_grad_()
    layer(x).backward(randn(512, 256, seed=2))
    assert x.grad is not None and layer.weight.grad is not None
    for signal in (layer(x), x.grad, layer.weight, layer.weight.grad):
        assert 0.8 < signal.std() < 1.2
    beyond, gone = bnn.fp8_losses(layer.weight.grad)
    assert beyond == 0 and gone < 1e-3


def test_copies_keep_what_u_mup_knows_of_a_parameter() -> None:
    model = nn.Sequential(uu.Linear(24, 16))
    bnn.switch(model, "*", bnn.UnitScaledFloat8Linear)
    assert copy.deepcopy(model)[0].weight.mup_type == "weight"


@pytest.mark.parametrize(
    "what, said",
    [
        (lambda: bnn.UnitScaledFloat8Linear(8, 8, constraint="gmean"), "constraint='gmean'"),
        (lambda: bnn.switch(nn.Sequential(nn.Linear(8, 8)), "*", bnn.UnitScaledFloat8Linear), "no unit_scaling.Linear"),
        (lambda: bnn.switch(uu.Linear(8, 8), "*", bnn.UnitScaledFloat8Linear), "is an unit_scaling.Linear itself"),
        (lambda: bnn.switch(nn.Sequential(uu.Linear(8, 8))), "no nn.Linear"),
    ],
)
def test_what_cannot_be_is_refused_by_name(what: Any, said: str) -> None:
    with pytest.raises(ballast.Rejected, match=said):
        what()


def test_shares_that_are_lost() -> None:
    assert bnn.fp8_losses(torch.tensor([1.0, 1e-9, 0.0, 1e6])) == (0.25, 0.25)
    assert bnn.fp8_losses(torch.tensor([1.0, 1e-3, 500.0, 448.0]), torch.float8_e4m3fn) == (0.25, 0.0)
    assert bnn.fp8_losses(torch.tensor([1e-4]), torch.float8_e4m3fn) == (0.0, 1.0)


# --- a transformer through the daemon ----------------------------------------------------------------------------------


def decoder(in_fp8: bool) -> uu.TransformerDecoder:
    torch.manual_seed(1)
    model = uu.TransformerDecoder(hidden_size=WIDTH, vocab_size=VOCABULARY, layers=2, heads=4)
    if in_fp8:
        bnn.switch(model, "layers.*", bnn.UnitScaledFloat8Linear)
    return model


def batches() -> Iterator[Tensor]:
    """Texts of which each token but the first follows from the one before, by a fixed rule, nine times of ten."""
    random = torch.Generator().manual_seed(3)
    follows = torch.randperm(VOCABULARY, generator=random)
    while True:
        text = torch.randint(VOCABULARY, (8, 24), generator=random)
        for place in range(1, 24):
            kept = torch.rand(8, generator=random) < 0.9
            text[:, place] = torch.where(kept, follows[text[:, place - 1]], text[:, place])
        yield text


def losses_of(model: Any, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for _, text in zip(range(steps), batches()):
        loss = model.loss(text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_it_learns_in_fp8_alone_what_fp32_learns(adamw: AdamW) -> None:
    """Weights out in e4m3, gradients in in e5m2, no loss scale; the package's own rules for learning rates, and ours."""
    ours, theirs = decoder(in_fp8=True), decoder(in_fp8=False)
    names = {id(parameter): name for name, parameter in ours.named_parameters()}
    groups = scaled_parameters(ours.parameters(), lr_scale_func_adam, lr=0.5, weight_decay=0.0)
    named = [{**group, "params": [(names[id(p)], p) for p in group["params"]]} for group in groups]
    optimizer = adamw(named, betas=(0.9, 0.99), formats=bnn.served_formats(ours), gradient_dtype="fp8-e5m2")
    by_torch = torch.optim.AdamW(
        scaled_parameters(theirs.parameters(), lr_scale_func_adam, lr=0.5, weight_decay=0.0), betas=(0.9, 0.99)
    )
    in_fp8, in_fp32 = losses_of(ours, optimizer, 80), losses_of(theirs, by_torch, 80)
    assert sum(in_fp32[-10:]) < 0.75 * sum(in_fp32[:5]) * 2
    assert sum(in_fp8[-10:]) == pytest.approx(sum(in_fp32[-10:]), rel=0.05)
    assert optimizer.last_result is not None and optimizer.last_result.rejected_blocks == 0
    served = [layer for layer in ours.modules() if isinstance(layer, bnn.CodedLinear)]
    assert len(served) == 2 * 5 and all(layer.weight.stride() == (0, 0) for layer in served)


def test_our_factors_are_the_packages_where_all_is_in_the_residual_stack() -> None:
    """umup_scales() goes by names, the package by what it has marked; both say fan_in**-.5 of weights."""
    model = decoder(in_fp8=False)
    ours = ballast.umup_scales(model.named_parameters(), depth=1, embedding=["embedding.*"], output=["projection.*"])
    for name, parameter in model.named_parameters():
        depth = parameter.mup_scaling_depth or 1
        assert ours[name] * depth**-0.5 == pytest.approx(lr_scale_func_adam(parameter)), name
