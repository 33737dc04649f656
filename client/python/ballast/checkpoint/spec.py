"""spec.json: of the run's RunSpec what says how its tensors are stored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ballast.checkpoint.errors import TooNew
from ballast.checkpoint.fields import Fields
from ballast.checkpoint.planes import MASTERS, MOMENTS, MOST_AVERAGES, STATES, Plane, planes_of

_MOST_ELEMENTS = 1 << 40  # of a tensor; the daemon takes no larger one
_MOST_DIMENSIONS = 32
_MOST_RANKS = 64


@dataclass(frozen=True)
class Group:
    rule: str
    master: str
    state: str
    averages: int = 0  # that the run keeps of the weights

    @property
    def planes(self) -> tuple[Plane, ...]:
        return planes_of(self.rule, self.master, self.state, self.averages)

    def __str__(self) -> str:
        return f"{self.rule}/{self.master}/{self.state}"


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    group: Group

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Spec:
    run_id: str
    tensors: tuple[Tensor, ...]
    ranks: int
    clips_tensors: bool
    averages: tuple[float, ...] = ()


def read_spec(values: dict[str, Any], path: Path) -> Spec:
    """Damaged if it is no run's; TooNew if it has a rule or a format that is unknown here."""
    fields = Fields(values, path)
    averages = tuple(fields.numbers("averages"))
    if len(averages) > MOST_AVERAGES:
        raise TooNew(path, f"has {len(averages)} averages of the weights, and {MOST_AVERAGES} are known here")
    groups = [_group(group, len(averages), path) for group in fields.messages("groups")]
    tensors = tuple(_tensor(tensor, groups) for tensor in fields.messages("tensors"))
    if not tensors:
        raise fields.wrong("tensors", "is empty")
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise fields.wrong("tensors", "has a name twice")
    ranks = fields.integer("ranks", _MOST_RANKS + 1)
    if ranks == 0:
        raise fields.wrong("ranks", "is 0")
    return Spec(fields.text("runId"), tensors, ranks, fields.has("tensorClip"), averages)


def _group(fields: Fields, averages: int, path: Path) -> Group:
    group = Group(fields.text("rule"), fields.text("master"), fields.text("state"), averages)
    for name, known in ((group.rule, MOMENTS), (group.master, MASTERS), (group.state, STATES)):
        if name not in known:
            raise TooNew(path, f"has the optimizer {str(group)[:200]!r}, and {name[:80]!r} is unknown here")
    return group


def _tensor(fields: Fields, groups: list[Group]) -> Tensor:
    name, number = fields.text("name"), fields.integer("group")
    if not name:
        raise fields.wrong("name", "is empty")
    if number >= len(groups):
        raise fields.wrong("group", f"is {number}, and there are {len(groups)} groups")
    shape = tuple(fields.integers("shape", _MOST_ELEMENTS + 1))
    if len(shape) > _MOST_DIMENSIONS or not 1 <= math.prod(shape) <= _MOST_ELEMENTS:
        raise fields.wrong("shape", f"is {str(shape)[:80]}: wanted 1 to 2^40 elements")
    return Tensor(name, shape, groups[number])
