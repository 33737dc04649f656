#!/usr/bin/env python3
"""Writes random_vectors.json and random_vectors.inc: what the kernels' random bits must be.

Plain integers, from kernels/NUMERICS.md, "Random bits". Run without arguments to write both files
beside this one; --check exits with 1 if they differ from what would be written.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
M32, M64 = 2**32 - 1, 2**64 - 1


def fmix64(k: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        k = ((k ^ (k >> 33)) * factor) & M64
    return k ^ (k >> 33)


def words(tensor_key: int, step: int, element: int) -> tuple[int, int]:
    """The state word (m in its low half, v in its high half) and the master word (high bits first)."""
    key = fmix64(tensor_key ^ fmix64(step))
    keyed = (key + (element >> 32) * 0x9E3779B97F4A7C15) & M64
    low, high = keyed & M32, keyed >> 32
    x = (low + (element & M32) * 0x9E3779B9) & M32
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & M32
    x ^= high
    x = ((x ^ (x >> 15)) * 0xD35A2D97) & M32
    x ^= x >> 15
    return x, ((x ^ high) * 0x2C1B3C6D) & M32


def vectors() -> list[dict]:
    keys = [0, 1, 0x0123456789ABCDEF, M64]
    steps = [1, 2, 1000, 2**40 + 7]
    elements = [0, 33, M32, 2**32 + 5]
    more = [1, 31, 4095, 2**33 - 1, 2**40 + 4097, 2**63 + 12345]
    cases = []
    for i, key in enumerate(keys):
        for j, step in enumerate(steps):
            for k, element in enumerate(elements):
                cases.append((key, step, more[(i + j) % 6] if k == 1 and (i + j) % 2 else element))
    rows = []
    for key, step, element in cases:
        state, master = words(key, step, element)
        names = ("tensor_key", "step", "element", "state", "master")
        rows.append(dict(zip(names, (hex(value) for value in (key, step, element, state, master)))))
    return rows


def main() -> int:
    rows = vectors()
    files = {
        "random_vectors.json": "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n",
        "random_vectors.inc": "".join("{" + ", ".join(row.values()) + "},\n" for row in rows),
    }
    if "--check" in sys.argv[1:]:
        return int(any((HERE / name).read_text() != text for name, text in files.items()))
    for name, text in files.items():
        (HERE / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
