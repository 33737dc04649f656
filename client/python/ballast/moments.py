"""Optimizer state out of a torch state_dict, as the daemon takes it over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ballast.errors import Rejected

# By torch's names; those of Lion and of other AdamWs are the same.
_SLOTS = {"exp_avg": "momentum", "momentum_buffer": "momentum", "exp_avg_sq": "variance"}


@dataclass(frozen=True)
class Moments:
    """One tensor's moments. slots: "momentum", "variance", fp32, contiguous in host memory; updates: how many made them;
    names: what the state_dict calls the slots."""

    slots: dict[str, Tensor]
    updates: int
    names: dict[str, str]

    def as_state(self) -> dict[str, Tensor]:
        """The tensor's entry of a torch state_dict. Shares the memory."""
        return {
            "step": torch.tensor(float(self.updates)),
            **{self.names[slot]: values for slot, values in self.slots.items()},
        }


def moments_of(state_dict: Mapping[str, Any], param_groups: Iterable[Mapping[str, Any]]) -> dict[int, Moments]:
    """By id(parameter). The groups are those of the state_dict, parameter by parameter. Rejected, naming what it is, if
    there is state that no slot of the daemon's is for, or of another shape than the parameter's."""
    found = {}
    for saved, group in zip(state_dict["param_groups"], param_groups):
        for key, parameter in zip(saved["params"], group["params"]):
            moments = _read(state_dict["state"].get(key, {}), key, parameter)
            if moments.slots:
                found[id(parameter)] = moments
    return found


def _read(state: Mapping[str, Any], key: object, parameter: Tensor) -> Moments:
    slots, names = {}, {}
    for name, value in state.items():
        if name == "step" or value is None:
            continue
        if name not in _SLOTS:
            raise Rejected(
                f"the state of parameter {key} holds '{name}', which the daemon has no place for; it takes "
                f"{', '.join(_SLOTS)} and step"
            )
        if value.shape != parameter.shape:
            raise Rejected(
                f"{name} of parameter {key} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}: the "
                "state_dict is of another model"
            )
        slots[_SLOTS[name]] = value.detach().to("cpu", torch.float32).contiguous()
        names[_SLOTS[name]] = name
    return Moments(slots, round(float(state.get("step", 1))), names)
