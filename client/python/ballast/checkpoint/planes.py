"""Which planes a tensor has, by its group's rule and formats: the tables of kernels/NUMERICS.md.

They stand here once more so that a checkpoint is read without the compiled core; a test compares them with its
registry.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Plane:
    """A word of numpy's `dtype` for every `per` elements. A bf16 word is a uint16, its bits; one of fp8 a uint8."""

    name: str
    dtype: str
    per: int = 1

    @property
    def itemsize(self) -> int:
        return int(self.dtype[-1])


MASTERS: dict[str, tuple[Plane, ...]] = {
    "fp32": (Plane("weight", "<f4"),),
    "bf16": (Plane("weight", "<u2"),),
    "split24": (Plane("weight.hi", "<u2"), Plane("weight.lo", "|i1")),
    "split32": (Plane("weight.hi", "<u2"), Plane("weight.lo", "<i2")),
    "flash24": (Plane("weight.hi", "<u2"), Plane("weight.lo", "|i1")),
    "flash32": (Plane("weight.hi", "<u2"), Plane("weight.lo", "<i2")),
    "mcf": (Plane("weight.hi", "<u2"), Plane("weight.lo", "<u2")),
    "mcf8": (Plane("weight.hi", "|u1"), Plane("weight.lo", "|u1")),
}
STATES: dict[str, dict[str, tuple[Plane, ...]]] = {
    "fp32": {"momentum": (Plane("momentum", "<f4"),), "variance": (Plane("variance", "<f4"),)},
    "bf16": {"momentum": (Plane("momentum", "<u2"),), "variance": (Plane("variance", "<u2"),)},
    "companded8": {
        "momentum": (Plane("momentum", "|i1"), Plane("momentum.scale", "<u2", 32)),
        "variance": (Plane("variance", "|u1"), Plane("variance.scale", "<u2", 32)),
    },
    "flash8": {
        "momentum": (Plane("momentum", "|i1"), Plane("momentum.scale", "<f2", 32)),
        "variance": (Plane("variance", "|u1"), Plane("variance.scale", "<f2", 32)),
    },
    "dynamic8": {
        "momentum": (Plane("momentum", "|u1"), Plane("momentum.scale", "<f4", 256)),
        "variance": (Plane("variance", "|u1"), Plane("variance.scale", "<f4", 256)),
    },
    "mcf": {
        "momentum": (Plane("momentum", "<u2"),),
        "variance": (Plane("variance", "<u2"), Plane("variance.lo", "<u2")),
    },
}
_BOTH = ("momentum", "variance")
MOMENTS: dict[str, tuple[str, ...]] = {
    "adamw": _BOTH,
    "adam": _BOTH,
    "stable_adamw": _BOTH,
    "sgd": ("momentum",),
    "sgdw": ("momentum",),
    "lion": ("momentum",),
    "muon": ("momentum",),
    "collage_light": _BOTH,
    "collage_plus": _BOTH,
}


AVERAGE = "split24"  # the master format that averages are kept in
MOST_AVERAGES = 4


def average_planes(number: int) -> tuple[Plane, ...]:
    """Of the average with that place in the spec, in the order of its format."""
    return tuple(replace(plane, name=plane.name.replace("weight", f"average{number}")) for plane in MASTERS[AVERAGE])


@functools.cache
def planes_of(rule: str, master: str, state: str, averages: int = 0) -> tuple[Plane, ...]:
    """In the order in which they are stored, of a run with so many averages. KeyError: one of the names is unknown here."""
    moments = (plane for moment in MOMENTS[rule] for plane in STATES[state][moment])
    return (*MASTERS[master], *moments, *(plane for number in range(averages) for plane in average_planes(number)))
