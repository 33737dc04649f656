"""kernels/NUMERICS.md, "Averages", written once more from its text alone, in numpy."""

from __future__ import annotations

import struct

import numpy as np
from document_formats import F, Array, bits, fmix64, magnitude, random_bits, value

_LARGEST = 0x7F7F7F00


def moved(a: Array, w: Array, decay: float, key: int, step: int) -> Array:
    """The average after this step; the value of its split24 code."""
    own = fmix64(key ^ fmix64(struct.unpack("<Q", struct.pack("<d", decay))[0]))
    random = random_bits(own, step, a.size)
    c = F(1 - decay)
    m = c * (w - a)
    s = a + m
    b = s - a
    e = (a - (s - b)) + (m - b)
    same = (bits(e) ^ bits(s)) >> np.uint32(31) == 0
    with np.errstate(over="ignore"):
        n = value(np.where(same, bits(s) + np.uint32(1), bits(s) - np.uint32(1)))
    u = ((random.x & np.uint32(0xFFFF)).astype(F) + F(0.5)) / F(65536)
    with np.errstate(invalid="ignore"):
        s = np.where(u * np.abs(n - s) < np.abs(e), n, s)
    held = value(np.minimum(magnitude(s), np.uint32(_LARGEST)) | bits(s) & np.uint32(0x80000000))
    return value((bits(held) + (random.y >> np.uint32(24))) >> np.uint32(8) << np.uint32(8))


def begun(w: Array) -> Array:
    """Where it begins: rounded to nearest."""
    return value((bits(w) + np.uint32(0x80)) >> np.uint32(8) << np.uint32(8))
