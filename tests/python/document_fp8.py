"""mcf8 as kernels/NUMERICS.md writes it: a weight of two fp8 numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Planes = list[Array]
F = np.float32


def to_fp8(x: Array, e: int, m: int, r: Array | None = None) -> Array:
    """The code of x in fp8 with e bits of exponent and m of mantissa. r: 16 random bits; None: nearest, halves to even."""
    bias = 2 ** (e - 1) - 1
    wide = np.abs(x).astype(np.float64)
    # A subnormal has that of the smallest normal number; so has 0.
    exponent = np.where(wide == 0, 1 - bias, np.maximum(np.frexp(wide)[1] - 1, 1 - bias))
    steps = np.ldexp(wide, m - exponent)  # in spacings at x
    if r is None:
        whole = np.rint(steps)
    else:  # of a subnormal a number of 2^-16 spacings
        fine = np.where(wide < 2.0 ** (1 - bias), np.rint(steps * 65536), steps * 65536)
        whole = np.floor((fine + r) / 65536)
    code = (exponent + bias - 1) * 2**m + whole.astype(np.int64)
    largest = 0x7E if e == 4 else 0x7B
    return (np.minimum(code, largest) | np.signbit(x) * 0x80).astype(np.uint8)


def from_fp8(code: Array, e: int, m: int) -> Array:
    bias = 2 ** (e - 1) - 1
    exponent = np.maximum(code >> m & 2**e - 1, 1).astype(np.int32)
    mantissa = (code & 2**m - 1) + np.where(code >> m & 2**e - 1 == 0, 0, 2**m)
    return np.copysign(np.ldexp(mantissa.astype(F), exponent - bias - m), np.where(code & 0x80, F(-1), F(1)))


class Mcf8:
    per = [1, 1]
    largest = 0x4761C000  # 448 + 57344

    def encode(self, x: Array, y: Array | None) -> Planes:
        hi = to_fp8(x, 4, 3)
        return [hi, to_fp8(x - from_fp8(hi, 4, 3), 5, 2, None if y is None else y >> 16)]

    def decode(self, planes: Planes) -> Array:
        return from_fp8(planes[0], 4, 3) + from_fp8(planes[1], 5, 2)
