"""A stand-in for a GPU whose gradients are staged: host memory, and copies that arrive when the test says, or from a thread."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor

from ballast.gradient_staging import GradientStaging
from interrupts import interrupted_at


class Started:
    def __init__(self, source: Tensor, target: Tensor, shared: bool, queue: Any, number: int):
        self.source, self.target, self.shared, self.queue, self.number = source, target, shared, queue, number
        self.arrived = False

    def query(self) -> bool:
        return self.arrived


class StandIn:
    """Copies that arrive when arrive() says so."""

    def __init__(self) -> None:
        self.started: list[Started] = []
        self.rings: list[Tensor] = []
        self.rings_there: list[Tensor] = []

    def pinned(self, nbytes: int) -> Tensor:
        self.rings.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self.rings[-1]

    def there(self, nbytes: int, gradient: Tensor) -> Tensor:
        self.rings_there.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self.rings_there[-1]

    def start(self, source: Tensor, target: Tensor, shared: bool, queue: Any, number: int) -> Started:
        self.started.append(Started(source, target, shared, queue, number))
        return self.started[-1]

    def wait(self) -> None:
        self.arrive(len(self.waiting))

    @property
    def waiting(self) -> list[Started]:
        return [copy for copy in self.started if not copy.arrived]

    def arrive(self, count: int) -> None:
        for copy in self.waiting[:count]:
            copy.target.copy_(copy.source)
            copy.arrived = True
            copy.queue.arrive(copy.number)


class Pushes:
    """A client whose queue pushes what has arrived at once. A wait for it makes one copy arrive."""

    def __init__(self, copies: StandIn, shares_gpu: bool = False) -> None:
        self.shares_gpu = shares_gpu
        self.all: list[tuple[int, Tensor]] = []
        self.error: Exception | None = None
        self._copies = copies
        self._put: list[tuple[int, int, int]] = []
        self._arrived: set[int] = set()
        self._dropped: set[int] = set()
        self._counted = 0

    @property
    def indices(self) -> list[int]:
        return [index for index, _ in self.all]

    def push_queue(self) -> Pushes:
        return self

    def put(self, index: int, address: int, nbytes: int) -> int:
        self._put.append((index, address, nbytes))
        return len(self._put) - 1

    def count_put(self) -> int:
        return len(self._put)

    def cancel(self, number: int) -> None:
        if number < len(self._put):
            self._dropped.add(number)
            self.arrive(number)

    def arrive(self, number: int) -> None:
        self._arrived.add(number)
        while self._counted in self._arrived:
            if self._counted not in self._dropped and self.error is None:
                index, address, nbytes = self._put[self._counted]
                values = torch.frombuffer(bytearray(ctypes.string_at(address, nbytes)), dtype=torch.float32)
                self.all.append((index, values))
            self._counted += 1

    def count_pushed(self) -> int:
        return self._counted

    def await_pushed(self, count: int, timeout_s: float) -> bool:
        if self._counted < count:
            self._copies.arrive(1)
        if self.error is not None and self._put:
            error, self.error = self.error, None
            raise error
        return self._counted >= count

    def drop(self) -> None:
        self._dropped.update(range(self._counted, len(self._put)))


def staging_of(nbytes: int = 1 << 20, shares_gpu: bool = False) -> tuple[GradientStaging, StandIn, Any]:
    copies = StandIn()
    client: Any = Pushes(copies, shares_gpu)
    return GradientStaging(client, nbytes, copies), copies, client


def interrupt_at(line: int, act: Callable[[], object]) -> bool:
    """Calls it, and raises KeyboardInterrupt before the line of gradient_staging that comes so many lines into it. Whether
    there was one."""
    return interrupted_at(
        line,
        act,
        "line",
        lambda code: code.co_filename.endswith("gradient_staging.py") and code.co_name not in ("wait", "arrive"),
    )


def numbered(index: int, count: int = 100) -> Tensor:
    return torch.full((count,), float(index))


class Stream(StandIn):
    """Copies that a thread of its own makes, later, as a GPU does, and then tells the client's queue."""

    def __init__(self) -> None:
        super().__init__()
        self.used = True
        self.holds = Event()  # cleared: copies wait for it
        self.holds.set()
        self._done: SimpleQueue[Started] = SimpleQueue()
        self._asked: SimpleQueue[tuple[Started, Event]] = SimpleQueue()
        Thread(target=self._run, daemon=True).start()

    def start(self, source: Tensor, target: Tensor, shared: bool, queue: Any, number: int) -> Started:
        started, done = super().start(source, target, shared, queue, number), Event()
        self._asked.put((started, done))
        if shared:
            done.wait()
        return started

    def wait(self) -> None:
        while self.waiting:
            self._done.get()

    def _run(self) -> None:
        while True:
            copy, done = self._asked.get()
            self.holds.wait()
            copy.target.copy_(copy.source)
            copy.arrived = True
            copy.queue.arrive(copy.number)
            done.set()
            self._done.put(copy)
