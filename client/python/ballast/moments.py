"""Optimizer state of a torch state_dict, as the daemon takes it over and gives it back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ballast.biased import as_kept
from ballast.errors import Rejected
from ballast.rule import Rule
from ballast.shard import part_of

# By torch's names; those of Lion and of other AdamWs are the same.
_SLOTS = {"exp_avg": "momentum", "momentum_buffer": "momentum", "exp_avg_sq": "variance"}
# The daemon's weight in fp32, beside the slots, where the parameter's own dtype holds less.
MASTER = "master"


@dataclass(frozen=True)
class Moments:
    """One tensor's state; of a sharded parameter this rank's part. slots: "momentum", "variance", fp32, contiguous in host
    memory, none where only `master` is known; updates: how many made them; names: what the state_dict calls the slots;
    master: the weights, likewise in fp32, where the state_dict has them; seen: tensors that somebody else may have, and their
    versions when they were read."""

    slots: dict[str, Tensor]
    updates: int
    names: dict[str, str]
    master: Tensor | None = None
    seen: tuple[tuple[Tensor, int], ...] = ()

    @property
    def changed(self) -> bool:
        """Whether somebody has written to them since they were read. Not of what goes around torch's versions."""
        return any(tensor._version != version for tensor, version in self.seen)

    def as_state(self) -> dict[str, Tensor]:
        """The tensor's entry of a torch state_dict. Shares the memory."""
        state = {
            "step": torch.tensor(float(self.updates), dtype=torch.float32, device="cpu"),
            **{self.names[slot]: values for slot, values in self.slots.items()},
        }
        return state if self.master is None else {**state, MASTER: self.master}


def slot_names(rule: str) -> dict[str, str]:
    """The slots that the daemon's rule keeps, with torch's names for them."""
    if rule in ("sgd", "sgdw", "muon"):
        return {"momentum": "momentum_buffer"}
    return {"momentum": "exp_avg"} if rule == "lion" else {"momentum": "exp_avg", "variance": "exp_avg_sq"}


def zeros(shape: torch.Size) -> Tensor:
    """fp32, contiguous in host memory, whatever torch makes by default."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def without_updates(shape: torch.Size, names: dict[str, str]) -> Moments:
    """Those of a tensor that has seen no update."""
    return Moments({slot: zeros(shape) for slot in names}, 0, names)


def moments_of(
    state_dict: Mapping[str, Any], param_groups: Iterable[Mapping[str, Any]], rules: Rule
) -> dict[int, Moments]:
    """By id(parameter). The groups are those of the state_dict, parameter by parameter. Rejected, naming what it is, if
    there is state that no slot of the daemon's or no parameter is for, of another shape than the parameter's, or that is
    not finite."""
    found = {}
    state = dict(state_dict["state"])
    for saved, group in zip(state_dict["param_groups"], param_groups):
        for key, parameter in zip(saved["params"], group["params"]):
            one = state.pop(key, {})
            moments = _read(one, key, parameter)
            _check_slots(moments, key, rules.of(group).name, saved)
            moments = as_kept(moments, saved, rules.of(group).name)
            bare = "step" in one and rules.of(group).name in ("sgd", "sgdw")  # without momentum
            if moments.slots or moments.master is not None or bare:
                found[id(parameter)] = moments
    if state:
        raise Rejected(
            f"the state_dict has state of parameter {next(iter(state))!r}, which is in none of its param_groups: it is not as "
            "state_dict() returned it"
        )
    return found


def _check_slots(moments: Moments, key: object, rule: str, saved: Mapping[str, Any]) -> None:
    """Of another rule's state, as of a group that was trained by AdamW and is to be by Muon."""
    kept = slot_names(rule)
    if moments.slots and set(moments.names.values()) != set(kept.values()):
        raise Rejected(
            f"the state of parameter {key} holds {', '.join(moments.names.values())}, and the rule {rule} keeps "
            f"{', '.join(kept.values())}: it is of another optimizer"
        )
    other = {"muon": "dampening", "sgd": "ns_steps", "sgdw": "ns_steps"}.get(
        rule
    )  # which the other's groups have alone
    if moments.slots and other in saved:
        raise Rejected(
            f"the momentum_buffer of parameter {key} was saved in a group that has '{other}', and the rule here is {rule}: SGD's is "
            "a sum of gradients, Muon's a mean. Begin it anew: take the parameter out of the state_dict's \"state\""
        )


def _read(state: Mapping[str, Any], key: object, parameter: Tensor) -> Moments:
    slots, names, master = {}, {}, None
    for name, value in state.items():
        if name == "step" or value is None:
            continue
        if name not in _SLOTS and name != MASTER:
            raise Rejected(
                f"the state of parameter {key} holds '{name}', which the daemon has no place for; it takes "
                f"{', '.join(_SLOTS)}, {MASTER} and step"
            )
        value = _checked(value, f"{name} of parameter {key}", parameter, variance=name == "exp_avg_sq")
        if name == MASTER:
            master = value
        else:
            slots[_SLOTS[name]], names[_SLOTS[name]] = value, name
    held = [*slots.values(), *([] if master is None else [master])]
    seen = tuple((tensor, tensor._version) for tensor in held if not tensor.is_inference())  # those have no version
    return Moments(slots, _count(state.get("step", 1), key), names, master, seen)


def _checked(value: Any, label: str, parameter: Tensor, variance: bool) -> Tensor:
    """As it is sent. What the daemon would refuse is refused here: it would have begun to replace what the run has."""
    if not isinstance(value, Tensor):
        raise Rejected(f"{label} is a {type(value).__name__}, and no tensor")
    if value.shape != parameter.shape:
        raise Rejected(
            f"{label} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}: the state_dict is of another "
            "model"
        )
    part = part_of(parameter, value)
    if part is None:
        raise Rejected(
            f"{label} is a DTensor with placements {getattr(value, 'placements', None)}, and the parameter is sharded otherwise: "
            "have torch.distributed.checkpoint load it into the form that get_optimizer_state_dict(model, optimizer) makes, or "
            "give whole tensors"
        )
    checked: Tensor = part.detach().to("cpu", torch.float32).contiguous()
    if not checked.isfinite().all() or (variance and (checked < 0).any()):
        raise Rejected(
            f"{label} holds a NaN, an infinity{' or a negative number' if variance else ''}: the training that saved it had "
            "come to nothing by then; load an earlier one"
        )
    return checked


def _count(step: Any, key: object) -> int:
    updates = float(step)
    if not 0 <= updates <= 2**53:
        raise Rejected(f"the step of parameter {key} is {updates}: it must be from 0 to 2**53")
    return round(updates)
