"""u-muP's learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from models import assert_close, layered, same_bits, weights_of

# The learning rates of a stack of depth 24 at a base rate of 1, by unit-scaling's own table.
WANTED = {
    "layers.0.up.weight": 0.00637887953849786,
    "layers.0.up.bias": 0.2041241452319315,
    "layers.0.norm.weight": 0.2041241452319315,
    "head.weight": 1.0,
    "embed.weight": 0.03125,
}
SHAPES = {
    "layers.0.up.weight": (4096, 1024),
    "layers.0.up.bias": (4096,),
    "layers.0.norm.weight": (1024,),
    "head.weight": (50000, 1024),
    "embed.weight": (50000, 1024),
}


def test_the_table_is_that_of_the_paper() -> None:
    assert ballast.umup_scales(SHAPES, depth=24) == pytest.approx(WANTED, rel=1e-15)


def test_tensors_and_pairs_will_do() -> None:
    pairs = [(name, torch.empty(shape, device="meta")) for name, shape in SHAPES.items()]
    assert ballast.umup_scales(pairs, depth=24) == ballast.umup_scales(SHAPES, depth=24)
    assert ballast.umup_scales({"conv": (8, 4, 3, 3)}, depth=1)["conv"] == 36**-0.5


def test_names_of_embedding_and_output_can_be_given() -> None:
    scales = ballast.umup_scales({"tok": (100, 16), "out": (100, 16)}, 4, embedding=["tok"], output=["out"])
    assert scales == {"tok": 0.25, "out": 1.0}
    with pytest.raises(ballast.Rejected, match="depth=0"):
        ballast.umup_scales({}, 0)


def test_scales_by_name_multiply_lr(make: Callable[..., Any]) -> None:
    model = layered(seed=1)
    before = weights_of(model)
    scales = {name: 0.5 ** (i + 1) for i, (name, _) in enumerate(model.named_parameters())}
    optimizer = make(
        ballast.AdamW,
        [{"params": model.named_parameters(), "lr_scale": 2.0}],
        lr=1e-2,
        weight_decay=0.0,
        lr_scales=scales,
        master="fp32",
        state="fp32",
    )
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    moved = [(p - q).abs().max().item() for p, q in zip(model.parameters(), before, strict=True)]
    assert moved == pytest.approx([1e-2 * 0.5**i for i in range(6)], rel=1e-3)


def by_group(model: nn.Module) -> list[dict[str, Any]]:
    """Of layers, whose learning rate falls from the last to the first."""
    return [
        {"params": list(layer.parameters()), "lr_scale": 0.5 ** (2 - i)} for i, layer in enumerate(model.children())
    ]


@pytest.mark.parametrize("rates", [{}, {"lr": 0.25}], ids=["of all groups", "of one group"])
@pytest.mark.parametrize("commit", ["release", "staged"])
def test_a_loop_that_scales_lr_by_itself_is_refused(
    commit: str, rates: dict[str, Any], make: Callable[..., Any]
) -> None:
    """As timm's schedulers do, and loops of masked autoencoders: what they set is what the group began with, scheduled."""
    model = layered(seed=1)
    groups = by_group(model)
    groups[2] |= rates
    optimizer = make(ballast.AdamW, groups, lr=0.1, commit=commit)
    before, began = weights_of(model), [group["lr"] for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, began, strict=True):
        group["lr"] = 0.3 * lr * group["lr_scale"]
    for words in (r"param_groups\[0\]: 0.0075\d* times 0.25", "group.pop"):
        with pytest.raises(ballast.Rejected, match=words):
            model(torch.ones(1, 8)).sum().backward()
        model.zero_grad()
    assert same_bits(before, weights_of(model))
    for group, lr in zip(optimizer.param_groups, began, strict=True):
        group["lr"] = 0.3 * lr
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert optimizer.last_result.step == 1


def test_what_the_refusal_says_to_write_trains_as_torch(make: Callable[..., Any]) -> None:
    ours, theirs = layered(seed=1), layered(seed=1)
    scaled = [{"params": group["params"], "lr": 0.1 * group["lr_scale"]} for group in by_group(theirs)]
    other = torch.optim.AdamW(scaled, lr=0.1)
    one = make(ballast.AdamW, by_group(ours), lr=0.1, master="fp32", state="fp32")
    for optimizer, model in ((one, ours), (other, theirs)):
        for _ in range(3):
            model(torch.ones(1, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
    assert_close(ours, theirs)


def test_a_scale_of_no_parameter_is_refused(make: Callable[..., Any]) -> None:
    optimizer = make(ballast.AdamW, [("w", nn.Parameter(torch.zeros(3)))], lr_scales={"v": 1.0})
    with pytest.raises(ballast.Rejected, match="lr_scales has 'v'"):
        optimizer.connect()
