"""What autograd sees of a layer that multiplies codes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Arithmetic(Protocol):
    """How matrices are multiplied with a weight [out, in] that is codes and their scales."""

    def output(
        self, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x [rows, in] times the weight, and the bias: [rows, out] in x's dtype, rounded once; and what backward keeps of x."""
        ...

    def gradients(
        self, gradient: Tensor, codes: Tensor, scales: Tensor, kept: tuple[Tensor, ...], wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of the output's gradient [rows, out]: x's [rows, in], and the weight's [out, in]; those that are wanted; in its dtype
        or fp32."""
        ...


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, codes: Tensor, scales: Tensor, arithmetic: Arithmetic
) -> Tensor:
    """x [..., in] times the weight that codes and scales stand for, and the bias: [..., out] in x's dtype, rounded once.
    `weight` itself is there for its gradient, and so that torch sees when backward comes after it was changed."""
    apply: Any = _Multiply.apply  # torch declares no types for it
    rows: Tensor = apply(x.reshape(-1, x.shape[-1]), weight, bias, codes, scales, arithmetic)
    return rows.reshape(*x.shape[:-1], codes.shape[0])  # here, where it is a view that may be written to


def _in_full(x: Tensor) -> AbstractContextManager[Any]:
    """Outside of autocast, which the device "meta" does not have."""
    return nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False)


class _Multiply(torch.autograd.Function):
    """Of matrices. Outside of autocast, which would make 16-bit products of what is to be exact: also in backward, which
    torch.compile traces under it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        codes: Tensor,
        scales: Tensor,
        arithmetic: Arithmetic,
    ) -> Tensor:
        with _in_full(x):
            output, kept = arithmetic.output(x, codes, scales, None if bias is None else bias.contiguous())
        ctx.save_for_backward(weight, codes, scales, *(kept if ctx.needs_input_grad[1] else ()))
        ctx.arithmetic = arithmetic
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, codes, scales, *kept = ctx.saved_tensors
        with _in_full(gradient):
            of_x, of_weight = ctx.arithmetic.gradients(gradient, codes, scales, tuple(kept), ctx.needs_input_grad[:2])
        if of_x is not None:
            of_x = of_x.to(gradient.dtype)
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        of_bias = gradient.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias, None, None, None
