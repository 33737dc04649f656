"""Weights in the 8-bit formats that the daemon serves, made and read in torch with the daemon's bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# The largest code of int8.
MOST = 127.0

# By the wire's name: the dtype of the codes.
CODES = {"int8-row": torch.int8, "int8-tensor": torch.int8, "fp8-e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class ServedCodes:
    """A tensor as it is served: codes of its shape, one byte each, and of int8 the fp32 scales, one for each row
    ("int8-row") or one ("int8-tensor"). A weight of int8 is code * scale / 127; fp8 has no scales. Contiguous."""

    format: str
    codes: Tensor
    scales: Tensor

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The weights, as the client decodes them: rounded once, to the nearest, and finite."""
        values = self.codes.float()
        if self.scales.numel():
            values = divided(values * _spread(self.scales, self.codes.shape), MOST)
        most = torch.finfo(dtype).max
        return values.clamp(-most, most).to(dtype)

    def copy_(self, other: ServedCodes, non_blocking: bool = False) -> None:
        self.codes.copy_(other.codes, non_blocking=non_blocking)
        self.scales.copy_(other.scales, non_blocking=non_blocking)

    def to(self, device: torch.device) -> ServedCodes:
        """Itself where it is there already."""
        if self.codes.device == device:
            return self
        with torch.inference_mode(False):
            return ServedCodes(self.format, self.codes.to(device), self.scales.to(device))


def scales_of(format: str, shape: torch.Size) -> int:
    """How many there are. A tensor of one dimension, or whose last is 1, is one row."""
    if format == "int8-row" and len(shape) > 1 and shape[-1] > 1:
        return shape[:-1].numel()
    return 0 if format == "fp8-e4m3" else 1


def room_for(format: str, shape: torch.Size, pinned: bool) -> ServedCodes:
    """Host memory that codes can land in, also where it is made during an evaluation. pinned: a GPU copies from it."""
    with torch.inference_mode(False):
        codes = torch.zeros(shape, dtype=torch.uint8, device="cpu", pin_memory=pinned).view(CODES[format])
        scales = torch.zeros(scales_of(format, shape), dtype=torch.float32, device="cpu", pin_memory=pinned)
    return ServedCodes(format, codes, scales)


def encode(weights: Tensor, format: str) -> ServedCodes:
    """As the daemon serves these weights, if its master holds them exactly: int8 to the nearest of 127 * x / scale, ties
    to even, the scale being the largest |x| of a row or of the tensor (kernels/NUMERICS.md); fp8 to the nearest, and no
    finite one to a NaN. A tensor that has a NaN or an infinity has a scale that is not finite."""
    values = weights.detach().float()
    if format == "fp8-e4m3":
        return ServedCodes(format, saturate(values, torch.float8_e4m3fn), values.new_empty(0))
    rows = scales_of(format, weights.shape) > 1
    scales = values.abs().amax(-1).reshape(-1) if rows else values.abs().amax().reshape(1)
    return ServedCodes(format, quantize(values, _spread(scales, weights.shape)), scales)


def may_be_served(master: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """What daemons serve of this master, fp32, to parameters of the dtype, but for bf16 (bf16_words): rounded to the nearest,
    ties to even; or decoded codes. int8 that was decoded to 16 bits is not encoded to the same codes again, but comes of the
    master so."""
    most = torch.finfo(dtype).max
    yield master.clamp(-most, most).to(dtype)
    for format in CODES:
        yield encode(master, format).decode(dtype)


def quantize(values: Tensor, scales: Tensor) -> Tensor:
    """int8 codes of fp32 values; scales: broadcast to them. 0 where a scale is 0."""
    codes = (MOST * values / scales).round_().clamp_(-MOST, MOST)
    return torch.where(scales == 0, 0.0, codes).to(torch.int8)


def divided(x: Tensor, by: float) -> Tensor:
    """x / by, rounded once: on a GPU torch multiplies by the reciprocal of a number, but not of a tensor."""
    return x / x.new_full((), by) if x.device.type == "cuda" else x / by


def saturate(values: Tensor, dtype: torch.dtype) -> Tensor:
    """fp8 codes of fp32 values, to the nearest, ties to even. What is finite stays finite, and an infinity becomes a NaN,
    since e4m3 has none."""
    most = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-most, most), torch.nan).to(dtype)


def _spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Beside each element the scale that it has."""
    return scales.reshape(*shape[:-1], 1) if scales.numel() > 1 else scales.reshape([1] * len(shape))
