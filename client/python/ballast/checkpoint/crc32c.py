"""CRC-32C (Castagnoli), as the manifest has one of each MiB: in numpy, some hundred MB a second.

A block is cut into lanes of 256 bytes, whose CRCs grow side by side; then neighbours are put together, two and two.
Both are the same linear operation on the register: what so many zero bytes make of it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIB = 1 << 20
_POLYNOMIAL = np.uint32(0x82F63B78)  # bits reversed
_LANE = 256
_Words = NDArray[np.uint32]


@functools.cache
def _shift_tables() -> list[_Words]:
    """By k: what 2^k zero bytes make of a register, as four tables of 256, one for each of its bytes."""
    one = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        one = np.where(one & np.uint32(1), one >> np.uint32(1) ^ _POLYNOMIAL, one >> np.uint32(1))
    bytes_of_register = np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, np.newaxis]
    tables = [one[bytes_of_register & np.uint32(255)] ^ bytes_of_register >> np.uint32(8)]
    while len(tables) < MIB.bit_length():
        tables.append(_shifted(tables[-1], tables[-1]))
    return tables


def _shifted(table: _Words, registers: _Words) -> _Words:
    low, high = registers & np.uint32(0xFFFF), registers >> np.uint32(16)
    ends = table[0][low & np.uint32(255)] ^ table[1][low >> np.uint32(8)]
    return np.asarray(ends ^ table[2][high & np.uint32(255)] ^ table[3][high >> np.uint32(8)], np.uint32)


def crc32c(block: Any) -> int:
    """Of a MiB or less, as bytes or anything else with a buffer."""
    given = np.frombuffer(block, np.uint8)
    if given.size > MIB:
        raise ValueError(f"{given.size} bytes: wanted at most {MIB}")
    tables, start = _shift_tables(), np.full(1, 0xFFFFFFFF, np.uint32)
    for k in range(MIB.bit_length()):
        if given.size >> k & 1:
            start = _shifted(tables[k], start)
    size = max(_LANE, 1 << (given.size - 1).bit_length())
    whole = np.zeros(size, np.uint8)
    whole[size - given.size :] = given  # zeros in front change nothing in a register that begins with 0
    words = np.ascontiguousarray(whole.view("<u4").astype(np.uint32, copy=False).reshape(-1, _LANE // 4).T)
    lanes = np.zeros(size // _LANE, np.uint32)
    for word in words:
        lanes = _shifted(tables[2], lanes ^ word)
    level = _LANE.bit_length() - 1
    while lanes.size > 1:
        lanes = _shifted(tables[level], lanes[0::2]) ^ lanes[1::2]
        level += 1
    return int(~(lanes ^ start)[0])
