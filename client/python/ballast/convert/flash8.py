"""FlashOptim's state dicts: moments as NAME::quantized and NAME::scales, low bits of master weights as error_bits.

Layout, as of version 0.1.3 (github.com/databricks/flashoptim, flashoptim/optimizers): of each moment int8 codes, uint8
for the variance, in the parameter's shape, and an fp16 scale for each 32 elements. error_bits corrects a bf16
parameter to 24 bits (master_bytewidth 3 in its param_group: whole numbers of int8, cast to bf16) or 32 (4: int16, seen
as bf16). The codecs are flash8, flash24 and flash32 of ballast.numerics.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ballast import numerics
from ballast.convert.checkpoint import Parameter, Value
from ballast.convert.codes import SLOTS, EncodedMoment, decoded, need_order
from ballast.convert.lazy import LazyTensor, pieces
from ballast.errors import Rejected

CODES, SCALES, BITS = "::quantized", "::scales", "error_bits"
WIDTH = "master_bytewidth"  # in a param_group: bytes of a master weight
COARSE = (
    "FlashOptim's fp16 scales are coarse for blocks whose largest moment, or root of a variance, is below 6e-5, and 0 "
    "below 3e-8; so they are when it trains. Without --verify the state is converted all the same. "
)
_MASTERS = {3: ("flash24", torch.int8), 4: ("flash32", torch.int16)}


def is_state(state: dict[str, Value]) -> bool:
    return BITS in state or any(slot.endswith(CODES) for slot in state)


# --- in -------------------------------------------------------------------------------------------------------------


def decode(parameter: Parameter, options: dict[str, Any], weight: LazyTensor | None, label: str) -> dict[str, Value]:
    """torch's slots of one parameter, fp32; and "master" where it has error_bits. options: its param_group's. weight:
    the model's, for error_bits. Rejected if a slot is unknown, incomplete, or has error_bits and no weight."""
    state: dict[str, Value] = {}
    for slot, value in parameter.state.items():
        name = slot.removesuffix(CODES)
        if slot.endswith(SCALES):
            if slot.removesuffix(SCALES) + CODES not in parameter.state:
                raise Rejected(f"{label}: its state has {slot} and no codes: the file is damaged")
        elif slot == BITS:
            state["master"] = _master(value, options.get(WIDTH), weight, label)
        elif name == slot:
            state[slot] = value
        else:
            scales = parameter.state.get(name + SCALES)
            if name not in SLOTS or not isinstance(value, LazyTensor) or not isinstance(scales, LazyTensor):
                raise Rejected(f"{label}: its state has {slot}: wanted {', '.join(SLOTS)}, each with its {SCALES}")
            state[name] = decoded(value, scales, "flash8", name, label)
    return state


def _master(bits: Value, width: Any, weight: LazyTensor | None, label: str) -> LazyTensor:
    if weight is None:
        raise Rejected(
            f"{label}: its state has {BITS}, the low bits of FlashOptim's master weights: the model's weights hold "
            f"the rest. Give them with --names MODEL_STATE, or leave the low bits out with --drop {BITS}"
        )
    if width not in _MASTERS or not isinstance(bits, LazyTensor):
        raise Rejected(f"{label}: its state has {BITS}, and {WIDTH} of its param_group is {width!r}: wanted 3 or 4")
    if weight.dtype != torch.bfloat16 or weight.shape != bits.shape:
        raise Rejected(
            f"{label}: {BITS} of shape {bits.shape} corrects bf16 weights of that shape; the model's are "
            f"{weight.dtype} of shape {weight.shape}: give the model that was saved with this optimizer"
        )
    form, dtype = _MASTERS[width]
    if bits.dtype != dtype and not (bits.dtype.is_floating_point and (width == 3 or bits.dtype.itemsize == 2)):
        raise Rejected(f"{label}: {BITS} has dtype {bits.dtype}: wanted {dtype} or bf16")
    return LazyTensor(bits.shape, torch.float32, lambda: _join(bits, weight, form, dtype, label))


