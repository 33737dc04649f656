"""What the daemon's kernels can do, as tables: rules, formats, and the triples that are compiled.

Read from the compiled registry, so that nothing here goes stale. Used through ballast.numerics.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ballast._core import numerics as _native

SLOTS = ("weight", "momentum", "variance")


@dataclass(frozen=True)
class Plane:
    """One stored array: `itemsize` bytes for every `per` elements of the count padded to 256."""

    name: str
    dtype: str
    itemsize: int
    per: int


@dataclass(frozen=True)
class Format:
    """A number format.

    kind: "master" (weights), "state" (moments) or "wire" (payloads: gradients in, served weights out).
    planes: by slot, what is stored. bytes_per_parameter: by slot; a scale for each row or tensor is not counted.
    largest: by slot, the largest |value| that a state's slot holds; beyond it encode() refuses.
    """

    name: str
    kind: str
    planes: Mapping[str, tuple[Plane, ...]]
    bytes_per_parameter: Mapping[str, float]
    largest: Mapping[str, float]
    scaling: str = "none"  # a wire format's scales: "none", one a "row", or one a "tensor"
    gradient: bool = False  # a wire format fit for gradients
    serving: bool = False  # a wire format fit for served weights
    index: int = -1  # in the registry's list of this kind


@dataclass(frozen=True)
class Hyper:
    """A hyperparameter. Valid: min <= x <= max, without the ends that are open."""

    name: str
    default: float
    min: float
    max: float
    open_min: bool
    open_max: bool
    doc: str

    def check(self, value: float) -> float:
        """`value` as a float; ValueError if it is not a number in the range."""
        number = float(value)
        low = number > self.min if self.open_min else number >= self.min
        high = number < self.max if self.open_max else number <= self.max
        if math.isnan(number) or not (low and high):
            ends = f"{'(' if self.open_min else '['}{self.min:g}, {self.max:g}{')' if self.open_max else ']'}"
            raise ValueError(f"{self.name} is {number!r}: wanted a number in {ends}")
        return number


@dataclass(frozen=True)
class Rule:
    """An optimizer: its hyperparameters, whether it has a second moment, the passes it makes over a tensor, and whether
    it is over whole matrices: tensors of two dimensions or more, of which the first counts rows."""

    name: str
    hypers: tuple[Hyper, ...]
    has_rms: bool
    passes: int
    over_matrix: bool


@dataclass(frozen=True)
class Kernel:
    """A compiled (rule, master format, state format). bytes_per_parameter: weights and state."""

    rule: str
    master: str
    state: str
    planes: tuple[str, ...]
    bytes_per_parameter: float
    index: int


# What the bytes of a plane are, where it is not an unsigned integer of the plane's size. A plane of 2 bytes for 32
# elements is a scale: bf16 (companded8) or fp16 (flash8), as bits.
_DTYPES = {
    ("fp32", "weight"): "float32",
    ("fp32", "momentum"): "float32",
    ("fp32", "variance"): "float32",
    ("split24", "weight.lo"): "int8",
    ("split32", "weight.lo"): "int16",
    ("flash24", "weight.lo"): "int8",
    ("flash32", "weight.lo"): "int16",
    ("companded8", "momentum"): "int8",
    ("flash8", "momentum"): "int8",
    ("flash8", "momentum.scale"): "float16",
    ("flash8", "variance.scale"): "float16",
    ("dynamic8", "momentum.scale"): "float32",
    ("dynamic8", "variance.scale"): "float32",
}
_WIRE_DTYPES = {
    "fp32": "float32",
    "bf16": "uint16",
    "fp16": "float16",
    "int8-row": "int8",
    "int8-tensor": "int8",
}


def _plane(format_name: str, name: str, size: int, per: int) -> Plane:
    return Plane(name, _DTYPES.get((format_name, name), f"uint{8 * size}"), size, per)


def _planes(format_name: str, rows: Iterable[tuple[str, int, int]]) -> tuple[Plane, ...]:
    return tuple(_plane(format_name, *row) for row in rows)


def _bytes(planes: Iterable[Plane]) -> float:
    return sum(plane.itemsize / plane.per for plane in planes)


@functools.cache
def registry() -> dict[str, Any]:
    """kernels/registry.h as dictionaries."""
    return _native.registry()


@functools.cache
def masters() -> dict[str, Format]:
    """The master formats, by name."""
    found = {}
    for index, row in enumerate(registry()["masters"]):
        planes = _planes(row["name"], row["planes"])
        found[row["name"]] = Format(
            row["name"], "master", {"weight": planes}, {"weight": _bytes(planes)}, {"weight": math.inf}, index=index
        )
    return found


@functools.cache
def states() -> dict[str, Format]:
    """The state formats, by name."""
    found = {}
    for index, row in enumerate(registry()["states"]):
        planes = {slot: _planes(row["name"], row[slot]) for slot in ("momentum", "variance")}
        largest = {slot: float(row[f"largest_{slot}"]) for slot in ("momentum", "variance")}
        sizes = {slot: _bytes(those) for slot, those in planes.items()}
        found[row["name"]] = Format(row["name"], "state", planes, sizes, largest, index=index)
    return found


@functools.cache
def wires() -> dict[str, Format]:
    """The wire formats, by name."""
    found = {}
    for index, row in enumerate(registry()["wires"]):
        name, size = row["name"], row["bytes"]
        codes = Plane("codes", _WIRE_DTYPES.get(name, f"uint{8 * size}"), size, 1)
        found[name] = Format(
            name,
            "wire",
            {"weight": (codes,)},
            {"weight": float(size)},
            {"weight": math.inf},
            scaling=row["scaling"],
            gradient=row["gradient"],
            serving=row["serving"],
            index=index,
        )
    return found


@functools.cache
def rules() -> dict[str, Rule]:
    """The optimizers, by name."""
    found = {}
    for row in registry()["kernels"]:
        hypers = tuple(Hyper(**hyper) for hyper in row["hypers"])
        found[row["rule"]] = Rule(row["rule"], hypers, row["has_rms"], row["passes"], row["over_matrix"])
    return found


@functools.cache
def kernels() -> tuple[Kernel, ...]:
    """Every compiled triple."""
    return tuple(
        Kernel(
            row["rule"],
            row["master"],
            row["state"],
            tuple(name for name, _, _ in row["planes"]),
            sum(size / per for _, size, per in row["planes"]),
            index,
        )
        for index, row in enumerate(registry()["kernels"])
    )


def look_up(what: str, name: str, valid: Mapping[str, Any]) -> Any:
    """valid[name]; ValueError with the valid names if there is none."""
    if name not in valid:
        raise ValueError(f"no {what} is named {name!r}: there are {', '.join(sorted(valid))}")
    return valid[name]


def format_of(name: str, slot: str) -> Format:
    """The format `name` of a slot: a master's or else a wire format's of "weight", a state's of the moments."""
    if slot not in SLOTS:
        raise ValueError(f"no slot is named {slot!r}: there are {', '.join(SLOTS)}")
    valid = {**wires(), **masters()} if slot == "weight" else states()
    found: Format = look_up(f"format of a {slot}", name, valid)
    return found


@functools.cache
def find_kernel(rule: str, master: str, state: str) -> Kernel:
    """The compiled triple; ValueError with the valid ones if there is none."""
    look_up("rule", rule, rules())
    look_up("master format", master, masters())
    look_up("state format", state, states())
    pairs = {(kernel.master, kernel.state): kernel for kernel in kernels() if kernel.rule == rule}
    if (master, state) not in pairs:
        valid = ", ".join(f"{one} + {other}" for one, other in sorted(pairs))
        raise ValueError(f"{rule} is not compiled for {master} + {state}: there are {valid}")
    return pairs[master, state]
