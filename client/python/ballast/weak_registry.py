"""Objects that are known as long as they live."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """A set of objects, by identity, that does not keep them alive. Thread-safe: an iteration is over those that were there
    when it began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._references: tuple[weakref.ref[T], ...] = ()

    def __iter__(self) -> Iterator[T]:
        for reference in self._references:
            one = reference()
            if one is not None:
                yield one

    def add(self, one: T) -> None:
        """Once, however often it is called."""
        with self._lock:
            if not any(known is one for known in self):
                self._references = (*self._living(), weakref.ref(one))

    def discard(self, one: T) -> None:
        with self._lock:
            self._references = tuple(reference for reference in self._living() if reference() is not one)

    def _living(self) -> list[weakref.ref[T]]:
        return [reference for reference in self._references if reference() is not None]
