"""Tensors that the ranks hold in parts, put together for their upload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from ballast.binding import Binding
from ballast.errors import Rejected
from ballast.moments import MASTER, Moments
from ballast.peers import await_all
from ballast.progress import Patience
from ballast.shard import local_of, whole_of
from ballast.spool import Spool, spooled_bytes


@dataclass(frozen=True)
class Gathered:
    """The weights of a whole tensor, in host memory: to upload() what a Binding is whose parameter is whole."""

    binding: Binding
    landing: Tensor

    @property
    def index(self) -> int:
        return self.binding.index

    @property
    def format(self) -> str:
        return self.binding.format

    @property
    def parameter(self) -> Tensor:
        return self.binding.parameter

    def is_served_of(self, master: Tensor) -> bool:
        return self.binding.serves(self.landing, master)

    def to_load(self, master: Tensor, weights: Tensor) -> Tensor:
        return self.binding.to_load(master, weights)


def gather(
    bindings: Sequence[Binding], moments: Mapping[int, Moments], keep: bool
) -> tuple[list[Gathered], dict[int, Moments]]:
    """The whole weights of these sharded tensors, and the moments, by id(parameter), of those that have some. One tensor is
    in memory at a time; a rank that is to `keep` them has them in a Spool, and the others get none.

    Collective: all ranks of the run call it with the same tensors, outside of any backward(). Rejected, on all of them, if
    they have moments of different tensors, or who keeps them has no room.
    """
    _check_alike(bindings, moments)
    spool = _room(bindings, moments, keep)
    weights, states = [], {}
    for binding in bindings:
        parameter = binding.parameter
        whole = whole_of(parameter, local_of(parameter))
        if spool is not None:
            weights.append(Gathered(binding, spool.keep(whole)))
        state = moments.get(id(parameter))
        kept = {}
        for slot, part in sorted(_parts(state).items()):
            whole = whole_of(parameter, part)
            if spool is not None:
                kept[slot] = spool.keep(whole)
        if spool is not None and state is not None:
            master = kept.pop(MASTER, None)
            states[id(parameter)] = Moments(kept, state.updates, state.names, master)
    return weights, states


def _parts(state: Moments | None) -> dict[str, Tensor]:
    if state is None:
        return {}
    return state.slots if state.master is None else {**state.slots, MASTER: state.master}


def _room(bindings: Sequence[Binding], moments: Mapping[int, Moments], keep: bool) -> Spool | None:
    wanted = 0
    for binding in bindings:
        parameter = binding.parameter
        elements, parts = parameter.numel(), _parts(moments.get(id(parameter)))
        wanted += spooled_bytes(elements * parameter.element_size()) + len(parts) * spooled_bytes(4 * elements)
    spool: Spool | None = None
    failure: OSError | None = None
    if keep:
        try:
            spool = Spool(wanted)
        except OSError as error:  # told below, for the others wait to hear of it
            failure = error
    if not all_agree(failure is None, bindings[0].parameter):
        raise Rejected(
            f"rank 0 puts the whole weights together in a file of {wanted} bytes in the folder for temporary files, and cannot "
            f"({failure or 'its own error says why'}): set TMPDIR, there, to a folder with room",
            "FAILED_PRECONDITION",
        )
    return spool


def all_agree(mine: bool, like: Tensor) -> bool:
    """Whether it is true on every rank. Collective, on the device of the mesh that the parameter `like` is sharded over."""
    (told,) = _least([int(mine)], like)
    return bool(told)


def spread(ours: list[int], like: Any) -> list[tuple[int, int]]:
    """The least and the most of each number over the ranks. Collective as all_agree() is."""
    least = _least([*ours, *(-number for number in ours)], like)
    return [(one, -other) for one, other in zip(least, least[len(ours) :])]


def _check_alike(bindings: Sequence[Binding], moments: Mapping[int, Moments]) -> None:
    """The ranks gather the same, or those that gather more would wait for ever."""
    ours = [_kinds(moments.get(id(binding.parameter))) for binding in bindings]
    for binding, (least, most) in zip(bindings, spread(ours, bindings[0].parameter)):
        if least != most:
            raise Rejected(
                f"the ranks have loaded different state of '{binding.name}': call load_state_dict() on every rank, with the "
                "same state_dict, or each with its part of it, as torch.distributed.checkpoint does",
                "FAILED_PRECONDITION",
            )


def _kinds(state: Moments | None) -> int:
    """Which tensors it has, as a number."""
    return sum({"momentum": 1, "variance": 2, MASTER: 4}[name] for name in _parts(state))


def _least(ours: list[int], like: Any) -> list[int]:
    """The least of each number over the ranks. Unavailable where one of them is gone."""
    told = torch.tensor(ours, dtype=torch.int64, device=like.device_mesh.device_type)
    patience = Patience(
        lambda: f"rank {distributed.get_rank()} waits until all ranks come to the same point with their sharded parameters: the "
        "first forward of a step, or an upload. One that has fewer batches, or has left its loop, keeps the others waiting; "
        "loops over optimizer.in_step(loader) end together"
    )
    await_all(
        lambda: distributed.all_reduce(told, op=distributed.ReduceOp.MIN, async_op=True),
        patience,
        "a step with sharded parameters",
    )
    least: list[int] = told.tolist()
    return least
