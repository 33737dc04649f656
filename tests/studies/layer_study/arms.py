"""The ways of training that are held against each other: which layers and formats, and which optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import ballast
import recipes
from ballast import nn as layers

FORMATS = Callable[[nn.Module], dict[str, Any]]


def none(model: nn.Module) -> dict[str, Any]:
    return {}


RECIPES = recipes.RECIPES
in_bf16 = RECIPES["collage"].switch


def switchback(variant: str) -> FORMATS:
    def switch(model: nn.Module) -> dict[str, Any]:
        model.bfloat16()
        layers.switch(model, "layers.*", variant=variant)
        return {"formats": layers.served_formats(model)}

    return switch


def scaled_fp8(model: nn.Module) -> dict[str, Any]:
    layers.switch(model, "layers.*", layers.Float8Linear)
    return {}


def served_fp8(loss_scale: float) -> FORMATS:
    def switch(model: nn.Module) -> dict[str, Any]:
        return RECIPES["fp8"].switch(model) | {"loss_scale": loss_scale}

    return switch


@dataclass(frozen=True)
class Arm:
    """switch: puts the layers into the model, in place, and returns the optimizer's options that go with them. options: more of
    them. torch: by torch's AdamW, in fp32."""

    switch: FORMATS = none
    rule: str = "AdamW"
    options: dict[str, Any] = field(default_factory=dict)
    torch: bool = False
    unit_scaled: bool = False
    layer_scale: bool = False
    tasks: tuple[str, ...] = ("text", "images")
    against: str = "torch's AdamW, fp32"

    def optimizer(self, model: nn.Module, learning: dict[str, Any], run: str) -> torch.optim.Optimizer:
        recipe = RECIPES["unit-scaled" if self.unit_scaled else "plain"]
        if self.torch:
            return recipe.by_torch(model, learning)
        rates = learning | recipe.rates(model)
        made: torch.optim.Optimizer = getattr(ballast, self.rule)(
            model.named_parameters(), **rates, **self.switch(model), **self.options, run=run, server="local"
        )
        return made


FP32 = "torch's AdamW, fp32"
BF16 = "bf16 layers, Ballast"
UNIT = "unit-scaled, torch's AdamW, fp32"
E5M2 = {"gradient_dtype": "fp8-e5m2", "loss_scale": recipes.LOSS_SCALE}
OF_BF16 = {"state": "bf16", "rounding": "nearest"}
ARMS = {
    FP32: Arm(torch=True),
    "Ballast's default (5.125 bytes)": Arm(),
    BF16: Arm(in_bf16),
    "SwitchBack, int8 served for the tensor": Arm(switchback("global"), against=BF16),
    "SwitchBackM, int8 served for the tensor": Arm(switchback("m"), against=BF16),
    "SwitchBackQ, int8 served by row": Arm(switchback("q"), against=BF16),
    "fp8, a scale for each tensor": Arm(scaled_fp8),
    "fp8, a scale for each tensor, LayerScale of 0": Arm(scaled_fp8, layer_scale=True),
    "fp8 served, e5m2 gradients, loss scale 2^14": Arm(served_fp8(recipes.LOSS_SCALE)),
    "fp8 served, e5m2 gradients, no loss scale": Arm(served_fp8(1.0)),
    UNIT: Arm(torch=True, unit_scaled=True, tasks=("text",), against=UNIT),
    "unit-scaled, fp8 served, e5m2 gradients, no loss scale": Arm(
        RECIPES["unit-scaled"].switch, unit_scaled=True, tasks=("text",), against=UNIT
    ),
    "e5m2 gradients": Arm(options=E5M2),
    "e5m2 gradients, error feedback": Arm(options=E5M2 | {"error_feedback": True}),
    "bf16 alone, in one": Arm(in_bf16, options=OF_BF16 | {"master": "bf16"}),
    "Collage plus: bf16 alone, in two": Arm(in_bf16, rule="CollagePlus", options={"rounding": "nearest"}),
}
