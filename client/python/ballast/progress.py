"""Waits: the pauses between two looks, and what is said on stderr of one that is long, which is a bar where tqdm is installed
and stderr is a terminal, else lines."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from time import monotonic
from types import TracebackType
from typing import Any, TextIO

from ballast.wording import seen

# When a bar is shown, and when a line is said; lines come again at longer and longer intervals.
_BAR_AFTER_S, _BAR_EVERY_S = 1.0, 0.2
_LINE_AFTER_S = 10.0


def pauses(shortest_s: float, longest_s: float) -> Iterator[None]:
    """For a loop that looks again and again, without end: a pause before each round but the first, each twice as long as the
    last one."""
    pause_s = shortest_s
    while True:
        yield
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


class Patience:
    """For a loop that waits: look() says a line when the wait has taken `after_s`, and again after twice that, and so on.

    tell: what is waited for, asked when it is said. One thread at a time.
    """

    def __init__(self, tell: Callable[[], str], after_s: float = _LINE_AFTER_S):
        self._tell = tell
        self._began = monotonic()
        self._say_after_s = after_s

    def look(self) -> None:
        waited_s = monotonic() - self._began
        if waited_s >= self._say_after_s:
            say(f"{self._tell()} ({waited_s:.0f} s so far)")
            self._say_after_s = 2 * waited_s


class Transfer:
    """with Transfer("uploading weights of run 'r'", total, done): ...

    total: bytes that are to move; done: how many have, asked from a thread of this object's own while the block runs.
    Nothing is shown of what takes less than a second (bar) or 10 s (lines). An exception goes through.
    """

    def __init__(self, what: str, total: int, done: Callable[[], int]):
        self._what = what
        self._total = total
        self._done = done
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ballast progress", daemon=True)

    def __enter__(self) -> Transfer:
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C, heard while it starts
            self._over.set()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        bars = bars_for(sys.stderr)
        if bars is None:
            self._say_lines()
        elif not self._over.wait(_BAR_AFTER_S):
            self._draw(bars)

    def _say_lines(self) -> None:
        patience = Patience(self._line)
        while not self._over.wait(_LINE_AFTER_S / 10):
            patience.look()

    def _line(self) -> str:
        done = self._moved()
        return (
            f"{self._what}: {done / 2**20:.0f} of {self._total / 2**20:.0f} MiB, {100 * done // max(1, self._total)} %"
        )

    def _draw(self, bars: Any) -> None:
        description = f"ballast: {self._what}"
        with bars(
            total=self._total, desc=description, unit="B", unit_scale=True, unit_divisor=1024, leave=False
        ) as bar:
            while not self._over.wait(_BAR_EVERY_S):
                bar.update(self._moved() - bar.n)

    def _moved(self) -> int:
        """What is begun anew after a lost connection may have moved twice."""
        return min(self._done(), self._total)


class Waiting(Transfer):
    """The same of a wait in which nothing is counted: lines alone."""

    def __init__(self, what: str):
        super().__init__(what, 0, lambda: 0)

    def _run(self) -> None:
        self._say_lines()

    def _line(self) -> str:
        return self._what


def say(line: str) -> None:
    """As the C++ client says what a person should see."""
    print(f"ballast: {seen(line)}", file=sys.stderr, flush=True)


def bars_for(stream: TextIO) -> Any:
    """tqdm's class; None where the stream is no terminal, or it is not installed: lines do as well."""
    if not stream.isatty():
        return None
    try:
        return import_module("tqdm").tqdm
    except ImportError:
        return None
