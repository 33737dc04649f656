"""Weights in bf16 as daemons serve them of a master, fp32: element by element."""

from __future__ import annotations

import torch
from torch import Tensor

# What lies halfway below a power of two flash24 and flash32 hold a little farther from it: 64 / 127 and 16384 / 32767 of the
# next 2^16 units of fp32's last place, to the nearest.
_FLASH24, _FLASH32 = 33026, 32769


def are_served_of(weights: Tensor, master: Tensor) -> bool:
    """Whether each of these weights is the bf16 number nearest to its master: of two that are equally near either, as formats
    choose otherwise, and flash24 as the number was before it was encoded."""
    bits = _bits(master)
    near = (weights == _numbers(bits + 0x8000 >> 16)) | (weights == _numbers(bits + 0x7FFF >> 16))
    return bool((near | _below_a_power(weights, bits, _FLASH24) | _below_a_power(weights, bits, _FLASH32)).all())


def to_flash24(master: Tensor, weights: Tensor) -> Tensor:
    """fp32 of which flash24 makes this master, that was one of its own, and these weights, which are served of it: as nearest
    to even makes another of those two that are equally near, a number a little nearer to the weight."""
    bits = _bits(master)
    words = _words(weights) << 16
    other = master.to(torch.bfloat16) != weights
    nearer = torch.where(words > bits, bits + 1, bits - 1)
    sent = torch.where(other & (bits & 0xFFFF == 0x8000), nearer, bits)
    return torch.where(_below_a_power(weights, bits, _FLASH24), words - 0x8000, sent).view(torch.float32)


def _below_a_power(weights: Tensor, bits: Tensor, distance: int) -> Tensor:
    """Where the weight is a power of two, and the master so many units below."""
    words = _words(weights)
    return (words & 0x7F == 0) & ((words << 16) - bits == distance)


def _bits(master: Tensor) -> Tensor:
    return master.contiguous().view(torch.int32)


def _words(weights: Tensor) -> Tensor:
    return weights.contiguous().view(torch.int16).to(torch.int32)


def _numbers(words: Tensor) -> Tensor:
    return words.to(torch.int16).view(torch.bfloat16)
