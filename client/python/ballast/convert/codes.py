"""Moments in 8 bits with a scale for each block, made and read in pieces by ballast.numerics: the daemon's own code."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ballast import numerics
from ballast.convert.lazy import LazyTensor, pieces
from ballast.errors import Rejected

# What ballast.numerics calls the slots of torch's optimizers.
SLOTS = {"exp_avg": "momentum", "momentum_buffer": "momentum", "exp_avg_sq": "variance"}
BLOCKS = {"flash8": 32, "dynamic8": 256}
_SCALES = {"flash8": torch.float16, "dynamic8": torch.float32}


def blocks_of(numel: int, block: int) -> int:
    return -(-numel // block)


def need_order(label: str, slot: str, *tensors: LazyTensor) -> None:
    """Rejected if one is in another order of memory than its shape's: by that order blocks are counted."""
    if any(tensor.reordered for tensor in tensors):
        raise Rejected(
            f"{label}: {slot} was saved in another order of memory than its shape's (channels last), by which blocks "
            "of 8-bit codes are counted: call .contiguous() on the model's parameters and the state, and save it again"
        )


def need_whole(label: str, *tensors: LazyTensor) -> None:
    """Rejected if one was saved in shards: blocks of codes may then not be those of the whole tensor."""
    if any(tensor.sharded for tensor in tensors):
        raise Rejected(
            f"{label}: its 8-bit codes were saved in shards, whose blocks need not be the whole tensor's: load them "
            "with the library that made them, and save the state of one rank, or uncompressed"
        )


@dataclass(eq=False)
class EncodedMoment:
    """A moment to be encoded: codes and scales, each when it is read. format: "flash8" or "dynamic8". slot: torch's
    name.

    Reading codes makes the scales too; they are kept until they are read, for they come next.
    """

    source: LazyTensor
    format: str
    slot: str
    label: str
    _scales: torch.Tensor | None = field(default=None, init=False)

    @property
    def codes(self) -> LazyTensor:
        signed = self.format == "flash8" and SLOTS[self.slot] == "momentum"
        return LazyTensor(self.source.shape, torch.int8 if signed else torch.uint8, self._read_codes)

    @property
    def scales(self) -> LazyTensor:
        count = blocks_of(self.source.numel, BLOCKS[self.format])
        return LazyTensor((count,), _SCALES[self.format], self._read_scales)

    def _encode(self) -> tuple[torch.Tensor, torch.Tensor]:
        slot, block = SLOTS[self.slot], BLOCKS[self.format]
        codes = torch.empty(self.source.shape, dtype=self.codes.dtype, device="cpu")
        scales = torch.empty(self.scales.shape, dtype=self.scales.dtype, device="cpu")
        values, flat = self.source.read().reshape(-1), codes.reshape(-1)
        for first, last in pieces(self.source.numel):
            try:
                made = numerics.encode(values[first:last].to(torch.float32).numpy(), self.format, slot)
            except ValueError as error:
                raise Rejected(f"{self.label}: {self.slot}, elements from {first}: {error}") from None
            flat[first:last] = torch.from_numpy(made.planes[slot][: last - first])
            used = blocks_of(last, block)
            scales[first // block : used] = torch.from_numpy(made.planes[f"{slot}.scale"][: used - first // block])
        return codes, scales

    def _read_codes(self) -> torch.Tensor:
        codes, self._scales = self._encode()
        return codes

    def _read_scales(self) -> torch.Tensor:
        scales, self._scales = self._scales, None
        return self._encode()[1] if scales is None else scales


def decoded(codes: LazyTensor, scales: LazyTensor, format: str, slot: str, label: str) -> LazyTensor:
    """The moment as fp32, of the codes' shape. Rejected if there are too few or too many scales, or other dtypes."""
    wanted = (codes.numel, torch.int8 if format == "flash8" and SLOTS[slot] == "momentum" else torch.uint8)
    count = blocks_of(codes.numel, BLOCKS[format])
    if codes.dtype != wanted[1] or scales.dtype != _SCALES[format] or scales.numel != count:
        raise Rejected(
            f"{label}: {slot} has codes {codes.dtype}[{codes.numel}] and scales {scales.dtype}[{scales.numel}]: wanted "
            f"{wanted[1]} and {_SCALES[format]}[{count}], a scale for each {BLOCKS[format]} elements"
        )
    need_whole(label, codes, scales)
    need_order(label, slot, codes)
    return LazyTensor(codes.shape, torch.float32, lambda: _decode(codes, scales, format, slot, label))


def _decode(codes: LazyTensor, scales: LazyTensor, format: str, slot: str, label: str) -> torch.Tensor:
    kind, block = SLOTS[slot], BLOCKS[format]
    whole = torch.empty(codes.shape, dtype=torch.float32, device="cpu")
    q, s, flat = codes.read().reshape(-1), scales.read().reshape(-1), whole.reshape(-1)
    for first, last in pieces(codes.numel):
        planes = {
            kind: q[first:last].numpy(),
            f"{kind}.scale": s[first // block : blocks_of(last, block)].numpy(),
        }
        try:
            encoded = numerics.from_planes(format, kind, (last - first,), planes)
        except ValueError as error:
            raise Rejected(f"{label}: {slot}, elements from {first}: {error}") from None
        flat[first:last] = torch.from_numpy(np.ascontiguousarray(numerics.decode(encoded)))
    return whole
