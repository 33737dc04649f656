"""bitsandbytes' state dicts: state1 and state2 in 8 bits with qmap and absmax, or fp32 for small tensors.

Layout, as of version 0.50 (github.com/bitsandbytes-foundation/bitsandbytes, bitsandbytes/optim/optimizer): uint8 codes
in the parameter's shape, qmap with the 256 values that they stand for, absmax with an fp32 scale for each 256 elements
(2048 before 0.45); step is a whole number. Two states are Adam's moments, in torch's order; what one state alone is
depends on the optimizer, which the file does not name. Tensors of less than 4096 elements stay fp32. The codec is
dynamic8 of ballast.numerics (arXiv 2110.02861).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ballast import numerics
from ballast.convert.checkpoint import Value
from ballast.convert.codes import SLOTS, EncodedMoment, blocks_of, need_order, need_whole
from ballast.convert.formats import ALONE
from ballast.convert.lazy import LazyTensor, constant, pieces
from ballast.errors import Rejected

SMALLEST = 4096  # elements of a tensor in 8 bits
_BLOCKS = (256, 2048)
_OURS = ("state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2")


def is_state(state: dict[str, Value]) -> bool:
    return "state1" in state


# --- in -------------------------------------------------------------------------------------------------------------


def decode(state: dict[str, Value], state1: str | None, label: str) -> dict[str, Value]:
    """torch's slots of one parameter, fp32. state1: what a state1 without state2 is. Rejected if that is not said, or
    the state is of AdEMAMix or was made with block_wise=False."""
    if "max1" in state:
        raise Rejected(
            f"{label}: its state has max1: it was made with block_wise=False, which is not converted. Load it with a "
            "bitsandbytes before 0.45 and go on with block_wise=True"
        )
    first, second = state["state1"], state.get("state2")
    if isinstance(first, LazyTensor) and isinstance(second, LazyTensor) and first.shape != second.shape:
        raise Rejected(
            f"{label}: state1 has shape {first.shape}, state2 {second.shape}: AdEMAMix has two means in state1, which "
            "torch's optimizers have no slot for"
        )
    if second is None and state1 is None:
        raise Rejected(
            f"{label}: bitsandbytes keeps one state of Lion, SGD, LARS, RMSprop and Adagrad alike, and does not say "
            f"which: give --state1 {', '.join(ALONE)}"
        )
    made: dict[str, Value] = {slot: _as_torch(slot, value) for slot, value in state.items() if slot not in _OURS}
    names = {"1": "exp_avg", "2": "exp_avg_sq"} if second is not None else {"1": str(state1)}
    for number, slot in names.items():
        made[slot] = _decoded(state, number, slot, label)
    return made


def _as_torch(slot: str, value: Value) -> Value:
    """step is a tensor there, of fp32."""
    return (
        constant(torch.tensor(float(value), dtype=torch.float32, device="cpu"))
        if slot == "step" and isinstance(value, int)
        else value
    )


def _decoded(state: dict[str, Value], number: str, slot: str, label: str) -> LazyTensor:
    codes, values, scales = (state.get(f"{kind}{number}") for kind in ("state", "qmap", "absmax"))
    if isinstance(codes, LazyTensor) and codes.dtype.is_floating_point and values is None:
        return codes
    if not isinstance(codes, LazyTensor) or not isinstance(values, LazyTensor) or not isinstance(scales, LazyTensor):
        raise Rejected(
            f"{label}: its state has state{number} without qmap{number} and absmax{number}: the file is damaged"
        )
    block = next((block for block in _BLOCKS if blocks_of(codes.numel, block) == scales.numel), None)
    if codes.dtype != torch.uint8 or values.shape != (256,) or block is None:
        raise Rejected(
            f"{label}: {slot} has codes {codes.dtype}[{codes.numel}], {values.numel} values and {scales.numel} "
            f"scales: wanted uint8, 256 values, and a scale for each {' or '.join(map(str, _BLOCKS))} elements"
        )
    need_whole(label, codes, scales)
    need_order(label, slot, codes)
    return LazyTensor(codes.shape, torch.float32, lambda: _decode(codes, values, scales, block))


def _decode(codes: LazyTensor, values: LazyTensor, scales: LazyTensor, block: int) -> torch.Tensor:
    whole = torch.empty(codes.shape, dtype=torch.float32, device="cpu")
    q, s, flat = codes.read().reshape(-1), scales.read().reshape(-1).float(), whole.reshape(-1)
    table = values.read().float()
    for first, last in pieces(codes.numel):
        each = s[first // block : blocks_of(last, block)].repeat_interleave(block)[: last - first]
        torch.mul(table[q[first:last].to(torch.int32)], each, out=flat[first:last])
    return whole


# --- out ------------------------------------------------------------------------------------------------------------


def encode(state: dict[str, Value], label: str) -> dict[str, Value]:
    """bitsandbytes' entries of torch's slots. Rejected if there is a tensor that it has no place for."""
    numbers = {"exp_avg": 1, "momentum_buffer": 1, "exp_avg_sq": 2}
    made: dict[str, Value] = {}
    for slot, value in state.items():
        if value is None:
            continue
        if slot == "step":
            made[slot] = int(value.item() if isinstance(value, LazyTensor) else value)
        elif not isinstance(value, LazyTensor) or slot in ("gnorm_vec", "unorm_vec"):
            made[slot] = value
        elif slot not in numbers or f"state{numbers[slot]}" in made:
            raise Rejected(f"{label}: bitsandbytes has no place for {slot}: leave it out with --drop {slot}")
        else:
            made.update(_encoded(value, slot, numbers[slot], label))
    if "state2" in made and "state1" not in made:
        raise Rejected(f"{label}: it has exp_avg_sq without exp_avg: bitsandbytes has no such optimizer")
    if "state1" in made:
        made.setdefault("step", 1)  # torch's SGD counts none; there is a buffer, so it is past the first
    return made


def _encoded(value: LazyTensor, slot: str, number: int, label: str) -> dict[str, Value]:
    if value.numel < SMALLEST:
        return {f"state{number}": LazyTensor(value.shape, torch.float32, lambda: value.read().to(torch.float32))}
    moment = EncodedMoment(value, "dynamic8", slot, label)
    return {f"state{number}": moment.codes, f"absmax{number}": moment.scales, f"qmap{number}": _map(SLOTS[slot])}


@cache
def _map(slot: str) -> LazyTensor:
    """The values that codes stand for. One tensor for all parameters, as there."""
    planes: dict[str, NDArray[Any]] = {slot: np.arange(256, dtype=np.uint8), f"{slot}.scale": np.ones(1, np.float32)}
    return constant(torch.from_numpy(numerics.decode(numerics.from_planes("dynamic8", slot, (256,), planes)).copy()))


def options_for(options: dict[str, Any]) -> dict[str, Any]:
    """A param_group's options with those that bitsandbytes reads: its SGD has momentum and dampening as betas."""
    if "betas" in options or "momentum" not in options:
        return options
    return {**options, "betas": (options["momentum"], options.get("dampening", 0)), "eps": options.get("eps", 0.0)}
