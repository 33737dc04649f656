"""How an earlier step of a run ended."""

from __future__ import annotations

from dataclasses import dataclass

from ballast import _core
from ballast.errors import BallastError


@dataclass(frozen=True)
class StepEnd:
    """outcome, reason: as in StepResult."""

    outcome: str
    reason: str

    @property
    def skipped(self) -> bool:
        """As StepResult.skipped."""
        return self.outcome not in ("APPLIED", "PARTIAL")


def ends_between(client: _core.Client, run: str, first: int, last: int) -> list[StepEnd | None]:
    """Of these steps, in order. None: the daemon does not know it any more, or does not tell."""
    try:
        records = client.get_history(run, first - 1)["steps"]
    except BallastError:
        records = []
    # Of two with the same number the later one counts: the run was rewound between them.
    ends = {one["step"]: StepEnd(one["outcome"].removeprefix("STEP_OUTCOME_"), one["reason"]) for one in records}
    return [ends.get(step) for step in range(first, last + 1)]
