"""Calls of a module that are under way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn


@dataclass(eq=False)
class ModuleCall:
    frame: FrameType | None  # torch's of the call; None: not found
    inside: bool = False  # for who began it


class _Own(threading.local):
    def __init__(self) -> None:  # called in each thread
        self.calls: list[ModuleCall] = []  # that are under way, the last one last


class ModuleCalls:
    """Of each thread its own, as forward hooks begin and end them. Torch runs no hook where KeyboardInterrupt or SystemExit ends
    a call: that one is lost, which is told by its frame."""

    def __init__(self) -> None:
        self._own = _Own()

    def begin(self) -> ModuleCall:
        """Called by a hook, as end() is."""
        call = ModuleCall(next((frame for frame in _stack() if frame.f_code is nn.Module._call_impl.__code__), None))
        self._own.calls.append(call)
        return call

    def end(self) -> ModuleCall | None:
        """The last that has begun; None: there is none, as for hooks that came while it was under way."""
        return self._own.calls.pop() if self._own.calls else None

    def take_lost(self) -> Iterator[ModuleCall]:
        """Of this thread, the last first."""
        calls = self._own.calls
        if not calls:
            return
        stack = set(map(id, _stack()))
        while calls and calls[-1].frame is not None and id(calls[-1].frame) not in stack:
            yield calls.pop()


def _stack() -> Iterator[FrameType]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
