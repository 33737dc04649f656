"""Activation checkpointing, seen when a forward uses it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint

from ballast.patch import Patch

# What checkpoint() calls by these names, with a graph, by torch's release, and without; one or the other in each call.
_INNER = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
    "check_backward_validity",
)


class Checkpointing:
    """Calls `used()` at the first checkpoint() that any forward of the process makes; at once where this torch tells of none.
    From the constructor to remove()."""

    def __init__(self, used: Callable[[], None]):
        self._used: Callable[[], None] | None = used
        if _is_told():
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


class _Probe:
    told = False

    def tell(self) -> None:
        self.told = True


@functools.cache
def _is_told() -> bool:
    """Tries it: that the functions are there does not say that checkpoint() calls them."""
    return all(map(_is_told_of, (False, True)))


def _is_told_of(reentrant: bool) -> bool:
    probe = _Probe()
    _watchers.hold(probe)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.zeros(1, requires_grad=True, device="cpu")
            checkpoint.checkpoint(torch.clone, x, use_reentrant=reentrant, preserve_rng_state=False)
    finally:
        _watchers.release(probe)
    return probe.told


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    def tell_and_go_on(*args: Any, **kwargs: Any) -> Any:
        for watcher in _watchers:
            watcher.tell()
        return original(*args, **kwargs)

    return tell_and_go_on


_watchers: Patch[Checkpointing | _Probe] = Patch(*((checkpoint, name, _telling) for name in _INNER))
