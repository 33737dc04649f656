"""Activation checkpointing, seen when a forward uses it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

# What torch.utils.checkpoint.checkpoint() calls by these names, with a graph and without; one or the other in each call.
_INNER = ("_checkpoint_without_reentrant_generator", "check_backward_validity")


class Checkpointing:
    """Calls `used()` at the first checkpoint() that any forward of the process makes; at once where this torch does not have
    what tells. From the constructor to remove()."""

    def __init__(self, used: Callable[[], None]):
        self._used: Callable[[], None] | None = used
        if not all(hasattr(torch.utils.checkpoint, name) for name in _INNER):
            self.tell()
            return
        with _patching:
            _watchers.append(self)
            for name in _INNER:
                if name not in _originals:
                    _replace(name)

    def tell(self) -> None:
        used, self._used = self._used, None
        if used is not None:
            used()

    def remove(self) -> None:
        """With the last one torch's own functions are put back."""
        with _patching:
            if self in _watchers:
                _watchers.remove(self)
            while _originals and not _watchers:
                setattr(torch.utils.checkpoint, *_originals.popitem())


_watchers: list[Checkpointing] = []
_originals: dict[str, Callable[..., Any]] = {}
_patching = threading.RLock()


def _replace(name: str) -> None:
    original = _originals[name] = getattr(torch.utils.checkpoint, name)

    @functools.wraps(original)
    def telling(*args: Any, **kwargs: Any) -> Any:
        for watcher in list(_watchers):
            watcher.tell()
        return original(*args, **kwargs)

    setattr(torch.utils.checkpoint, name, telling)
