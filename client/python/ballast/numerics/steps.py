"""One optimizer step on numpy arrays. Used through ballast.numerics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ballast._core import numerics as _native
from ballast.numerics import codecs, tables
from ballast.numerics.codecs import Encoded
from ballast.numerics.tables import Kernel

LEVELS = ("off", "core", "full")


@dataclass(frozen=True)
class Statistics:
    """What a step measured, over the tensor. g: the gradient, d: the wanted update, x: the weight before.

    Sums are 0 at statistics="off"; the fields after `rejected` are filled at "full" alone.
    """

    grad_sq: float  # sum g^2
    update_sq: float  # sum d^2
    rms_sq: float  # sum of the rms terms (kernels/NUMERICS.md); 0 for a rule without a second moment
    grad_absmax: float  # the largest finite |g|
    nonfinite: int  # elements of the gradient that are NaN or infinite
    rejected: int  # blocks of 32 that kept their old contents
    weight_sq: float  # sum x^2
    stored_dot: float  # sum d * (stored after - stored before)
    hi_dot: float  # the same with the first component of a weight of two; else stored_dot
    unchanged: int  # elements whose stored weight did not change
    hi_unchanged: int  # elements whose first component did not; else unchanged
    saturated: int  # codes of the state at their largest level
    full: bool
    n: int

    @property
    def rms(self) -> float:
        """RMS_t: the root mean square of g / max(sqrt(vhat), eps) (arXiv 2304.13013)."""
        return math.sqrt(self.rms_sq / self.n) if self.n else 0.0

    @property
    def edq(self) -> float:
        """Effective descent quality over its best, (d . dhat) / |d|^2 (Collage, arXiv 2405.03637); 1 when d is 0."""
        return self.stored_dot / self.update_sq if self.update_sq else 1.0


class Step(NamedTuple):
    """What step() returns; the weight and the state are those that were passed, if they were Encoded."""

    weight: Encoded
    state: dict[str, Encoded]
    statistics: Statistics


def new_state(
    rule: str, shape: tuple[int, ...], master: str = "split24", state_format: str = "companded8"
) -> dict[str, Encoded]:
    """Zero moments for a tensor of this shape: "momentum" and, where the rule has one, "variance"."""
    kernel = tables.find_kernel(rule, master, state_format)
    form = tables.states()[state_format]
    return {slot: codecs.empty(form, slot, tuple(shape)) for slot in _slots(kernel)}


def _slots(kernel: Kernel) -> tuple[str, ...]:
    return tuple(slot for slot in ("momentum", "variance") if slot in kernel.planes)


def step(
    rule: str,
    weight: Encoded | Any,
    grad: Any,
    state: Mapping[str, Encoded] | None = None,
    hyper: Mapping[str, float] | None = None,
    t: int = 1,
    *,
    master: str = "split24",
    state_format: str = "companded8",
    rounding: str = "stochastic",
    key: int = 0,
    run_step: int | None = None,
    grad_format: str = "fp32",
    grad_scale: float = 1.0,
    statistics: str = "core",
) -> Step:
    """One update of one tensor, as the daemon makes it.

    rule: "adam" (Kingma and Ba, arXiv 1412.6980), "adamw" (Loshchilov and Hutter, arXiv 1711.05101), "stable_adamw"
        (arXiv 2304.13013, with its two passes), "sgd" (L2 decay), "sgdw" (decoupled), "lion" (arXiv 2302.06675),
        "collage_light", "collage_plus" (arXiv 2405.03637), "muon" (arXiv 2502.16982; a matrix, whose bits are those of this
        machine's library of matrix products). rules() has each one's line of hyperparameters.
    weight: fp32 of any shape, encoded into `master` first; or an Encoded, which is updated in place.
    grad: the weight's shape, in `grad_format`: fp32 as float32, bf16 as uint16, fp16 as float16, fp8-e5m2 as uint8.
        g = RN(decoded * grad_scale). A block of 32 in which one is not finite keeps its contents and is counted.
    state: {"momentum": Encoded, "variance": Encoded}, updated in place; None: zeros in `state_format`.
    hyper: by name; the rest are the rule's defaults.
    t: the number of this update of the tensor, from 1: what bias correction takes.
    rounding: "stochastic" or "nearest", of master and state, where their formats know both.
    key, run_step: the random bits' tensor key (tensor_key()) and the run's step; run_step None: t.
    statistics: "off", "core" or "full".

    ValueError, with the valid names or range: an unknown name, a triple that is not compiled, a hyperparameter that is
    NaN or out of its range (eps <= 0, a beta outside [0, 1)), t = 0, weights that are not finite, a wrong shape or
    dtype.
    """
    weight, state, kernel = _prepare(rule, weight, master, state, state_format)
    values = _hyper_values(rule, hyper or {})
    t = codecs.check_integer("t", t, 1)
    random_key = _native.random_key(
        codecs.check_integer("key", key, 0), codecs.check_integer("run_step", t if run_step is None else run_step, 0)
    )
    codecs.check_choice("rounding", rounding, codecs.ROUNDINGS)
    codecs.check_choice("statistics", statistics, LEVELS)
    payload, wire = _gradient(grad, grad_format, weight.shape)
    measured = _native.update(
        kernel.index,
        _planes(kernel, weight, state),
        codecs.address_of(payload),
        wire,
        weight.size,
        _rows(rule, weight.shape),
        _finite("grad_scale", grad_scale),
        values,
        t,
        random_key,
        rounding == "stochastic",
        LEVELS.index(statistics),
    )
    return Step(weight, state, Statistics(**measured, n=weight.size))


def _prepare(
    rule: str, weight: Encoded | Any, master: str, state: Mapping[str, Encoded] | None, state_format: str
) -> tuple[Encoded, dict[str, Encoded], Kernel]:
    """The weight and the state as Encoded, made where they are not, and the kernel of their formats."""
    if not isinstance(weight, Encoded):
        form = tables.look_up("master format", master, tables.masters())
        weight = codecs.load_weights(form, codecs.flat_input("weight", weight), tuple(np.shape(weight)))
    if state is not None:
        state_format = _state_format(state)
    kernel = tables.find_kernel(rule, weight.format, state_format)
    made = new_state(rule, weight.shape, weight.format, state_format) if state is None else dict(state)
    return weight, made, kernel


def _rows(rule: str, shape: tuple[int, ...]) -> int:
    """Of a tensor that is updated as a matrix; 0 of others."""
    if not tables.rules()[rule].over_matrix:
        return 0
    if len(shape) < 2:
        raise ValueError(f"the weight has shape {shape}: {rule} is over matrices")
    return shape[0]


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}: wanted a finite number")
    return float(value)


def _state_format(state: Mapping[str, Encoded]) -> str:
    names = sorted({encoded.format for encoded in state.values()})
    if len(names) != 1:
        raise ValueError(f"state is in formats {names}: wanted one for all slots")
    return names[0]


def _hyper_values(rule: str, given: Mapping[str, float]) -> list[float]:
    """The hyperparameters in the rule's order, checked."""
    hypers = tables.rules()[rule].hypers
    unknown = sorted(given.keys() - {one.name for one in hypers})
    if unknown:
        raise ValueError(f"{rule} has no hyperparameter {unknown[0]!r}: it has {', '.join(h.name for h in hypers)}")
    return [one.check(given.get(one.name, one.default)) for one in hypers]


def _gradient(grad: Any, name: str, shape: tuple[int, ...]) -> tuple[codecs.Array, int]:
    valid = {wire.name: wire for wire in tables.wires().values() if wire.gradient}
    wire = tables.look_up("format of a gradient", name, valid)
    if tuple(np.shape(grad)) != shape:
        raise ValueError(f"grad has shape {tuple(np.shape(grad))}: the weight's is {shape}")
    return codecs.flat_input("grad", grad, wire.planes["weight"][0].dtype), wire.index


def _planes(kernel: Kernel, weight: Encoded, state: Mapping[str, Encoded]) -> list[int]:
    """Addresses of all planes, in the kernel's order."""
    if set(state) != set(_slots(kernel)):
        raise ValueError(f"state has slots {sorted(state)}: {kernel.rule} has {sorted(_slots(kernel))}")
    if weight.slot != "weight" or weight.served:
        raise ValueError(f"weight is {weight.slot} in {weight.format}: wanted a master format")
    for slot, encoded in state.items():
        if encoded.slot != slot or encoded.shape != weight.shape:
            raise ValueError(
                f"state[{slot!r}] is {encoded.slot} of shape {encoded.shape}: the weight's is {weight.shape}"
            )
    addresses = codecs.plane_addresses(weight, tables.masters()[weight.format])
    for slot in _slots(kernel):
        addresses += codecs.plane_addresses(state[slot], tables.states()[kernel.state])
    return addresses
