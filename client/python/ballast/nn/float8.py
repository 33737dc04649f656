"""Linear layers that compute in fp8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ballast.errors import Rejected
from ballast.nn import fused
from ballast.nn.coded_linear import CodedLinear
from ballast.nn.fused import transposed
from ballast.served_codes import ServedCodes, divided, saturate


class Float8Linear(CodedLinear):
    """nn.Linear of fp8 products: input and weight in e4m3, the output's gradient in e5m2.

    Input [..., in_features] -> output [..., out_features], in autocast's dtype or the input's.

    scale: "tensor": each tensor is multiplied by what brings its largest |x| to the format's largest number, as in SwitchBack's
        tensor-wise fp8 (arXiv 2304.13013, section 2.3). None: none is; a unit-scaled model needs none (arXiv 2303.11257), and
        the weights that the daemon serves in "fp8-e4m3" are used as they come.
    weight_gradient: "fp8": of input and output gradient in fp8, and backward keeps the input in one byte; "input": of both
        in the input's dtype.

    What is finite stays finite: beyond the largest number it becomes that. So without a scale a loss scale must be fixed: a
    GradScaler, which looks for infinities, sees none. Products and sums are fp32's, of the numbers that
    the codes stand for; on CUDA torch._scaled_mm's, and both features multiples of 16.
    """

    _multiple = 16

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        scale: Literal["tensor"] | None = "tensor",
        weight_gradient: Literal["fp8", "input"] = "fp8",
    ):
        if scale not in ("tensor", None):
            raise Rejected(f"scale={scale!r} of Float8Linear: it must be 'tensor' or None")
        if weight_gradient not in ("fp8", "input"):
            raise Rejected(f"weight_gradient={weight_gradient!r} of Float8Linear: it must be 'fp8' or 'input'")
        self.scale = scale
        self.weight_gradient = weight_gradient
        self.code_format = None if scale else "fp8-e4m3"
        self.arithmetic = _Fp8(scale is not None, weight_gradient == "fp8")
        super().__init__(in_features, out_features, bias, device, dtype)

    def _encode(self, weight: Tensor) -> ServedCodes:
        codes, scale = to_fp8(weight, torch.float8_e4m3fn, self.scale is not None)
        return ServedCodes("fp8-e4m3", codes, scale)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale!r}, weight_gradient={self.weight_gradient!r}"


@dataclass(frozen=True)
class _Fp8:
    """scaled: what is quantized has a scale. both: the weight's gradient is of fp8 too."""

    scaled: bool
    both: bool

    def output(
        self, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        made, scale = to_fp8(x, torch.float8_e4m3fn, self.scaled)
        return _product(made, codes, scale, scales, bias, x.dtype), (made, scale) if self.both else (x,)

    def gradients(
        self, gradient: Tensor, codes: Tensor, scales: Tensor, kept: tuple[Tensor, ...], wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        made, scale = to_fp8(gradient, torch.float8_e5m2, self.scaled)
        of_x = _product(made, transposed(codes), scale, scales, None, gradient.dtype) if wanted[0] else None
        if not wanted[1]:
            return of_x, None
        if not self.both:
            return of_x, gradient.t() @ kept[0]
        return of_x, _product(transposed(made), transposed(kept[0]), scale, kept[1], None, torch.float32)


def to_fp8(x: Tensor, dtype: torch.dtype, scaled: bool) -> tuple[Tensor, Tensor]:
    """x in fp8, to the nearest, ties to even; and what a code is to be multiplied by, fp32 [1]; none where it is not scaled.
    A tensor with a NaN or an infinity has a scale that is not finite, or such codes."""
    x = x.detach()
    if not scaled:
        return _rounded(x, None, dtype), torch.empty(0, dtype=torch.float32, device=x.device)
    largest = _largest(x)
    most = torch.finfo(dtype).max
    held = largest.clamp(min=most * torch.finfo(torch.float32).tiny)  # smaller ones would be multiplied by an infinity
    return _rounded(x, most / held, dtype), torch.where(largest == 0, 0.0, divided(held, most))


def _largest(x: Tensor) -> Tensor:
    """|x|, fp32 [1]; a NaN where there is one."""
    if not x.numel():
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float().reshape(1)


# Triton rounds to fp8 as torch does from here on: before that it has no such numbers, or rounds twice.
_ROUNDS_FP8 = (9, 0)


def _rounded(x: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """fp8 codes of x, or of its product with the factor."""
    kernels = fused.kernels(x, _ROUNDS_FP8)
    if kernels is not None and x.is_contiguous():
        codes: Tensor = kernels.saturate(x, factor, dtype)
        return codes
    return saturate(x.float() if factor is None else x.float() * factor, dtype)


def _product(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """fp8 a [m, k] times the transpose of fp8 b [n, k], times their scales where they have any, and the bias."""
    if a.device.type == "cuda" and torch.cuda.get_device_capability(a.device) >= (8, 9):
        return _on_tensor_cores(a, b, of_a, of_b, bias, dtype)
    product = a.float() @ b.t().float()
    for scale in (of_a, of_b):
        product = product * scale if scale.numel() else product
    return (product if bias is None else product + bias.float()).to(dtype)


# torch._scaled_mm takes rows by so many, of which the last dimension is then the sum's.
_ROWS = 16


def _on_tensor_cores(
    a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    one = torch.ones((), dtype=torch.float32, device=a.device)
    m, k = a.shape
    more = (-m % _ROWS, -k % _ROWS)
    if any(more):
        a = torch.nn.functional.pad(a.view(torch.uint8), (0, more[1], 0, more[0])).view(a.dtype)
        b = torch.nn.functional.pad(b.contiguous().view(torch.uint8), (0, more[1])).view(b.dtype)
    scale_a, scale_b = (scale.reshape(()) if scale.numel() else one for scale in (of_a, of_b))
    # It adds a bias of the output's dtype, where that is one of 16 bits, and wants it aligned.
    adds = bias is None or (bias.dtype == dtype and dtype != torch.float32)
    if bias is not None and adds and not is_compiling() and bias.data_ptr() % 16:
        bias = bias.clone()
    options = {"scale_a": scale_a, "scale_b": scale_b, "out_dtype": dtype if adds else torch.float32}
    multiply: Any = torch._scaled_mm  # torch declares another
    product: Any = multiply(a.contiguous(), b.contiguous().t(), bias=bias if adds else None, **options)
    first: Tensor = product[0] if isinstance(product, tuple) else product  # torch up to 2.4 gives the largest |x| too
    result = first[:m].clone() if more[0] else first  # no view: the caller may write to it
    return result if adds or bias is None else (result + bias.float()).to(dtype)
