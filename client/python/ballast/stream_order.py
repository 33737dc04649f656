"""Uses of weights on GPUs and changes of them, in order whatever streams they are in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """What asks GPUs for work: their streams, which take it one after the other, each by itself."""

    def capturing(self) -> bool:
        """Whether what is asked for is not done but recorded, for a CUDA graph."""
        ...

    def current(self, device: torch.device) -> Any:
        """The stream to which this thread's work goes there; equal to itself, and hashable."""
        ...

    def record(self, stream: Any) -> Any:
        """An event that comes to pass when the stream has done what it was asked until now."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """What the stream is asked from now on is done after the event. The host goes on."""
        ...


class CudaStreams:
    """As torch has them."""

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def current(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    def record(self, stream: Any) -> Any:
        return stream.record_event()

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)


class StreamOrder:
    """A GPU computes what a thread asked for some time after the thread has gone on: two threads that use and change weights one
    after the other, each with a stream of its own, would have the GPU do both at once. Here each change is done after the uses
    before it, and each use after the last change. Host memory needs none of it: `devices` without a GPU cost nothing.

    Changes come one at a time, and while no use has begun and not ended; uses at any time otherwise, from any thread. Of work that
    is recorded for a CUDA graph there are no uses: whoever replays the graph says when it is used.
    """

    def __init__(self, streams: Streams | None = None):
        self._streams: Streams = CudaStreams() if streams is None else streams
        self._uses: dict[Any, Any] = {}  # since the last change, by stream: an event after the last of them
        self._changes: dict[torch.device, Any] = {}  # an event after the last one there

    def begin_use(self, devices: Iterable[torch.device]) -> None:
        """What this thread asks of the devices from now on is done after the last change."""
        for device in self._gpus(devices):
            if device in self._changes:
                self._streams.wait(self._streams.current(device), self._changes[device])

    def end_use(self, devices: Iterable[torch.device]) -> None:
        """What this thread has asked of the devices is done before the next change."""
        for device in self._gpus(devices):
            stream = self._streams.current(device)
            self._uses[stream] = self._streams.record(stream)

    def begin_change(self, devices: Iterable[torch.device]) -> None:
        """What this thread asks of the devices from now on is done after all uses, and all changes, before it."""
        self.begin_use(devices)
        for device in self._gpus(devices):
            for event in self._uses.values():
                self._streams.wait(self._streams.current(device), event)

    def end_change(self, devices: Iterable[torch.device]) -> None:
        """What this thread has asked of the devices is done before the next use. The uses until now may be forgotten."""
        self._uses.clear()
        for device in self._gpus(devices):
            self._changes[device] = self._streams.record(self._streams.current(device))

    def capturing(self, devices: Iterable[torch.device]) -> bool:
        """Whether this thread's work on one of them is recorded for a CUDA graph: weights must not be changed then."""
        return any(device.type == "cuda" for device in devices) and self._streams.capturing()

    def _gpus(self, devices: Iterable[torch.device]) -> list[torch.device]:
        gpus = [device for device in devices if device.type == "cuda"]
        return [] if gpus and self._streams.capturing() else gpus
