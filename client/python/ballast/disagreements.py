"""Steps that come to nothing because the ranks do not agree."""

from __future__ import annotations

from ballast.errors import Rejected
from ballast.result import StepResult

# So many in a row are not one rank's slip that the next step mends.
_MOST = 10


class Disagreements:
    """Ends a loop whose ranks give different values in step after step: it would never get on. One thread at a time."""

    def __init__(self, run: str):
        self._run = run
        self._in_a_row = 0

    def hear(self, result: StepResult) -> None:
        """Of each step's end. Rejected, on every rank, at the tenth in a row."""
        disagreed = result.outcome == "ABORTED" and result.reason == "disagreement"
        self._in_a_row = self._in_a_row + 1 if disagreed else 0
        if self._in_a_row == _MOST:
            self._in_a_row = 0
            raise Rejected(
                f"the last {_MOST} steps of run '{self._run}' came to nothing, since its ranks gave different values "
                f"({result.detail}). Give all the same; where a rank has come back, its LR scheduler must have made as many "
                "steps as the others' (Optimizer.ends_since_state)",
                "FAILED_PRECONDITION",
            )
