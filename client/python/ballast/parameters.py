"""Which tensors a run trains, under which names, and which tensors cannot be trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ballast import shard
from ballast.errors import Rejected
from ballast.sent_gradient import sent_in
from ballast.shard import is_sharded, local_of
from ballast.weight_codes import is_standing_in

# What a tensor may be computed in, by the wire's name.
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class NamedParameter:
    """One parameter of the optimizer: its name in the run, and the param_group it belongs to."""

    name: str
    parameter: Tensor
    group: int


class ParameterList:
    """The optimizer's parameters in the order given, each under one name.

    A parameter given as (name, parameter) has that name. One given alone is "param.<i>", where i counts all parameters
    given so far, frozen ones too: the same list in the same order has the same names.
    """

    def __init__(self) -> None:
        self._entries: list[NamedParameter] = []
        self._by_id: dict[int, NamedParameter] = {}
        self._names: set[str] = set()
        self._of_groups: list[list[Tensor]] = []  # as param_groups have them
        self._given = 0

    @property
    def given(self) -> int:
        """How many were given so far."""
        return self._given

    def __iter__(self) -> Iterator[NamedParameter]:
        return iter(self._entries)

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._by_id

    def name_of(self, parameter: Tensor) -> str:
        return self._by_id[id(parameter)].name

    def add(self, given: Iterable[Any], group: int, check: Callable[[list[Tensor]], None]) -> list[Tensor]:
        """Takes a group's parameters in; returns them, each once. Rejected, and nothing is taken, if one is unfit, if an iterator
        gives none, or if `check` says so."""
        entries = self._entries.copy()
        by_id, names, count = self._by_id.copy(), self._names.copy(), self._given
        for item in given:
            entry, named = _read(item, count, group)
            count += 1
            earlier = by_id.get(id(entry.parameter))
            if entry.name in names:
                raise Rejected(f"two parameters are named '{entry.name}': give each its own name")
            if earlier is not None:
                _check_tie(earlier, entry, named)
                continue
            if entry.parameter.requires_grad:
                check_trainable(entry)
            entries.append(entry)
            by_id[id(entry.parameter)] = entry
            names.add(entry.name)
        check_overlap(entry for entry in entries if entry.parameter.requires_grad)
        params = [entry.parameter for entry in entries if entry.group == group]
        if not params and not isinstance(given, Sized):
            raise Rejected("a parameter group's iterator gave nothing, as one that was read before: give a list")
        check(params)
        self._entries, self._by_id, self._names, self._given = entries, by_id, names, count
        self._of_groups.append(params.copy())
        return params

    def with_gradient(self, left: Callable[[Tensor], bool]) -> Iterator[Tensor]:
        """Those that have a gradient in .grad now that has not `left`. Rejected if one of them is frozen."""
        for entry in self._entries:
            if entry.parameter.grad is None or left(entry.parameter):
                continue
            if not entry.parameter.requires_grad:
                raise Rejected(
                    f"parameter '{entry.name}' is frozen (requires_grad=False) and has a .grad: torch's optimizers would take it, "
                    "and a run has no gradients of what is frozen. Set its .grad to None, or unfreeze it before the step",
                    "FAILED_PRECONDITION",
                )
            yield entry.parameter

    def drop_sent_gradients(self) -> None:
        """Nobody will end the step that they left for."""
        for entry in self._entries:
            if sent_in(entry.parameter.grad) is not None:
                entry.parameter.grad = None

    def drop_gradients(self) -> None:
        for entry in self._entries:
            entry.parameter.grad = None

    def replace(self, old: Tensor, new: Tensor) -> None:
        """`new` is what fully_shard, or a framework, has made of `old`. Rejected if it cannot be trained."""
        before = self._by_id[id(old)]
        entry = NamedParameter(before.name, new, before.group)
        if old.shape != new.shape:
            raise Rejected(
                f"parameter '{entry.name}' was replaced by one of shape {tuple(new.shape)}, and had {tuple(old.shape)}: make "
                "the optimizer after that"
            )
        if new.requires_grad:
            check_trainable(entry)
        self._entries[self._entries.index(before)] = entry
        del self._by_id[id(old)]
        self._by_id[id(new)] = entry
        params = self._of_groups[entry.group]
        params[next(place for place, parameter in enumerate(params) if parameter is old)] = new

    def replaced_in(self, groups: Sequence[Mapping[str, Any]]) -> list[tuple[Tensor, Tensor]]:
        """Those that param_groups have others for, place by place, as frameworks put them there; and the others."""
        pairs = []
        for number, group in enumerate(groups):
            ours = [entry.parameter for entry in self._entries if entry.group == number]
            if len(ours) == len(group["params"]):
                pairs += [(old, new) for old, new in zip(ours, group["params"]) if new is not old]
        return pairs

    def refuse_edited(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Rejected if param_groups have others than were given to them, fewer, more, or another order."""
        if len(groups) == len(self._of_groups) and all(
            len(now) == len(given) and all(map(is_, now, given))
            for now, given in zip((group["params"] for group in groups), self._of_groups)
        ):
            return
        raise Rejected(
            f"{self._edit(groups)}, and the run trains what the optimizer was made with, and what add_param_group() has added, in "
            "those groups. Put it back. To train less, freeze parameters (requires_grad_(False)); to train more, call "
            "add_param_group(); to replace parameters, or to group them otherwise, make another optimizer with a run of its own "
            "and give it this one's state_dict()",
            "FAILED_PRECONDITION",
        )

    def _edit(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """The first thing in param_groups that is otherwise than it was given, in words."""
        now = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        for entry in self._entries:
            place = now.get(id(entry.parameter))
            if place is None:
                return f"parameter '{entry.name}' was taken out of param_groups[{entry.group}]['params']"
            if place != entry.group:
                return f"parameter '{entry.name}' was moved from param_groups[{entry.group}] to param_groups[{place}]"
        if len(groups) != len(self._of_groups):
            return f"there are {len(groups)} param_groups where {len(self._of_groups)} were given"
        for number, group in enumerate(groups):
            for p in group["params"]:
                if id(p) not in self._by_id:
                    return (
                        f"a parameter of shape {tuple(p.shape)} was put into param_groups[{number}]['params'] by hand"
                    )
        return "the parameters of param_groups were put in another order"

    @property
    def sharded(self) -> bool:
        """Whether there is a DTensor among those that require a gradient."""
        return any(entry.parameter.requires_grad and is_sharded(entry.parameter) for entry in self._entries)

    def trainable(self) -> list[NamedParameter]:
        """Those that require a gradient now, checked. Rejected if there are none."""
        trainable = [entry for entry in self._entries if entry.parameter.requires_grad]
        if not trainable:
            raise Rejected("every parameter is frozen: set requires_grad on those to train")
        for entry in trainable:
            check_trainable(entry, taken=True)
        check_overlap(trainable)
        return trainable


def _read(item: Any, count: int, group: int) -> tuple[NamedParameter, bool]:
    named = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
    name, parameter = item if named else (f"param.{count}", item)
    if not isinstance(parameter, Tensor):
        raise Rejected(
            f"'{name}' is a {type(parameter).__name__}: give tensors, (name, tensor) pairs, or dicts with 'params'"
        )
    return NamedParameter(name, parameter, group), named


def _check_tie(earlier: NamedParameter, entry: NamedParameter, named: bool) -> None:
    if earlier.group != entry.group:
        raise Rejected(f"'{entry.name}' is the same tensor as '{earlier.name}' of another group: give it once")
    if not named:
        raise Rejected(f"'{entry.name}' is the same tensor as '{earlier.name}': give it once")


def check_trainable(entry: NamedParameter, taken: bool = False) -> None:
    """Rejected, naming the tensor and the fix, unless its gradients can be sent and its weights written in place. taken: an
    optimizer has it already."""
    reason = _why_unfit(entry.parameter)
    if reason == _STRIDED and taken:
        reason = (
            "is not contiguous now, after the optimizer was made (by model.to(memory_format=torch.channels_last), say): set "
            "p.data = p.data.contiguous(), and leave the format to the inputs"
        )
    if reason:
        raise Rejected(f"parameter '{entry.name}' {reason}")


_STRIDED = "is not contiguous: set p.data = p.data.contiguous() before making the optimizer"


def _why_unfit(p: Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(p):
        return "has no shape yet: call the lazy module that has it once, then make the optimizer"
    if p.is_inference():
        return "was made in torch.inference_mode(), and autograd does not train such: make the model outside of it"
    sharded = _sharded_by(p)
    if sharded:
        return (
            f"is sharded by {sharded}, which is not supported: shard with fully_shard (FSDP2, of torch 2.6 and later)"
        )
    if is_sharded(p) and (reason := shard.why_unfit(p)):
        return reason
    if p.layout != torch.strided:
        return f"has layout {p.layout}: only dense tensors can be trained; make it dense (to_dense(), sparse=False)"
    if local_of(p).is_meta:
        return "is on the meta device: give it memory first (to_empty, then its weights)"
    if p.dtype not in DTYPES:
        return f"has dtype {p.dtype}: convert the model to torch.float32, bfloat16 or float16, or freeze it"
    if not p.is_leaf:
        return "is not a leaf of the graph: give the nn.Parameter that it was computed from"
    if p.numel() == 0:
        return f"has no elements (shape {tuple(p.shape)}): leave it out"
    if local_of(p).is_neg():
        return "is a view whose memory has the opposite sign (its negative bit is set): give p.resolve_neg()"
    if not local_of(p).is_contiguous() and not is_standing_in(p):
        return _STRIDED
    local = local_of(p)
    if type(local) not in (Tensor, torch.nn.Parameter) and hasattr(local, "__tensor_flatten__"):
        return f"is a {type(local).__name__} without memory of its own: give plain parameters"
    return None


def _sharded_by(p: Tensor) -> str | None:
    kinds = {base.__name__ for base in type(p).__mro__}
    if "DTensor" in kinds and not is_sharded(p):
        return "a DTensor of another torch"
    if "FlatParameter" in kinds or getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
        return "FullyShardedDataParallel (FSDP1)"
    return None


def check_overlap(entries: Iterable[NamedParameter]) -> None:
    """Rejected if two tensors share bytes: each would overwrite the other's weights."""
    spans = sorted(
        (str(p.device), p.data_ptr(), p.element_size() if is_standing_in(p) else p.nbytes, entry.name)
        for entry in entries
        for p in (local_of(entry.parameter),)
    )
    for (device, start, nbytes, name), (next_device, next_start, _, next_name) in zip(spans, spans[1:]):
        if device == next_device and next_start < start + nbytes:
            raise Rejected(
                f"parameters '{name}' and '{next_name}' share memory: tie them by using one nn.Parameter in both places"
            )
