"""Linear layers of unit-scaled models, in fp8 without a scale."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ballast.errors import Rejected
from ballast.nn.float8 import Float8Linear

_CONSTRAINTS = ("to_output_scale", "to_grad_input_scale", None)


class UnitScaledFloat8Linear(Float8Linear):
    """Float8Linear(scale=None) in the place of a unit-scaled layer (arXiv 2303.11257; u-muP, arXiv 2407.17465): inputs,
    weights and gradients have about the scale 1, which is where fp8 is most exact, and no loss scale is needed.

    The product is multiplied by in_features**-output_power, the input's gradient by out_features**-.5, or both by what
    `constraint` says, and the gradients of weight and bias by rows**-.5: as unit_scaling.Linear, and with output_power=1 as
    its LinearReadout.

    ballast.nn.switch(model, pattern, UnitScaledFloat8Linear) replaces those of the package unit-scaling, with their parameters.
    """

    replaced = "unit_scaling.Linear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        constraint: str | None = "to_output_scale",
        output_power: float = 0.5,
    ):
        if constraint not in _CONSTRAINTS:
            raise Rejected(
                f"constraint={constraint!r} of UnitScaledFloat8Linear: it must be one of {', '.join(map(repr, _CONSTRAINTS))}"
            )
        super().__init__(in_features, out_features, bias, device, dtype, scale=None)
        self.constraint = constraint
        self.output_power = output_power

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        of_output, of_input = self._factors()
        of_weight = max(1, x.numel() // self.in_features) ** -0.5
        weight = _scale(self.weight, backward=of_weight)
        bias = None if self.bias is None else _scale(self.bias, backward=of_weight)
        return _scale(self._multiply(_scale(x, backward=of_input), weight, bias), forward=of_output)

    def _factors(self) -> tuple[float, float]:
        of_output, of_input = self.in_features**-self.output_power, self.out_features**-0.5
        if self.constraint is None:
            return of_output, of_input
        both = of_output if self.constraint == "to_output_scale" else of_input
        return both, both

    @classmethod
    def replaces(cls, module: nn.Module) -> bool:
        package: Any = sys.modules.get("unit_scaling")  # without it there are none
        return package is not None and type(module) in (package.Linear, package.LinearReadout)

    @classmethod
    def options_of(cls, module: Any) -> dict[str, Any]:
        power = 1.0 if type(module).__name__ == "LinearReadout" else 0.5
        return {"constraint": module.constraint, "output_power": power}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, constraint={self.constraint!r}, output_power={self.output_power}"


def _scale(x: Tensor, forward: float = 1.0, backward: float = 1.0) -> Tensor:
    """x times one factor, whose gradient is multiplied by the other."""
    apply: Any = _Scale.apply  # torch declares no types for it
    scaled: Tensor = apply(x, forward, backward)
    return scaled


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.factor = backward
        return x.view_as(x) if forward == 1 else x * forward

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.factor, None, None


def fp8_losses(x: Tensor, dtype: torch.dtype = torch.float8_e5m2) -> tuple[float, float]:
    """What fp8 without a scale would lose of x: the share of its elements that are beyond the format's largest number, and of
    those that are not 0 and become 0. Waits for the device."""
    if not x.numel():
        return 0.0, 0.0
    values = x.detach().float()
    beyond = values.abs() > torch.finfo(dtype).max
    gone = (values != 0) & (values.to(dtype).float() == 0)
    return beyond.float().mean().item(), gone.float().mean().item()
