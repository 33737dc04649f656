"""Weights that are pulled to where they are bound, whatever they are served in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from ballast import _core
from ballast.binding import Binding
from ballast.progress import Transfer

# How much of the weights is compared at once.
_COMPARED_BYTES = 64 << 20


def pull_to(bindings: Iterable[Binding], client: _core.Client, run: str) -> dict[int, int]:
    """Has the daemon's weights land; returns the last step that they are of, by the tensor's index."""
    wanted = [binding for binding in bindings if binding.nbytes]
    steps: dict[int, int] = {}
    ways: tuple[tuple[Callable[..., dict[int, int]], bool], ...] = ((client.pull, False), (client.pull_served, True))
    for pull, as_served in ways:
        places = [binding.place for binding in wanted if binding.as_served == as_served]
        if places:
            total = sum(nbytes for _, _, nbytes, *_ in places)
            with Transfer(f"pulling weights of run '{run}'", total, lambda: client.moved):
                steps |= pull(run, places)
    return steps


def pulled(binding: Binding, client: _core.Client, run: str) -> Tensor:
    """The daemon's weights of a tensor, decoded to the parameter's dtype, beside those that are here."""
    decoded = binding.room()
    client.pull(run, [(binding.index, decoded.data_ptr(), decoded.nbytes)])
    return decoded


def portions(bindings: Iterable[Binding]) -> Iterator[list[Binding]]:
    """A few at a time, of so many bytes as are compared at once."""
    some: list[Binding] = []
    nbytes = 0
    for binding in bindings:
        nbytes += binding.nbytes
        if some and nbytes > _COMPARED_BYTES:
            yield some
            some, nbytes = [], binding.nbytes
        some.append(binding)
    if some:
        yield some
