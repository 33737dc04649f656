"""kernels/NUMERICS.md written once more, from its text alone, in numpy: random bits, formats, the order of sums.

Shares nothing with kernels/. Slow, and whole tensors at a time. Arrays are padded to 256 elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from document_fp8 import Mcf8
from numpy.typing import NDArray

Array = NDArray[Any]
Planes = list[Array]
M64 = 2**64 - 1
BOUND = 0x7B000000  # 2^119
F = np.float32


def f32(x: Any) -> Array:
    return np.asarray(x, F)


def bits(x: Array) -> Array:
    return np.ascontiguousarray(x, F).view(np.uint32)


def value(u: Array) -> Array:
    return np.asarray(u & 0xFFFFFFFF, np.uint32).view(F)


def magnitude(x: Array) -> Array:
    return bits(x) & 0x7FFFFFFF


def least(a: Array, b: Array) -> Array:
    return np.where(a < b, a, b)


def most(a: Array, b: Array) -> Array:
    return np.where(a > b, a, b)


def fma(a: Any, b: Any, c: Any) -> Array:
    """a b + c with one rounding to fp32: the product is exact in double, the sum is rounded to odd there."""
    product, c = np.float64(f32(a)) * np.float64(f32(b)), np.float64(f32(c))
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    even = (np.ascontiguousarray(total).view(np.uint64) & 1) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return f32(np.where(np.isfinite(total) & (error != 0) & even, odd, total))


def by_block(x: Array, size: int = 32) -> Array:
    return x.reshape(-1, size)


# --- Random bits ----------------------------------------------------------------------------------------------------


def fmix64(k: int) -> int:
    k ^= k >> 33
    k = k * 0xFF51AFD7ED558CCD & M64
    k ^= k >> 33
    k = k * 0xC4CEB9FE1A85EC53 & M64
    return k ^ k >> 33


class Random(NamedTuple):
    x: Array
    y: Array


def random_bits(key: int, step: int, elements: int) -> Random:
    return random_words(fmix64(key ^ fmix64(step)), elements)


def random_words(c: int, elements: int) -> Random:
    """The words of elements 0, 1, ..., of which there are fewer than 2^32."""
    low, high = np.uint32(c & 0xFFFFFFFF), np.uint32(c >> 32)
    with np.errstate(over="ignore"):
        x = low + np.arange(elements, dtype=np.uint32) * np.uint32(0x9E3779B9)
        x = (x ^ x >> np.uint32(16)) * np.uint32(0x21F0AAAD) ^ high
        x = (x ^ x >> np.uint32(15)) * np.uint32(0xD35A2D97)
        x = x ^ x >> np.uint32(15)
        return Random(x, (x ^ high) * np.uint32(0x2C1B3C6D))


# --- Formats: of a master decode(planes), encode(x, y, stochastic); of a slot the same, from its 16 bits -----------


def to_bf16(x: Array, r: Array | None = None) -> Array:
    u = bits(x)
    return ((u + (0x7FFF + (u >> 16 & 1) if r is None else r)) >> 16).astype(np.uint16)


def from_bf16(word: Array) -> Array:
    return value(word.astype(np.uint32) << 16)


def bf16(x: Array) -> Array:
    """Rounded to bf16, as fp32."""
    u = bits(x)
    rounded = value((u + (0x7FFF + (u >> 16 & 1))) & 0xFFFF0000)
    return np.where(np.isnan(x), x, rounded)


class Fp32:
    last = [BOUND, 0x7F7FFFFF, 0]
    largest = 0x7F7FFFFF
    per = [1]
    root = False

    def encode(self, x: Array, r: Array | None) -> Planes:
        return [f32(x)]

    def decode(self, planes: Planes) -> Array:
        return planes[0]


class Bf16(Fp32):
    last = [BOUND, 0x7F7EFFFF, BOUND]
    largest = 0x7F7F7FFF

    def encode(self, x: Array, r: Array | None) -> Planes:
        return [to_bf16(x, r)]

    def decode(self, planes: Planes) -> Array:
        return from_bf16(planes[0])


class Bf16Master(Bf16):
    def encode(self, x: Array, y: Array | None) -> Planes:
        return [to_bf16(x, None if y is None else y >> 16)]


class Mcf(Bf16):
    """A state: its rule rounds. As a master: a pair."""

    def encode(self, x: Any, r: Array | None) -> Planes:
        if isinstance(x, tuple):
            return [to_bf16(x[0]), to_bf16(x[1])]
        return [to_bf16(x)]

    def load(self, x: Array) -> Planes:
        hi = to_bf16(x)
        return [hi, to_bf16(x - from_bf16(hi))]

    def decode(self, planes: Planes) -> Array:
        hi = from_bf16(planes[0])
        return hi + from_bf16(planes[1]) if len(planes) == 2 else hi


class Split:
    per = [1, 1]

    def __init__(self, k: int):
        self.k = k
        self.largest = 0x7F7F7F00 if k == 8 else 0x7F7F7FFF

    def encode(self, x: Array, y: Array | None) -> Planes:
        u = bits(x).astype(np.int64)
        if self.k == 8:
            u = u + (0x80 if y is None else y >> 24) >> 8
        hi = (u + (1 << self.k - 1)) >> self.k
        return [hi.astype(np.uint16), (u - (hi << self.k)).astype(np.int8 if self.k == 8 else np.int16)]

    def decode(self, planes: Planes) -> Array:
        hi, lo = (plane.astype(np.int64) for plane in planes)
        return value((hi << self.k) + lo << 16 - self.k)


class Flash:
    per = [1, 1]
    largest = 0x7F7F7FFF

    def __init__(self, n: int):
        self.n, self.dtype = F(n), np.int8 if n == 127 else np.int16

    @staticmethod
    def times_power(x: Array, p: Array) -> Array:
        first = p >> 1
        return np.ldexp(np.ldexp(x, first).astype(F), p - first).astype(F)

    @staticmethod
    def exponent(word: Array) -> Array:
        return np.maximum(word.astype(np.int32) >> 7 & 0xFF, 1)

    def encode(self, x: Array, y: Array | None) -> Planes:
        word = to_bf16(x)
        q = self.n * self.times_power(x - from_bf16(word), 135 - self.exponent(word))
        k = np.trunc(np.abs(q))
        k = k + (np.abs(q) - k >= 0.5)
        return [word, np.copysign(k, q).astype(self.dtype)]

    def decode(self, planes: Planes) -> Array:
        rest = self.times_power(f32(planes[1]) / self.n, self.exponent(planes[0]) - 135)
        return from_bf16(planes[0]) + rest


class Scaled:
    """A slot of codes with a scale for each block."""

    block = 32
    last = [BOUND, 0x5F7F0000]
    root = True  # of a variance

    def __init__(self, variance: bool):
        self.variance, self.per = variance, [1, self.block]

    def scale(self, absmax: Array) -> Array:
        return (absmax + 0xFFFF >> 16).astype(np.uint16)

    def encode(self, x: Array, r: Array | None) -> Planes:
        blocks = by_block(x, self.block)
        absmax = magnitude(blocks).max(axis=1)
        scale = self.scale(absmax)
        r = None if r is None else by_block(r, self.block)
        code = (self.second if self.variance else self.first)(blocks, scale[:, None], value(absmax)[:, None], r)
        return [code.astype(self.dtype()).ravel(), scale]

    def dtype(self) -> type:
        return np.uint8 if self.variance else np.int8

    def decode(self, planes: Planes) -> Array:
        levels = self.second_value if self.variance else self.first_value
        return f32(levels(by_block(planes[0], self.block), planes[1][:, None])).ravel()


class Companded8(Scaled):
    def first_value(self, code: Array, scale: Array) -> Array:
        k = f32(code)
        return (k / (F(254) - np.abs(k))) * from_bf16(scale)

    def second_value(self, code: Array, scale: Array) -> Array:
        step = from_bf16(scale) / F(255)
        root = f32(code) * step
        return most(root * root, F(0.25) * (step * step))

    def first(self, x: Array, scale: Array, absmax: Array, r: Array | None) -> Array:
        big = self.divisor(scale)
        total, f = np.abs(x) + big, x / (np.abs(x) + big)
        if r is None:
            return np.trunc(fma(F(254), f, F(128.5))) - 128
        w = f32(128 + r / 65536)
        u, c = w - F(128), (F(1) / F(254)) / most(big, F(2.0**-118))
        e = np.copysign(fma(-u, u, u) * c, x)
        return np.trunc(fma(-e, total, fma(F(254), f, w))) - 128

    def second(self, s: Array, scale: Array, absmax: Array, r: Array | None) -> Array:
        t = s * (F(255) / self.divisor(scale))
        if r is None:
            return np.trunc(t + F(0.5))
        k, u = np.trunc(t), f32((r + 0.5) / 65536)
        low = most(k * k, F(0.25))
        return least(k + (u * fma(k + F(1), k + F(1), -low) < fma(t, t, -low)), F(255))

    @staticmethod
    def divisor(scale: Array) -> Array:
        big = from_bf16(scale)
        return np.where(big == 0, F(1), big)


class Flash8(Scaled):
    last = [0x477FEFFF, 0x477FEFFF]

    def scale(self, absmax: Array) -> Array:
        return most(value(absmax), F(1e-12)).astype(np.float16)

    def first_value(self, code: Array, scale: Array) -> Array:
        y = f32(code) / F(127)
        return (y / (F(2) - np.abs(y))) * f32(scale)

    def second_value(self, code: Array, scale: Array) -> Array:
        root = (f32(code) / F(255)) * f32(scale)
        return root * root

    def first(self, x: Array, scale: Array, absmax: Array, r: Array | None) -> Array:
        z = x / most(absmax, F(1e-12))
        return np.floor(F(127) * ((F(2) * z) / (F(1) + np.abs(z))) + F(0.5))

    def second(self, s: Array, scale: Array, absmax: Array, r: Array | None) -> Array:
        return np.floor(F(255) * (s / most(absmax, F(1e-12))) + F(0.5))


class Dynamic8(Scaled):
    block = 256
    last = [BOUND, 0x7F7FFFFF]
    root = False

    def __init__(self, variance: bool):
        super().__init__(variance)
        values = [F(0), F(1)]
        for i in range(7):
            parts = 2 << i if variance else 1 << i
            step = float((F(1) - F(0.1)) / F(parts))
            ends = [
                F(float(F(0.1)) + step * j) if 2 * j < parts + 1 else F(1 - step * (parts - j))
                for j in range(parts + 1)
            ]
            one = [F(float(f"1e{i - 6}") * float((ends[j] + ends[j + 1]) / F(2))) for j in range(parts)]
            values += one if variance else one + [-x for x in one]
        self.map = np.sort(f32(values))
        self.middles = (self.map[:-1] + self.map[1:]) / F(2)

    def dtype(self) -> type:
        return np.uint8

    def scale(self, absmax: Array) -> Array:
        return value(absmax)

    def first_value(self, code: Array, scale: Array) -> Array:
        return self.map[code] * scale

    def first(self, x: Array, scale: Array, absmax: Array, r: Array | None) -> Array:
        return np.searchsorted(self.middles, x / np.where(scale == 0, F(1), scale), side="left")

    second_value, second = first_value, first


MASTERS: Mapping[str, Any] = {
    "fp32": Fp32(), "bf16": Bf16Master(), "mcf": Mcf(), "split24": Split(8), "split32": Split(16),
    "flash24": Flash(127), "flash32": Flash(32767), "mcf8": Mcf8(),
}  # fmt: skip


def slots(state: str) -> list[Any]:
    """The formats of momentum, variance and, where there is one, the variance's second component."""
    scaled = {"companded8": Companded8, "flash8": Flash8, "dynamic8": Dynamic8}
    if state in scaled:
        return [scaled[state](False), scaled[state](True)]
    return [{"fp32": Fp32, "bf16": Bf16, "mcf": Mcf}[state]()] * 3


