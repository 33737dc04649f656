"""For whom a trainer waits, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ballast.errors import BallastError
from ballast.progress import Patience
from ballast.wording import in_python

_MOST_NAMED = 4


class AwaitedRanks:
    """The other ranks of a run, which its steps wait for. One thread at a time.

    own: this trainer's rank. step_timeout: the option. status: asks the daemon for the run's, as ballast.v1.RunStatus.
    """

    def __init__(self, run: str, own: int, step_timeout: float | None, status: Callable[[], Mapping[str, Any]]):
        self._run = run
        self._own = own
        self._step_timeout = step_timeout
        self._status = status
        self._advised = False

    def patience(self, what: str, step: int) -> Patience:
        """For a wait for `what` of this step, which is open: its lines name the ranks that the step waits for, and what they
        have not done."""
        return Patience(lambda: self.tell(what, step))

    def tell(self, what: str, step: int) -> str:
        start = f"step {step} of run '{self._run}': waiting for"
        try:
            status = self._status()
        except BallastError as error:
            return f"{start} {what}; the daemon does not say who is late: {error}"
        ranks = [rank for rank in status["awaited"] if rank["rank"] != self._own and status["step"] + 1 == step]
        if not ranks:
            return f"{start} {what}"
        more = f"; and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
        return f"{start} {'; '.join(map(_said_of, ranks[:_MOST_NAMED]))}{more}{self._advice()}"

    def _advice(self) -> str:
        """What can be done about it; of what is not set, once."""
        if self._step_timeout is not None:
            return f". The step ends without them after step_timeout={self._step_timeout:g} seconds"
        if self._advised:
            return ""
        self._advised = True
        return (
            ". A step waits for a rank as long as that is connected, unless step_timeout=SECONDS is given. Ranks that have "
            "fewer batches than others end with them in `for batch in optimizer.in_step(loader)`"
        )


def _said_of(rank: Mapping[str, Any]) -> str:
    connected = "connected" if rank["connected"] else "not connected"
    return f"rank {rank['rank']} ({in_python(rank['what'])}, for {rank['seconds']:.0f} s; {connected})"
