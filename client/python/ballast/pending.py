"""What the daemon is still to say, awaited so that Ctrl-C is heard."""

from __future__ import annotations

import time
from typing import Any, Protocol

from ballast.progress import Patience

# Between two looks for Ctrl-C.
WAIT_SLICE_S = 0.1


class Pending(Protocol):
    def wait(self, timeout_s: float) -> dict[str, Any] | None: ...


def fields_of(pending: Pending, patience: Patience) -> dict[str, Any]:
    """Waits for them. After an interrupted wait it may be called again."""
    while (fields := pending.wait(WAIT_SLICE_S)) is None:
        patience.look()
    return fields


def fields_within(pending: Pending, seconds: float) -> dict[str, Any] | None:
    """Those that come within so many seconds."""
    end = time.monotonic() + seconds
    while (fields := pending.wait(WAIT_SLICE_S)) is None and time.monotonic() < end:
        pass
    return fields
