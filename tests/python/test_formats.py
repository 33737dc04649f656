"""Formats by name, narrow gradients and narrow weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ballast
from models import layered, perceptron, same_bits, spirals, weights_of

Make = Callable[..., Any]
EXACT = {"master": "fp32", "state": "fp32"}


def groups_of(optimizer: ballast.Optimizer, run: str) -> dict[str, tuple[str, str]]:
    """Master and state of each tensor, by name."""
    spec = optimizer._membership.connected().get_run(run)["spec"]
    return {
        tensor["name"]: (spec["groups"][tensor["group"]]["master"], spec["groups"][tensor["group"]]["state"])
        for tensor in spec["tensors"]
    }


def step(model: nn.Module, optimizer: ballast.Optimizer) -> None:
    model(torch.ones(2, 8).to(next(model.parameters()).dtype)).float().square().mean().backward()
    optimizer.step()


def test_the_first_pattern_that_matches_gives_the_formats(make: Make, run: str) -> None:
    model = layered(seed=1)
    formats = {"0.*": EXACT, "*.bias": {"master": "split32"}, "*": {"state_dtype": "fp32"}}
    optimizer = make(ballast.AdamW, model.named_parameters(), formats=formats)
    optimizer.connect()
    assert groups_of(optimizer, run) == {
        "0.weight": ("fp32", "fp32"),
        "0.bias": ("fp32", "fp32"),
        "1.weight": ("split24", "fp32"),
        "1.bias": ("split32", "companded8"),
        "2.weight": ("split24", "fp32"),
        "2.bias": ("split32", "companded8"),
    }
    assert len(optimizer.param_groups) == 1


def test_split_groups_keep_the_lr_of_their_own(make: Make) -> None:
    """Two groups, both split by the same pattern: each tensor moves by its own group's lr."""
    model = layered(seed=1)
    named = list(model.named_parameters())
    optimizer = make(
        ballast.AdamW,
        [{"params": named[:3], "lr": 1e-2}, {"params": named[3:], "lr": 1e-3}],
        weight_decay=0.0,
        formats={"*.bias": {"master": "split32"}, "*.weight": EXACT},
    )
    before = weights_of(model)
    step(model, optimizer)
    moved = [(p - q).abs().max().item() for p, q in zip(model.parameters(), before, strict=True)]
    assert moved == pytest.approx([1e-2] * 3 + [1e-3] * 3, rel=0.02)


def test_a_pattern_that_matches_nothing_is_refused_by_name(make: Make) -> None:
    optimizer = make(ballast.AdamW, layered(seed=1).named_parameters(), formats={"*.bias": EXACT, "embd.*": EXACT})
    with pytest.raises(ballast.Rejected, match=r"pattern 'embd\.\*' matches no parameter; there are 0\.weight"):
        optimizer.connect()


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ({"*": {"lr": 1.0}}, r"lr=1.0 of formats\['\*'\]: it may have master, state"),
        ({"*": {"master": "fp64"}}, r"master='fp64' of formats\['\*'\]: it must be"),
        ("fp32", "formats='fp32': give a dict of patterns"),
        ({"*": "fp32"}, r"formats\['\*'\] is 'fp32': give a dict"),
    ],
    ids=str,
)
def test_impossible_formats_are_refused(formats: Any, message: str, make: Make) -> None:
    with pytest.raises(ballast.Rejected, match=message):
        make(ballast.AdamW, layered(seed=1).parameters(), formats=formats)


