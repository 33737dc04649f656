"""The optimizers of this process that are open: no two of them train one parameter, and none keeps its rank when it is
deleted, or at exit."""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from ballast import _core, local_daemon
from ballast.errors import Rejected
from ballast.frameworks import driving_framework
from ballast.hooks import TorchHooks
from ballast.parameters import ParameterList
from ballast.rank import Rank


class Closable(Protocol):
    def owns(self, parameter: Tensor) -> bool: ...
    def close_at_once(self) -> None: ...


class OpenOptimizer:
    """An optimizer from its connection to its end: close(), its deletion, or the program's.

    The deletion of the very object that is given, told by a weak reference: a __del__ would also be run by a wrapper that
    has its class or a copy of its __dict__, as Lightning's. A weak reference calls before the object's attributes go, so
    that weights have their memory until the connection is closed. It is not a weakref.finalize: that does nothing after
    its own exit handler, which may run before the one here.

    Is kept while it is open, and so holds nothing that leads to the optimizer or to its parameters: a parameter may lead
    to its optimizer, by a hook of the user's. One thread at a time, except close().
    """

    def __init__(
        self, optimizer: Closable, rank: Rank, parameters: ParameterList, client: _core.Client, hooks: TorchHooks
    ):
        self.run = rank.run
        self._rank = rank
        self._trained = weakref.ref(parameters)
        self._client: _core.Client | None = client
        self._hooks = hooks
        self._optimizer: weakref.ref[Closable] | None = weakref.ref(optimizer, lambda _: self.close())
        _open.add(self)

    @property
    def optimizer(self) -> Closable | None:
        """None once it is deleted, or this is closed."""
        return None if self._optimizer is None else self._optimizer()

    def trains(self, parameter: Tensor, beside: ParameterList) -> str | None:
        """The parameter's name, if it is trained, and not by the optimizer of `beside`."""
        trained = self._trained()
        if trained is None or trained is beside or parameter not in trained:
            return None
        return trained.name_of(parameter)

    def holds(self, rank: Rank, client: _core.Client) -> str | None:
        """A parameter of it, if it may be this rank of a run of the same name on the daemon of `client`, which is another's."""
        ours, trained = self._client, self._trained()
        if ours is None or ours is client or trained is None or ours.server != client.server:
            return None
        if (self._rank.run, self._rank.number) != (rank.run, rank.number):
            return None
        return next((entry.name for entry in trained), None)

    def close(self) -> None:
        """Takes its hooks out of torch and closes the connection, which gives the rank back. Later nothing."""
        client, self._client = self._client, None
        if client is None:
            return
        _open.discard(self)
        self._optimizer = None
        self._hooks.remove()
        trained = self._trained()
        if trained is not None:
            trained.drop_sent_gradients()
        client.close()


_open: set[OpenOptimizer] = set()


def check_unowned(parameters: Iterable[Tensor], ours: ParameterList) -> None:
    """Rejected if one of `parameters` is trained by another optimizer than that of `ours`, and somebody still has that one."""
    parameters = list(parameters)
    found = _owner_of(parameters, ours)
    if found is not None and close_unreachable():
        found = _owner_of(parameters, ours)
    if found is not None:
        fitted = " (in Lightning: for one in trainer.optimizers: one.close(), where trainer ran the fit() before)"
        raise Rejected(
            f"parameter '{found[0]}' is trained by another ballast optimizer, with run '{found[1]}': close() that one first"
            f"{fitted if driving_framework() == 'Lightning' else ''}",
            "FAILED_PRECONDITION",
        )


def _owner_of(parameters: Iterable[Tensor], ours: ParameterList) -> tuple[str, str] | None:
    """The name and the run of one of them that another optimizer than that of `ours` trains."""
    others = list(_open)
    for parameter in parameters:
        for other in others:
            if (name := other.trains(parameter, ours)) is not None:
                return name, other.run
    return None


def held_beside(rank: Rank, client: _core.Client) -> str | None:
    """A parameter of another optimizer of this process that was made for this rank of this run, on the same daemon; None: there
    is no such optimizer."""
    return next((held for one in list(_open) if (held := one.holds(rank, client)) is not None), None)


def close_unreachable() -> bool:
    """Closes the optimizers that nothing but reference cycles leads to, as a training loop's before it is made anew in one
    program. Whether there were any."""
    before = len(_open)
    gc.collect()
    return len(_open) < before


@atexit.register
def _close_all() -> None:
    """Gives the ranks back of what a program leaves open, and then ends the daemon of its own that it may have."""
    for one in list(_open):
        optimizer = one.optimizer
        if optimizer is not None:
            optimizer.close_at_once()  # a rank whose peers have failed is to end, too
    local_daemon.end()
