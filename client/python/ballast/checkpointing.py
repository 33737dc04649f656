"""Activation checkpointing, seen when a forward uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from ballast.patch import Patch

# What torch.utils.checkpoint.checkpoint() calls by these names, with a graph and without; one or the other in each call.
_INNER = ("_checkpoint_without_reentrant_generator", "check_backward_validity")


class Checkpointing:
    """Calls `used()` at the first checkpoint() that any forward of the process makes; at once where this torch does not have
    what tells. From the constructor to remove()."""

    def __init__(self, used: Callable[[], None]):
        self._used: Callable[[], None] | None = used
        if all(hasattr(torch.utils.checkpoint, name) for name in _INNER):
            _watchers.hold(self)
        else:
            self.tell()

    def tell(self) -> None:
        used, self._used = self._used, None
        if used is not None:
            used()

    def remove(self) -> None:
        """With the last one torch's own functions are put back."""
        _watchers.release(self)


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    def tell_and_go_on(*args: Any, **kwargs: Any) -> Any:
        for watcher in _watchers:
            watcher.tell()
        return original(*args, **kwargs)

    return tell_and_go_on


_watchers: Patch[Checkpointing] = Patch(*((torch.utils.checkpoint, name, _telling) for name in _INNER))
