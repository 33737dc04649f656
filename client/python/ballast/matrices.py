"""Which parameters of a group are updated as matrices, and which by AdamW beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from ballast.errors import Rejected

ADAMW = "adamw"


def split_group(group: Mapping[str, Any], patterns: Sequence[str], given: int) -> list[dict[str, Any]]:
    """The group with its matrices, and the same with "rule": "adamw" for what is none and for names that match a pattern;
    either alone where the other would be empty. A group that names its rule stays as it is.

    given: how many parameters the optimizer has been given, so that those without a name keep their places' names. A
    parameter of three dimensions is Rejected, by name: it may be several matrices, or a convolution's filters.
    """
    params = group["params"]
    if "rule" in group or isinstance(params, set):
        return [dict(group)]
    entries = [_named(item, given + i) for i, item in enumerate([params] if isinstance(params, Tensor) else params)]
    apart = {id(p) for name, p in entries if p.dim() < 2 or _matches(name, patterns)}
    for name, parameter in entries:
        if parameter.dim() == 3 and id(parameter) not in apart:
            raise Rejected(
                f"'{name}' has the shape {tuple(parameter.shape)}: Muon is over matrices, and it may be several, or filters of a "
                "convolution. Name it in adamw=, or give the optimizer parameters of two dimensions"
            )
    matrices = {**group, "params": [(name, p) for name, p in entries if id(p) not in apart]}
    beside = {**group, "params": [(name, p) for name, p in entries if id(p) in apart], "rule": ADAMW}
    if not any(p.requires_grad for _, p in beside["params"]):
        if "lr" not in beside:  # there is nothing to train
            beside = {"decouple_lr": False, **beside, "lr": 0.0}
    return [part for part in (matrices, beside) if part["params"]] or [dict(group)]


def check_patterns(patterns: Sequence[str], params: Iterable[Any]) -> None:
    """Rejected, naming it, if a pattern matches no name among these parameters or groups of them."""
    names = list(_names(params))
    for pattern in patterns:
        if not names:
            raise Rejected("adamw= chooses parameters by name: give model.named_parameters()")
        if not any(fnmatchcase(name, pattern) for name in names):
            raise Rejected(f"adamw: the pattern '{pattern}' matches no parameter; there are {', '.join(names[:8])}")


def _names(params: Iterable[Any]) -> Iterable[str]:
    for item in params:
        if isinstance(item, Mapping):
            inside = item.get("params", ())
            yield from _names([inside] if isinstance(inside, Tensor) else inside)
        elif isinstance(item, tuple) and item and isinstance(item[0], str):
            yield item[0]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _named(item: Any, place: int) -> tuple[str, Tensor]:
    name, parameter = item if isinstance(item, tuple) and len(item) == 2 else (f"param.{place}", item)
    if not isinstance(parameter, Tensor):
        raise Rejected(
            f"'{name}' is a {type(parameter).__name__}: give tensors, (name, tensor) pairs, or dicts with 'params'"
        )
    return name, parameter
