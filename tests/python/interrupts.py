"""Control-C at any place of what a test calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, Literal


def interrupted_at(
    number: int, act: Callable[[], object], by: Literal["line", "opcode"], is_place: Callable[[CodeType], bool]
) -> bool:
    """Calls it, and raises KeyboardInterrupt after so many lines, or instructions of the interpreter, of the code that is a place.
    Whether there were as many."""

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal number
        if not is_place(frame.f_code):
            return None
        frame.f_trace_opcodes = by == "opcode"
        if event == by:
            number -= 1
            if number < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    kept = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(kept)
    return False
