"""What connect() found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Joined:
    """The run as it was joined. True if client state of an earlier process was put back: the parameters then hold the run's
    weights, and the loop goes on after the step() in which the state was taken.

    step: the run's last; 0: none was made yet.
    client_state: what was put back, by the name it is registered under; None: nothing was.
    restored: the checkpoint on the daemon's disk that the run was read back from when the daemon started, and what was wrong
        with newer ones; empty: the daemon has had the run in its memory all the time.
    """

    step: int
    client_state: dict[str, Any] | None
    restored: str

    def __bool__(self) -> bool:
        return self.client_state is not None
