"""SwitchBack: linear layers that compute in int8 (arXiv 2304.13013)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ballast.errors import Rejected
from ballast.nn.coded_linear import CodedLinear
from ballast.nn.fused import transposed
from ballast.nn.int8 import MOST_SUMMED, dequantize, product, quantize_rows
from ballast.served_codes import MOST, divided

# By variant: what the weight is quantized in, and whether backward keeps the input as codes.
_VARIANTS = {"global": ("int8-tensor", False), "m": ("int8-tensor", True), "q": ("int8-row", False)}


class SwitchBackLinear(CodedLinear):
    """nn.Linear whose output and input's gradient are products of int8, and whose weight's gradient is one of the 16-bit
    type: it sums over the batch, where int8's rounding would hurt (arXiv 2304.13013, section 2.2).

    Input [..., in_features] -> output [..., out_features], in autocast's dtype or the input's. Inputs and output gradients
    are quantized by row, the weight as the variant says:

    "global" (the paper's SwitchBack): one scale for the tensor. Serve it in "int8-tensor".
    "m" (SwitchBackM): likewise; backward keeps the input in int8, half of the memory, and the weight's gradient is of that.
    "q" (SwitchBackQ): a scale for each row of the weight, "int8-row". The input's gradient is G W = (G scales) codes: the
        scales go into G before it is quantized, where the paper quantizes W a second time, by column. So the codes that
        were served are all that backward needs.

    On CUDA both features are multiples of 8, and the products those of ballast.nn.triton_kernels, or of torch._int_mm without
    Triton and under torch.compile; on CPUs oneDNN's, where these are exact, else fp32's of the codes. The sums are exact
    everywhere.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        variant: Literal["global", "m", "q"] = "global",
    ):
        if variant not in _VARIANTS:
            raise Rejected(
                f"variant={variant!r} of SwitchBackLinear: it must be one of {', '.join(map(repr, _VARIANTS))}"
            )
        if max(in_features, out_features) > MOST_SUMMED:
            raise Rejected(
                f"SwitchBackLinear({in_features}, {out_features}): a sum of more than {MOST_SUMMED} products of int8 may not fit "
                "int32. Keep nn.Linear there"
            )
        self.variant = variant
        self.code_format, keeps_codes = _VARIANTS[variant]
        self.arithmetic = _Int8(keeps_codes)
        super().__init__(in_features, out_features, bias, device, dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, variant={self.variant!r}"


@dataclass(frozen=True)
class _Int8:
    """keeps_codes: backward keeps x in int8."""

    keeps_codes: bool

    def output(
        self, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        made, largest = quantize_rows(x)
        y = product(made, codes, largest, scales, bias, x.dtype)
        return y, (made, largest) if self.keeps_codes else (x,)

    def gradients(
        self, gradient: Tensor, codes: Tensor, scales: Tensor, kept: tuple[Tensor, ...], wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        of_x = _of_input(gradient, codes, scales) if wanted[0] else None
        if not wanted[1]:
            return of_x, None
        x = dequantize(*kept).to(gradient.dtype) if self.keeps_codes else kept[0]
        return of_x, gradient.t() @ x


def _of_input(gradient: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """G W."""
    of_rows = None if scales.numel() == 1 else divided(scales, MOST)
    made, largest = quantize_rows(gradient, of_rows)
    return product(made, transposed(codes), largest, scales if of_rows is None else None, None, gradient.dtype)
