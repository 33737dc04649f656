"""A GPU's streams, played: what each was asked for is done later, in an order that is drawn, or never while it waits."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

GPU = torch.device("cuda", 0)


class Event:
    def __init__(self) -> None:
        self.passed = False


class PlayedStreams:
    """`stream` is the one to which work goes now, by number."""

    def __init__(self, seed: int = 0) -> None:
        self.stream = 0
        self.captures = False
        self._random = random.Random(seed)
        self._asked: dict[int, list[Callable[[], bool]]] = {}

    # --- as ballast.stream_order.Streams ---

    def capturing(self) -> bool:
        return self.captures

    def current(self, device: torch.device) -> int:
        return self.stream

    def record(self, stream: int) -> Event:
        event = Event()

        def pass_it() -> bool:
            event.passed = True
            return True

        self._asked.setdefault(stream, []).append(pass_it)
        return event

    def wait(self, stream: int, event: Event) -> None:
        self._asked.setdefault(stream, []).append(lambda: event.passed)

    # --- what the test asks for ---

    def ask(self, work: Callable[[], object]) -> None:
        self._asked.setdefault(self.stream, []).append(lambda: (work(), True)[1])

    def run(self, most: int | None = None) -> None:
        """So many pieces of what was asked for; all of it without `most`."""
        while most is None or most > 0:
            ready = [work for work in self._asked.values() if work]
            if not ready:
                return
            self._random.shuffle(ready)
            done = next((work for work in ready if work[0]()), None)
            assert done is not None, "all streams wait, for each other"
            done.pop(0)
            most = None if most is None else most - 1
