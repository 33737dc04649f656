"""Objects that are known as long as they live."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
References = tuple["weakref.ref[T]", ...]


class WeakRegistry(Generic[T]):
    """A set of objects, by identity, that does not keep them alive. Thread-safe: an iteration is over those that were there
    when it began. Python may collect garbage within each call, and what is collected may call it again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._references: tuple[weakref.ref[T], ...] = ()

    def __iter__(self) -> Iterator[T]:
        for reference in self._references:
            one = reference()
            if one is not None:
                yield one

    def add(self, one: T) -> None:
        """Once, however often it is called."""
        self._change(lambda living: living if any(known() is one for known in living) else (*living, weakref.ref(one)))

    def discard(self, one: T) -> None:
        self._change(lambda living: tuple(known for known in living if known() is not one))

    def _change(self, change: Callable[[References[T]], References[T]]) -> None:
        with self._lock:
            while True:
                before = self._references
                after = change(tuple(reference for reference in before if reference() is not None))
                if self._references is before:  # else a call within this one has changed them
                    self._references = after
                    return
