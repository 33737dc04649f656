"""An optimizer's state as every format is read to and written from: torch's state_dict, tensors unread."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Union

from ballast.convert.lazy import LazyTensor
from ballast.convert.tree import is_flat
from ballast.errors import Rejected

Value = Union[LazyTensor, int, float, None]

# Slots that have the parameter's shape: the first that is there tells it.
SHAPED = (
    "exp_avg",
    "momentum_buffer",
    "exp_avg_sq",
    "master",
    "square_avg",
    "sum",
    "max_exp_avg_sq",
    "exp_avg::quantized",
    "momentum_buffer::quantized",
    "exp_avg_sq::quantized",
    "error_bits",
    "state1",
)
# bitsandbytes puts what FSDP is not to see into a dict of this name (bitsandbytes 0.50, optim/optimizer).
WRAPPED = "__bnb_optimizer_quant_state__"


@dataclass
class Parameter:
    """One parameter's state.

    name: None where the file numbers parameters and does not name them. group: its place in Checkpoint.groups. state:
    by slot ("exp_avg", "exp_avg_sq", "momentum_buffer", "step", "master"...); empty where it was never updated.
    """

    name: str | None
    group: int
    state: dict[str, Value]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The parameter's, as far as its state tells."""
        for slot in SHAPED:
            value = self.state.get(slot)
            if isinstance(value, LazyTensor):
                return value.shape
        return None


@dataclass
class Checkpoint:
    """parameters: in the optimizer's order, group after group. groups: the options of each param_group, lr and so on,
    without its parameters. ordered: whether that order is known; a flat state_dict has names and no order."""

    parameters: list[Parameter]
    groups: list[dict[str, Any]]
    ordered: bool = True

    @property
    def is_named(self) -> bool:
        return all(parameter.name is not None for parameter in self.parameters)

    def label(self, index: int) -> str:
        """How a message names a parameter."""
        name = self.parameters[index].name
        return f"parameter {index}" if name is None else f"parameter {index}, {name}"

    def tensors(self) -> Iterable[LazyTensor]:
        """All tensors, each once, though parameters may share one."""
        found = {id(v): v for p in self.parameters for v in p.state.values() if isinstance(v, LazyTensor)}
        return found.values()

    def as_state_dict(self, by_name: bool) -> dict[str, Any]:
        """As torch lays it out, keyed by name or by number; leaves are LazyTensor."""
        keys: list[Any] = [p.name if by_name else i for i, p in enumerate(self.parameters)]
        groups = []
        for number, options in enumerate(self.groups):
            own = [i for i, parameter in enumerate(self.parameters) if parameter.group == number]
            group = {**options, "params": [keys[i] for i in own]}
            if self.is_named:
                group["param_names"] = [self.parameters[i].name for i in own]
            groups.append(group)
        state = {key: dict(parameter.state) for key, parameter in zip(keys, self.parameters) if parameter.state}
        return {"state": state, "param_groups": groups}


def from_state_dict(tree: dict[Any, Any], where: str, drop: Collection[str] = ()) -> Checkpoint:
    """Of torch's layout, nested or flat, keyed by number or by name, without the slots in `drop`. Rejected, saying
    what is wrong with it."""
    if is_flat(tree):
        return _from_flat(tree, where, drop)
    if not isinstance(tree["param_groups"], list) or not all(isinstance(group, dict) for group in tree["param_groups"]):
        raise Rejected(f"{where}: param_groups is not a list of dicts")
    parameters: list[Parameter] = []
    groups, seen = [], set()
    for number, group in enumerate(tree["param_groups"]):
        keys, names = group.get("params"), group.get("param_names")
        if not isinstance(keys, list) or not all(isinstance(key, (int, str)) for key in keys):
            raise Rejected(f"{where}: param_groups[{number}]['params'] is not a list of numbers or names")
        if names is not None and len(names) != len(keys):
            raise Rejected(f"{where}: param_groups[{number}] has {len(keys)} params and {len(names)} param_names")
        groups.append({option: value for option, value in group.items() if option not in ("params", "param_names")})
        for place, key in enumerate(keys):
            if key in seen:
                raise Rejected(f"{where}: parameter {key} is in param_groups twice")
            seen.add(key)
            name = key if isinstance(key, str) else (str(names[place]) if names else None)
            # A dict that went through torch.distributed.checkpoint has numbers as text.
            state = tree["state"].get(key, tree["state"].get(str(key), {}))
            parameters.append(Parameter(name, number, _state(state, f"{where}: parameter {key}", drop)))
    if strangers := [key for key in tree["state"] if key not in seen and not _is_number_in(key, seen)]:
        raise Rejected(f"{where}: there is state of {strangers[0]!r}, which is in no param_group: the file is damaged")
    return _checked_names(Checkpoint(parameters, groups), where)


