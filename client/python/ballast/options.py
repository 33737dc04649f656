"""What a param_group may ask for, checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ballast.errors import Rejected

MASTERS = {24: "split24", 32: "split32"}
STATES = ("companded8", "fp32")
ROUNDINGS = ("stochastic", "nearest")
WEIGHTS = (None, "client", "server", "match")

# Options of a group that the run fixes when it is created; lr, weight_decay and betas may change from step to step.
FIXED = ("eps", "lr_scale", "wd_scale", "state_dtype", "master_weight_bits", "rounding")


def _number(test: Callable[[float], bool]) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        try:
            return math.isfinite(float(value)) and test(float(value))
        except (TypeError, ValueError):
            return False

    return holds


def _is_betas(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_number(lambda x: 0 <= x < 1), value))


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_number(lambda x: x >= 0), "a finite number of at least 0"),
    "betas": (_is_betas, "two numbers, each at least 0 and below 1"),
    "eps": (_number(lambda x: x > 0), "a finite number above 0"),
    "weight_decay": (_number(lambda x: x >= 0), "a finite number of at least 0"),
    "lr_scale": (_number(lambda x: x >= 0), "a finite number of at least 0"),
    "wd_scale": (_number(lambda x: x >= 0), "a finite number of at least 0"),
    "master_weight_bits": (lambda x: x in MASTERS, "24 or 32"),
    "state_dtype": (lambda x: x in STATES, "'companded8' or 'fp32'"),
    "rounding": (lambda x: x in ROUNDINGS, "'stochastic' or 'nearest'"),
}

# torch.optim.AdamW's switches that change what is computed, and that this rule does not have.
_ABSENT = ("amsgrad", "maximize", "differentiable")


def check_group(group: Mapping[str, Any]) -> None:
    """Rejected, naming the option, what it is and what it may be."""
    where = f" of group '{group['name']}'" if "name" in group else ""
    for option, (holds, wanted) in _RULES.items():
        if not holds(group[option]):
            raise Rejected(f"{option}={group[option]!r}{where}: it must be {wanted}")
    for option in _ABSENT:
        if group.get(option):
            raise Rejected(f"{option}=True{where} is not supported: leave it out")


def step_values(group: Mapping[str, Any]) -> dict[str, float]:
    """What a step sends of a group."""
    beta1, beta2 = group["betas"]
    return {
        "lr": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "beta1": float(beta1),
        "beta2": float(beta2),
    }


def fixed_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a run fixes of a group."""
    return {option: group[option] for option in FIXED}


def check_unchanged(sent: Sequence[Mapping[str, float]], groups: Sequence[Mapping[str, Any]], step: int) -> None:
    """Rejected if the groups' values are no longer those that the open step was begun with."""
    for number, (then, group) in enumerate(zip(sent, groups)):
        now = step_values(group)
        for key in then:
            if now[key] != then[key]:
                raise Rejected(
                    f"{key} of param_groups[{number}] changed from {then[key]} to {now[key]} since the first gradient "
                    f"of step {step}, and weights were updated with the old value: change it after step()",
                    "FAILED_PRECONDITION",
                )


def check_fixed(created: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Rejected if what the run fixed of its groups was changed."""
    for number, (then, group) in enumerate(zip(created, groups)):
        for key in FIXED:
            if group[key] != then[key]:
                raise Rejected(
                    f"{key} of param_groups[{number}] changed from {then[key]!r} to {group[key]!r}: it is fixed when "
                    "the run is created; set it back, or make an optimizer with another run",
                    "FAILED_PRECONDITION",
                )
