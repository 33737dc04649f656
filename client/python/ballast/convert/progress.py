"""How far a long conversion is: a bar where a person watches, else a line every ten seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TextIO

from ballast.progress import bars_for

INTERVAL_S = 10.0


class Progress:
    """Of one pass over `total` bytes, told to `stream`: tqdm's bar if the stream is a terminal and tqdm is installed,
    else a line every 10 s. stream None: says nothing. clock: seconds."""

    def __init__(
        self, title: str, total: int, stream: TextIO | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._title, self._total, self._stream, self._clock = title, total, stream, clock
        self._done, self._told = 0, clock()
        self._bar: Any = None
        bars = None if stream is None else bars_for(stream)
        if bars is not None:
            self._bar = bars(total=total, desc=title, unit="B", unit_scale=True, file=stream)

    def advance(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
        elif self._stream is not None and self._clock() - self._told >= INTERVAL_S:
            self._told = self._clock()
            share = 100 * self._done // max(1, self._total)
            print(f"{self._title}: {share} % of {self._total / 2**20:.0f} MiB", file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the bar's line."""
        if self._bar is not None:
            self._bar.close()
