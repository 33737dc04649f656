"""u-muP's learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from models import layered, weights_of

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


def test_a_scale_of_no_parameter_is_refused(make: Callable[..., Any]) -> None:
    optimizer = make(ballast.AdamW, [("w", nn.Parameter(torch.zeros(3)))], lr_scales={"v": 1.0})
    with pytest.raises(ballast.Rejected, match="lr_scales has 'v'"):
        optimizer.connect()
