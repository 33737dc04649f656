"""Functions of torch's that are replaced while somebody needs it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from ballast.weak_registry import WeakRegistry

T = TypeVar("T")
Function = Callable[..., Any]
# Whose attribute, its name, and what makes the function that takes the original's place.
Place = tuple[Any, str, Callable[[Function], Function]]


class Patch(Generic[T]):
    """From the first hold() to the last release() the functions at these places are others; a place that this torch does not
    have is left out. Going through it gives those who hold it. Holds them weakly.

    Thread-safe, and may be released wherever Python collects garbage, as when an optimizer is deleted.
    """

    def __init__(self, *places: Place):
        self._places = places
        self._holders: WeakRegistry[T] = WeakRegistry()
        self._originals: list[tuple[Any, str, Function]] = []
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[T]:
        return iter(self._holders)

    def hold(self, holder: T) -> None:
        with self._lock:
            self._holders.add(holder)
            if self._originals:
                return
            for owner, name, made_of in self._places:
                original = getattr(owner, name, None)
                if original is not None:
                    self._originals.append((owner, name, original))
                    setattr(owner, name, functools.wraps(original)(made_of(original)))

    def release(self, holder: T | None) -> None:
        """None: it is gone, and so from here."""
        with self._lock:
            if holder is not None:
                self._holders.discard(holder)
            while self._originals and not any(True for _ in self._holders):
                setattr(*self._originals.pop())