def test_a_pattern_takes_its_tensors_out_of_what_the_group_travels_in(make: Make, run: str) -> None:
    model = layered(seed=1)
    whole = {"serving": None, "gradient_dtype": None}
    narrow = {"serving": "fp8-e4m3", "gradient_dtype": "fp8-e5m2"}
    optimizer = make(
        ballast.AdamW, model.named_parameters(), formats={"*.bias": whole, "0.*": {"master": None}}, **narrow
    )
    optimizer.connect()
    spec = optimizer._membership.connected().get_run(run)["spec"]
    groups = {tensor["name"]: spec["groups"][tensor["group"]] for tensor in spec["tensors"]}
    travel = {name: (group["serving"], group["gradient"]) for name, group in groups.items()}
    assert travel == {name: ("", "") if "bias" in name else ("fp8-e4m3", "fp8-e5m2") for name in groups}
    assert {group["master"] for group in groups.values()} == {"split24"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("serving", ["int8-row", "int8-tensor", "fp8-e4m3"])
def test_narrow_weights_land_decoded(serving: str, dtype: torch.dtype, make: Make) -> None:
    """Beside the same training with weights that return whole: what lands is those weights through the format."""
    narrow, whole = layered(seed=1, dtype=dtype), layered(seed=1, dtype=dtype)
    one = make(ballast.AdamW, narrow.named_parameters(), serving=serving, **EXACT)
    other = make(ballast.AdamW, whole.named_parameters(), run=f"{one.run}-whole", **EXACT)
    for p, q in zip(narrow.parameters(), whole.parameters(), strict=True):
        p.grad = torch.full_like(p, 0.5)
        q.grad = torch.full_like(q, 0.5)
    one.step()
    other.step()
    for p, q in zip(narrow.parameters(), whole.parameters(), strict=True):
        assert p.dtype == dtype
        if serving == "fp8-e4m3":
            wanted = q.float().to(torch.float8_e4m3fn).float()
            tolerance = 1 / 16 * q.float().abs() + 2**-10  # q was itself rounded for the trainer
        else:
            rows = q.float().reshape(-1, q.shape[-1]) if serving == "int8-row" and q.dim() > 1 else q.float()
            scale = rows.abs().amax(dim=-1, keepdim=True) if serving == "int8-row" else rows.abs().max()
            wanted = ((127 * rows / scale).round() * scale / 127).reshape(q.shape)
            tolerance = (scale / 127).expand(rows.shape).reshape(q.shape) * 1.01 + 2**-8 * q.float().abs()
        if dtype == torch.float32:
            torch.testing.assert_close(p, wanted, rtol=1e-6, atol=1e-9)
        assert ((p.float() - q.float()).abs() <= tolerance).all()


def test_narrow_weights_are_compared_after_a_restart(make: Make) -> None:
    model = layered(seed=1, dtype=torch.bfloat16)
    optimizer = make(ballast.AdamW, model.named_parameters(), serving="int8-row")
    step(model, optimizer)
    landed = weights_of(model)
    optimizer.pull()
    assert same_bits(landed, weights_of(model))
    optimizer.close()
    again = make(ballast.AdamW, model.named_parameters(), serving="int8-row")
    step(model, again)
    assert again.last_result.step == 2
    again.close()
    with torch.no_grad():
        model[0].weight[0, 0] += 1
    with pytest.raises(ballast.Rejected, match="'0.weight' differ"):
        step(model, make(ballast.AdamW, model.named_parameters(), serving="int8-row"))


def test_narrow_weights_are_taken_over_even_without_a_gradient(make: Make) -> None:
    model = layered(seed=1)
    optimizer = make(ballast.AdamW, model.named_parameters(), serving="int8-tensor")
    model[2](torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert len(model[0].weight.unique()) <= 255 and len(model[0].weight.abs().unique()) < 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_travel_in_fp8(dtype: torch.dtype, make: Make) -> None:
    """As if they had been rounded before: SGD with lr 1 takes the rounded gradient off."""
    model = layered(seed=1, dtype=dtype)
    optimizer = make(ballast.SGD, model.named_parameters(), lr=1.0, gradient_dtype="fp8-e5m2", **EXACT)
    before = weights_of(model)
    gradients = [torch.randn(p.shape).to(dtype) for p in model.parameters()]
    for p, g in zip(model.parameters(), gradients, strict=True):
        p.grad = g.clone()
    optimizer.step()
    for p, q, g in zip(model.parameters(), before, gradients, strict=True):
        wanted = (q.float() - g.to(torch.float8_e5m2).float()).to(dtype)
        torch.testing.assert_close(p, wanted)
    elements = sum(p.numel() for p in model.parameters())
    assert optimizer.last_result.timing.pushed_bytes == elements


def test_a_gradient_too_large_for_fp8_is_not_applied(make: Make) -> None:
    w = nn.Parameter(torch.ones(64))
    optimizer = make(ballast.SGD, [("w", w)], lr=1.0, gradient_dtype="fp8-e5m2", **EXACT)
    w.grad = torch.full((64,), 1e-2)
    w.grad[40] = 1e6
    with pytest.warns(UserWarning, match="1 block of 32"):
        optimizer.step()
    assert optimizer.last_result.nonfinite_tensors == 1
    assert (w[32:] == 1).all() and (w[:32] < 1).all()


@pytest.mark.parametrize(("scale", "moved"), [(1.0, 0.0), (2.0**16, 1e-6)])
def test_the_loss_scale_is_divided_out(scale: float, moved: float, make: Make) -> None:
    """Gradients of 1e-6 vanish in fp8-e5m2, unless the loss is scaled."""
    w = nn.Parameter(torch.zeros(64))
    optimizer = make(ballast.SGD, [("w", w)], lr=1.0, gradient_dtype="fp8-e5m2", loss_scale=scale, **EXACT)
    (w.sum() * 1e-6 * scale).backward()
    optimizer.step()
    assert -w[0].item() == pytest.approx(moved, rel=0.13)


def test_a_narrow_recipe_trains(make: Make) -> None:
    model = perceptron(seed=1).to(torch.bfloat16)
    optimizer = make(
        ballast.AdamW,
        model.named_parameters(),
        lr=1e-2,
        gradient_dtype="fp8-e5m2",
        loss_scale=1024.0,
        formats={"*.weight": {"serving": "int8-row"}},
    )
    points, labels = spirals(seed=1)
    losses = []
    for _ in range(60):
        loss = F.cross_entropy(model(points.to(torch.bfloat16)).float(), labels)
        (loss * optimizer.loss_scale).backward()
        optimizer.step(loss=loss)
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
