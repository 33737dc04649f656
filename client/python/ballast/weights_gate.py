"""Who uses a module's weights, and who changes them: never both at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ballast.errors import Rejected


class WeightsGate:
    """Thread-safe. A thread that is inside may enter again."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._inside = 0
        self._held = 0  # of those inside, how many hold the weights
        self._changing = False
        self._waiting = 0  # threads that wait to change them
        self._own = threading.local()

    @property
    def _depth(self) -> int:
        return getattr(self._own, "depth", 0)

    def enter(self, holds: bool = False) -> None:
        """Weights stay as they are until leave(). Waits while they are changed. holds: for long, maybe."""
        with self._free:
            while self._depth == 0 and (self._changing or self._waiting > 0):
                self._free.wait()
            self._inside += 1
            self._held += holds
            self._free.notify_all()
        self._own.depth = self._depth + 1

    def leave(self, holds: bool = False) -> None:
        self._own.depth = self._depth - 1
        with self._free:
            self._inside -= 1
            self._held -= holds
            self._free.notify_all()

    @contextmanager
    def changing(self, patience: float | None) -> Iterator[bool]:
        """Whether the weights may be changed in the block: nobody is inside. Waits until that is so for as many seconds, and not
        at all where this thread is inside itself, or anyone holds them. None: waits however long; Rejected if this thread is
        inside itself."""
        own = self._depth > 0
        if patience is None and own:
            raise Rejected(
                "weights cannot be changed within a forward or held(), which use them", "FAILED_PRECONDITION"
            )
        with self._free:
            self._waiting += 1
            try:
                self._free.wait_for(lambda: self._alone or (patience is not None and (own or self._held > 0)), patience)
                alone = self._alone
                self._changing = self._changing or alone
            finally:
                self._waiting -= 1
                self._free.notify_all()
        try:
            yield alone
        finally:
            if alone:
                with self._free:
                    self._changing = False
                    self._free.notify_all()

    @property
    def _alone(self) -> bool:
        return not self._changing and self._inside == 0
