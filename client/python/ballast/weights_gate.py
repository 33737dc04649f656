"""Who uses a module's weights, and who changes them: never both at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ballast.errors import Rejected


class _Own(threading.local):
    def __init__(self) -> None:  # called in each thread
        self.entries: list[int] = []  # that are inside, the last one last


class WeightsGate:
    """Thread-safe. A thread that is inside may enter again."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._entries = 0  # so far
        self._inside: set[int] = set()  # entries, by number
        self._held: set[int] = set()  # of these, those that hold the weights
        self._outlasted: set[int] = set()  # inside, when somebody's patience ran out
        self._changing = False
        self._waiting = 0  # threads that wait to change them
        self._own = _Own()

    def enter(self, holds: bool = False) -> None:
        """Weights stay as they are until leave(). Waits while they are changed. holds: for long, maybe."""
        mine = self._own.entries
        with self._free:
            while not mine and (self._changing or self._waiting > 0):
                self._free.wait()
            self._entries += 1
            self._inside.add(self._entries)
            if holds:
                self._held.add(self._entries)
            mine.append(self._entries)
            self._free.notify_all()

    def leave(self) -> None:
        """What this thread has entered last."""
        with self._free:
            entry = {self._own.entries.pop()}
            self._inside -= entry
            self._held -= entry
            self._outlasted -= entry
            self._free.notify_all()

    @contextmanager
    def changing(self, patience: float | None) -> Iterator[bool]:
        """Whether the weights may be changed in the block: nobody is inside. Waits until that is so for as many seconds, and not
        at all where this thread is inside itself, anyone holds them, or anyone is who was not awaited before. None: waits
        however long; Rejected if this thread is inside itself."""
        if patience is None and self._own.entries:
            raise Rejected(
                "weights cannot be changed within a forward or held(), which use them", "FAILED_PRECONDITION"
            )
        with self._free:
            self._waiting += 1
            try:
                over = self._free.wait_for(lambda: self._alone or (patience is not None and self._in_vain), patience)
                if not over:
                    self._outlasted |= self._inside
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
        return not self._changing and not self._inside

    @property
    def _in_vain(self) -> bool:
        return bool(self._own.entries or self._held or self._outlasted)
