"""What a conversion changed: the result, read again, against what went in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ballast.convert.checkpoint import Checkpoint, Value, same_option
from ballast.convert.lazy import LazyTensor, pieces
from ballast.errors import Rejected
from ballast.numerics.errors import CODEC_ERRORS, CodecError

EXACT = CodecError(1, 0.0, 0.0, 0.0)
# By --to, the bounds of the slots that are encoded; all else is exact. A variance's is on v, not its root.
_CODECS = {
    "flashoptim": {
        "exp_avg": ("flash8", "momentum"),
        "momentum_buffer": ("flash8", "momentum"),
        "exp_avg_sq": ("flash8", "variance"),
        "master": ("flash24", "weight"),
    },
    "bitsandbytes": {
        "exp_avg": ("dynamic8", "momentum"),
        "momentum_buffer": ("dynamic8", "momentum"),
        "exp_avg_sq": ("dynamic8", "variance"),
    },
}


@dataclass
class SlotError:
    """slot: torch's name. bound, error: the largest |out - in| over the largest |in| of the block that shares a scale;
    0 is exact, to the bit. worst: the parameter that has it. beyond: tensors whose error is larger than the bound."""

    slot: str
    bound: float
    error: float = 0.0
    worst: str = ""
    tensors: int = 0
    beyond: int = 0

    @property
    def ok(self) -> bool:
        return self.beyond == 0

    def __str__(self) -> str:
        allowed = "to the bit" if self.bound == 0 else f"up to {self.bound:.3g} of a block's largest"
        told = "equal" if self.error == 0 else f"largest difference {self.error:.3g}, {self.worst}"
        beyond = "" if self.ok else f"; BEYOND THE BOUND in {self.beyond}"
        return f"{self.slot}: {self.tensors} tensors, wanted {allowed}: {told}{beyond}"


def bounds_of(to: str) -> dict[str, CodecError]:
    """By slot, what converting to this format may change; a slot that is not there is exact."""
    return {slot: CODEC_ERRORS[codec] for slot, codec in _CODECS.get(to, {}).items()}


def compare(
    wanted: Checkpoint, got: Checkpoint, bounds: Mapping[str, CodecError], compared: Callable[[int], object]
) -> tuple[SlotError, ...]:
    """Slot by slot, two tensors in memory at a time; compared(n) is called after each, with its bytes. Rejected,
    naming the first, if parameters, slots, shapes, numbers or options differ: no error of rounding explains those."""
    if len(wanted.parameters) != len(got.parameters) or len(wanted.groups) != len(got.groups):
        raise Rejected(
            f"verify: {len(got.parameters)} parameters in {len(got.groups)} groups came back of "
            f"{len(wanted.parameters)} in {len(wanted.groups)}"
        )
    for number, (options, came) in enumerate(zip(wanted.groups, got.groups)):
        for option, value in options.items():
            if option not in came or not same_option(value, came[option]):
                raise Rejected(
                    f"verify: param_groups[{number}]['{option}'] is {value!r}, and came back as {came.get(option)!r}"
                )
    errors: dict[str, SlotError] = {}
    for index, (one, other) in enumerate(zip(wanted.parameters, got.parameters)):
        label = wanted.label(index)
        state = {slot: value for slot, value in one.state.items() if value is not None}
        # bitsandbytes counts steps where torch's SGD does not.
        more = {slot for slot, value in other.state.items() if value is not None} - state.keys() - {"step"}
        lost = state.keys() - other.state.keys()
        if one.group != other.group or more or lost or other.name not in (one.name, None):
            raise Rejected(f"verify: {label}, came back as {got.label(index)}, with {', '.join(other.state)}")
        for slot, value in state.items():
            codec = bounds.get(slot, EXACT)
            error = errors.setdefault(slot, SlotError(slot, codec.max_of_block))
            _add(error, _difference(value, other.state[slot], codec, f"{label}, {slot}"), label)
            compared(value.nbytes if isinstance(value, LazyTensor) else 0)
    return tuple(errors.values())


def _add(total: SlotError, difference: float, label: str) -> None:
    total.tensors += 1
    total.beyond += not difference <= total.bound
    if not difference <= total.error:
        total.error, total.worst = difference, label


def _difference(a: Value, b: Value, codec: CodecError, label: str) -> float:
    if not isinstance(a, LazyTensor) or not isinstance(b, LazyTensor) or a.is_scalar:
        return 0.0 if _number(a) == _number(b) else float("inf")
    if a.shape != b.shape:
        raise Rejected(f"verify: {label} has shape {a.shape}, and came back with {b.shape}")
    x, y = a.read().reshape(-1), b.read().reshape(-1)
    if x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
        return 0.0
    if codec.max_of_block == 0 and x.dtype != y.dtype:
        raise Rejected(f"verify: {label} has dtype {a.dtype}, and came back as {b.dtype}")
    found = (_of_blocks(x[i:j], y[i:j], codec.block) for i, j in pieces(a.numel))
    # Of an exact slot equal values are not enough: -0 is not 0.
    return max(max(found, default=0.0), sys.float_info.min if codec.max_of_block == 0 else 0.0)


def _number(value: Value) -> Any:
    return value.item() if isinstance(value, LazyTensor) else value


def _of_blocks(x: torch.Tensor, y: torch.Tensor, block: int) -> float:
    """The largest over blocks of max |y - x| / max |x|; infinite where a block of zeros came back otherwise, or NaN
    did."""
    padding = (0, -len(x) % block)
    x, y = (torch.nn.functional.pad(values.double(), padding).reshape(-1, block) for values in (x, y))
    moved, largest = (y - x).abs().amax(1), x.abs().amax(1)
    ratio = torch.where(moved == 0, 0.0, moved / largest)
    return float("inf") if bool(ratio.isnan().any()) else float(ratio.max())
