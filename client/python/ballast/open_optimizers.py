"""The optimizers of this process that are open: no two of them train one parameter, and none keeps its rank at exit."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from ballast.errors import Rejected
from ballast.parameters import ParameterList


class Closable(Protocol):
    @property
    def run(self) -> str: ...
    def close(self) -> None: ...


# Each with what it trains. Both are held weakly: one that is deleted is closed by that, and a parameter may lead to its
# optimizer, by a hook of the user's.
_open: weakref.WeakKeyDictionary[Closable, weakref.ref[ParameterList]] = weakref.WeakKeyDictionary()


def add(optimizer: Closable, parameters: ParameterList) -> None:
    """It is closed when the program ends, unless that happens before. `parameters` may grow."""
    _open[optimizer] = weakref.ref(parameters)


def discard(optimizer: Closable) -> None:
    _open.pop(optimizer, None)


def check_unowned(optimizer: Closable, parameters: Iterable[Tensor]) -> None:
    """Rejected if one of `parameters` is trained by another than `optimizer`."""
    for other, trained in list(_open.items()):
        owned = trained()
        for parameter in parameters:
            if other is not optimizer and owned is not None and parameter in owned:
                raise Rejected(
                    f"parameter '{owned.name_of(parameter)}' is trained by another ballast optimizer, with run "
                    f"'{other.run}': close() that one first",
                    "FAILED_PRECONDITION",
                )


@atexit.register
def _close_all() -> None:
    """Gives the ranks back of what a program leaves open."""
    for optimizer in list(_open):
        optimizer.close()