def slots_in(tree: dict[Any, Any]) -> set[str]:
    """The names of all slots of a state_dict, nested or flat."""
    if is_flat(tree):
        return {key.rpartition(".")[2] for key in tree if isinstance(key, str) and key.startswith("state.")}
    states = [state for state in tree["state"].values() if isinstance(state, dict)]
    wrapped = [state[WRAPPED] for state in states if isinstance(state.get(WRAPPED), dict)]
    return {str(slot) for state in (*states, *wrapped) for slot in state}


def _is_number_in(key: object, seen: set[Any]) -> bool:
    return isinstance(key, str) and key.isdecimal() and int(key) in seen


def _state(state: Any, label: str, drop: Collection[str]) -> dict[str, Value]:
    """One parameter's entry; what bitsandbytes wraps, unwrapped."""
    if not isinstance(state, dict):
        raise Rejected(f"{label}: its state is {type(state).__name__}, not a dict")
    found: dict[str, Value] = {}
    for slot, value in state.items():
        if slot == WRAPPED:
            found.update(_state(value, label, drop))
        elif slot in drop:
            continue
        elif not isinstance(slot, str) or not isinstance(value, (LazyTensor, int, float, type(None))):
            raise Rejected(
                f"{label}: {slot!r} of its state is {type(value).__name__}: only tensors and numbers are converted. "
                f"Leave it out with --drop {slot}"
            )
        else:
            found[slot] = value
    return found


def _from_flat(tree: dict[str, Any], where: str, drop: Collection[str]) -> Checkpoint:
    """Parameters with equal options make a group: the flat form keeps neither groups nor an order."""
    states: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in tree.items():
        kind, _, rest = key.partition(".")
        name, _, last = rest.removesuffix(".").rpartition(".")
        if kind == "state" and name:
            states.setdefault(name.removesuffix(f".{WRAPPED}"), {})[last] = value
        elif kind == "param_groups" and name and last not in ("params", "param_names"):
            options.setdefault(name, {})[last] = value
    if lost := [name for name in states if name not in options]:
        raise Rejected(f"{where}: there is state of {lost[0]!r} and no param_groups.{lost[0]}.lr: the file is damaged")
    groups: list[dict[str, Any]] = []
    parameters = []
    for name, own in options.items():
        number = next((n for n, group in enumerate(groups) if same_options(group, own)), len(groups))
        if number == len(groups):
            groups.append(own)
        state = _state(states.get(name, {}), f"{where}: parameter {name}", drop)
        parameters.append(Parameter(name, number, state))
    parameters.sort(key=lambda parameter: parameter.group)
    return Checkpoint(parameters, groups, ordered=False)


def _checked_names(checkpoint: Checkpoint, where: str) -> Checkpoint:
    names = [parameter.name for parameter in checkpoint.parameters if parameter.name is not None]
    if names and (len(names) != len(checkpoint.parameters) or len(set(names)) != len(names)):
        raise Rejected(f"{where}: some parameters have no name, or two have the same: save it with names for all")
    return checkpoint


def same_options(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two param_groups have the same options, tensors by their values."""
    return a.keys() == b.keys() and all(same_option(a[key], b[key]) for key in a)


def same_option(a: Any, b: Any) -> bool:
    """Whether two options are the same, a tensor by its value; NaN is NaN, and a list is no tuple."""
    if isinstance(a, LazyTensor) or isinstance(b, LazyTensor):
        both = isinstance(a, LazyTensor) and isinstance(b, LazyTensor)
        return both and a.shape == b.shape and a.dtype == b.dtype and bool((a.read() == b.read()).all())
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(same_option(x, y) for x, y in zip(a, b))
    return type(a) is type(b) and (bool(a == b) or (a != a and b != b))