def load(master: str, x: Array) -> Planes:
    """x is finite."""
    form = MASTERS[master]
    held = value(np.minimum(magnitude(x), form.largest) | bits(x) & 0x80000000)
    return form.load(held) if master == "mcf" else form.encode(held, None)


# --- Statistics -----------------------------------------------------------------------------------------------------


def tile_sums(terms: Array) -> list[float]:
    whole = np.zeros(-(-terms.size // 4096) * 4096, F)
    whole[: terms.size] = terms
    sums = []
    for tile in whole.reshape(-1, 16, 256):
        lanes = np.zeros(256, F)
        for row in tile:
            lanes = lanes + row
        while lanes.size > 1:
            lanes = lanes[0::2] + lanes[1::2]
        sums.append(float(lanes[0]))
    return sums


def total(terms: Array) -> float:
    result = 0.0
    for one in tile_sums(terms):
        result += one
    return result


# --- Serving formats ------------------------------------------------------------------------------------------------


def int8(x: Array, row: int) -> tuple[Array, Array]:
    rows = x.reshape(-1, row)
    scales = np.abs(rows).max(axis=1)
    with np.errstate(invalid="ignore"):
        q = most(least((F(127) * rows) / scales[:, None], F(127)), F(-127))
    return np.where(scales[:, None] == 0, 0, np.rint(np.nan_to_num(q))).astype(np.int8), scales


def e4m3(x: Array) -> Array:
    code = np.arange(127)
    table = np.where(code >> 3 > 0, (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10), (code & 7) * 2.0**-9)
    a = np.minimum(np.abs(x.astype(np.float64)), 448)
    above = np.minimum(np.searchsorted(table, a), 126)
    below = np.maximum(above - 1, 0)
    near, far = a - table[below], table[above] - a
    nearest = np.where(near < far, below, np.where(near > far, above, np.where(below % 2 == 0, below, above)))
    return (np.where(a == table[above], above, nearest) | np.signbit(x) * 128).astype(np.uint8)
