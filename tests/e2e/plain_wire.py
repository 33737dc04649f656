"""Payloads as proto/PROTOCOL.md describes them: checksums, bitmaps, number formats. numpy alone, no code of Ballast's."""

import hashlib

import numpy as np


def crc32c_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


TABLE = crc32c_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


assert crc32c(b"123456789") == 0xE3069283


def pack(bits) -> bytes:
    return np.packbits(np.array(bits, bool), bitorder="little").tobytes()


def unpack(data: bytes) -> list[bool]:
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(bool).tolist()


BYTES = {"fp32": 4, "bf16": 2, "int8-row": 1, "int8-tensor": 1}


def encode(array: np.ndarray, wire: str) -> bytes:
    """Encodes finite gradients for the wire, rounded to nearest even."""
    if wire == "fp32":
        return array.astype("<f4").tobytes()
    assert wire == "bf16"
    bits = array.astype("<f4").view("<u4").reshape(-1)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


def row_length(shape: tuple[int, ...], wire: str) -> int:
    """Elements that share a scale."""
    rows = wire == "int8-row" and len(shape) > 1 and shape[-1] > 1
    return shape[-1] if rows else int(np.prod(shape, dtype=np.int64))


def decode(data: bytes, wire: str, scales, first: int, of_a_row: int) -> np.ndarray:
    """Decodes served weights to fp32. `first`: the number of the payload's first element in its tensor."""
    if wire == "fp32":
        return np.frombuffer(data, "<f4")
    if wire == "bf16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    assert wire in ("int8-row", "int8-tensor")
    codes = np.frombuffer(data, np.int8).astype(np.float32)
    rows = (first + np.arange(len(codes))) // of_a_row - first // of_a_row
    assert len(scales) == rows[-1] + 1
    return codes * np.array(scales, np.float32)[rows] / np.float32(127)


def digest_of(weights) -> str:
    """A digest of all the weights' bits together; not the one on the wire."""
    return hashlib.sha256(b"".join(array.tobytes() for array in weights)).hexdigest()
