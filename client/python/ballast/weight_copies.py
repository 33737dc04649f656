"""Weights on their way to a GPU from the host memory in which they landed."""

from __future__ import annotations

from typing import Any

import torch


class WeightCopies:
    """Which GPUs may still be copying from there. One thread at a time."""

    def __init__(self) -> None:
        self._last: dict[torch.device, Any] = {}  # an event of each: its last copy is done

    def note(self, device: torch.device) -> None:
        """A copy was asked of the device's current stream, if it is a GPU; elsewhere copies are done when they return."""
        if device.type != "cuda":
            return
        if device not in self._last:
            self._last[device] = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch declares none
        self._last[device].record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Until all of them are done, and that memory may be overwritten."""
        for event in self._last.values():
            event.synchronize()
