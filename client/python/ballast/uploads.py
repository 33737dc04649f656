"""What travels to the daemon when weights and state are uploaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ballast.errors import Rejected
from ballast.moments import Moments
from ballast.weight_codes import is_standing_in

if TYPE_CHECKING:
    from ballast.binding import Binding
    from ballast.parameters import NamedParameter

# Of _core.Client.load_weights, as its arguments are: slots, counts of updates, and more.
Load = Callable[..., list[int]]


class Uploaded(Protocol):
    """A whole tensor: its weights in host memory, in `format`. is_served_of: whether the daemon serves them of this master;
    to_load: of what fp32 it makes the master that it serves them of."""

    @property
    def index(self) -> int: ...
    @property
    def format(self) -> str: ...
    @property
    def parameter(self) -> Tensor: ...
    @property
    def landing(self) -> Tensor: ...
    def is_served_of(self, master: Tensor) -> bool: ...
    def to_load(self, master: Tensor, weights: Tensor) -> Tensor: ...


def upload(
    load: Load,
    bindings: Iterable[Uploaded],
    moments: Mapping[int, Moments],
    *more: object,
    masters: Mapping[int, Tensor] | None = None,
) -> list[int]:
    """Has `load` send the weights of these tensors, in fp32 where the master beside them is what they were rounded from, and
    their moments, by id(parameter); returns what it does. The bindings have loaded. masters: by index, in any case sent.
    """
    slots, updates, kept = [], {}, []
    for binding in bindings:
        state = moments.get(id(binding.parameter))
        master = (masters or {}).get(binding.index)
        if master is None and state is not None and state.master is not None and binding.is_served_of(state.master):
            master = state.master
        if master is None:
            landing = binding.landing
            slots.append((binding.index, "weights", binding.format, landing.data_ptr(), landing.nbytes))
        else:
            kept.append(binding.to_load(master, binding.landing))  # until it was sent
            slots.append((binding.index, "weights", "fp32", kept[-1].data_ptr(), kept[-1].nbytes))
        if state is not None and state.slots:
            updates[binding.index] = state.updates
            for slot, values in state.slots.items():
                slots.append((binding.index, slot, "fp32", values.data_ptr(), values.nbytes))
    return load(slots, updates, *more)


def same(one: Moments, other: Moments) -> bool:
    """To the bit; where the other has no slots, as SGD's without momentum, in all else."""
    ours, theirs = one.as_state(), other.as_state()
    if not other.slots:
        ours = {name: value for name, value in ours.items() if name not in one.names.values()}
    return ours.keys() == theirs.keys() and all(
        torch.equal(value.view(torch.int32), theirs[name].view(torch.int32)) for name, value in ours.items()
    )


def refuse_nonfinite(bindings: Iterable[Binding], run: str) -> None:
    """Rejects weights that are to take the place of the run's, as the daemon would, when it has begun to replace them."""
    for binding in bindings:
        if not binding.landing.isfinite().all():
            raise Rejected(
                f"the weights of '{binding.name}' hold a NaN or an infinity, and were to take the place of run '{run}''s: nothing "
                "of it was replaced. Load others, or call pull() to go on with the daemon's"
            )


def refuse_nonfinite_added(tensors: Iterable[NamedParameter], run: str) -> None:
    """Likewise of tensors that a run is to have from now on, and of which nothing is said to it yet."""
    for tensor in tensors:
        if not is_standing_in(tensor.parameter) and not tensor.parameter.detach().isfinite().all():
            raise Rejected(
                f"the weights of '{tensor.name}' hold a NaN or an infinity, and run '{run}' was to have them from its next step "
                "on: nothing was sent. Give it finite weights, on every rank, before that step's first gradient"
            )