def _join(bits: LazyTensor, weight: LazyTensor, form: str, dtype: torch.dtype, label: str) -> torch.Tensor:
    whole = torch.empty(bits.shape, dtype=torch.float32, device="cpu")
    low, high, flat = bits.read().reshape(-1), weight.read().reshape(-1), whole.reshape(-1)
    for first, last in pieces(bits.numel):
        piece = low[first:last]
        exact = piece.to(dtype) if dtype == torch.int8 or piece.dtype == dtype else piece.view(dtype)
        if dtype == torch.int8 and not torch.equal(exact.to(piece.dtype), piece):
            raise Rejected(f"{label}: {BITS} are not whole numbers of 8 bits: {WIDTH} of the param_group is not theirs")
        planes = {"weight.hi": _as_words(high[first:last]), "weight.lo": exact.numpy()}
        try:
            encoded = numerics.from_planes(form, "weight", (last - first,), planes)
        except ValueError as error:
            raise Rejected(f"{label}: {BITS}, elements from {first}: {error}") from None
        flat[first:last] = torch.from_numpy(numerics.decode(encoded))
    return whole


def _as_words(weights: torch.Tensor) -> Any:
    return weights.contiguous().view(torch.int16).numpy().view(np.uint16)


# --- out ------------------------------------------------------------------------------------------------------------


def encode(state: dict[str, Value], weight: LazyTensor | None, label: str) -> dict[str, Value]:
    """FlashOptim's entries of torch's slots: moments in 8 bits, "master" as 24-bit error_bits of the model's bf16
    weight. Rejected if there is a tensor that FlashOptim has no place for, or one that is not what its formats
    hold."""
    made: dict[str, Value] = {}
    for slot, value in state.items():
        if value is None:
            continue
        if not isinstance(value, LazyTensor) or slot == "step":
            made[slot] = value
        elif slot == "master":
            made[BITS] = _error_bits(value, weight, label)
        elif slot in SLOTS:
            need_order(label, slot, value)
            moment = EncodedMoment(value, "flash8", slot, label)
            made[slot + CODES], made[slot + SCALES] = moment.codes, moment.scales
        else:
            raise Rejected(f"{label}: FlashOptim has no place for {slot}: leave it out with --drop {slot}")
    return made


def _error_bits(master: LazyTensor, weight: LazyTensor | None, label: str) -> LazyTensor:
    if weight is None or weight.dtype != torch.bfloat16 or weight.shape != master.shape:
        raise Rejected(
            f"{label}: FlashOptim keeps a master weight as what corrects the model's bf16 weight: give the bf16 model "
            "with --names MODEL_STATE, or leave it out with --drop master"
        )
    return LazyTensor(master.shape, torch.bfloat16, lambda: _split(master, weight, label))


def _split(master: LazyTensor, weight: LazyTensor, label: str) -> torch.Tensor:
    """Of the weight that there is, not of the master rounded once more: a correction of a whole half-step is a tie
    there."""
    low = torch.empty(master.shape, dtype=torch.bfloat16, device="cpu")
    values, high, flat = master.read().reshape(-1), weight.read().reshape(-1), low.reshape(-1)
    for first, last in pieces(master.numel):
        words = _as_words(high[first:last])
        exponent = np.maximum((words >> 7) & 255, 1).astype(np.int32)
        rest = values[first:last].double().numpy() - high[first:last].double().numpy()
        scaled = 127 * np.ldexp(rest, 135 - exponent)  # in half-steps of bf16 at the weight, of 127 parts each
        if not (np.abs(scaled) <= 127).all():
            raise Rejected(
                f"{label}: the model's bf16 weights are not its master weights rounded to bf16: give the model that "
                "was saved with this optimizer, or leave the master weights out with --drop master"
            )
        parts = np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)
        flat[first:last] = torch.from_numpy(parts).to(torch.bfloat16)
    return low
