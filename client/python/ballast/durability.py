"""What of a run survives its daemon: the checkpoints that one with storage writes to its disk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ballast.errors import Rejected
from ballast.progress import Waiting
from ballast.tagging import Tagging

if TYPE_CHECKING:
    from ballast.membership import Membership
    from ballast.settings import RunSettings
    from ballast.steps import Steps


_DURABILITIES = ("checkpoint", "journal", "journal_sync")


@dataclass(frozen=True)
class Checkpoints:
    """When the daemon writes a run to its disk, and how many checkpoints it keeps. None: as the daemon does by itself."""

    every_steps: int | None = None
    every_seconds: float | None = None
    kept: int | None = None
    durability: str | None = None
    journal_steps: int | None = None

    def spec(self) -> dict[str, Any]:
        """ballast.v1.CheckpointPolicy, in Protobuf's JSON; empty where nothing is asked for."""
        fields = {
            "every_steps": self.every_steps,
            "every_seconds": self.every_seconds,
            "retain": self.kept,
            "durability": self.durability and f"DURABILITY_MODE_{self.durability.upper()}",
            "journal_steps": self.journal_steps,
        }
        return {name: value for name, value in fields.items() if value is not None}


def checkpoints(options: Mapping[str, Any]) -> Checkpoints:
    """From the options checkpoint_every_steps, checkpoint_every_seconds, checkpoints_kept, durability and journal_steps.
    Rejected if one is wrong."""
    return Checkpoints(
        _whole(options, "checkpoint_every_steps", 1, 2**32 - 1),
        _seconds(options, "checkpoint_every_seconds"),
        _whole(options, "checkpoints_kept", 2, 100),
        _durability(options),
        _whole(options, "journal_steps", 1, 10_000),
    )


def _whole(options: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    given: int | None = options.get(name)
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and least <= given <= most):
        return given
    raise Rejected(f"{name}={given!r}: it must be None or a whole number from {least} to {most}")


def _durability(options: Mapping[str, Any]) -> str | None:
    given: str | None = options.get("durability")
    if given not in (None, *_DURABILITIES):
        raise Rejected(f"durability={given!r}: it must be None or one of {', '.join(map(repr, _DURABILITIES))}")
    if given in (None, "checkpoint") and options.get("journal_steps") is not None:
        raise Rejected("journal_steps is for durability='journal' or 'journal_sync'")
    return given


def _seconds(options: Mapping[str, Any], name: str) -> float | None:
    given = options.get(name)
    if given is None:
        return None
    if isinstance(given, (int, float)) and not isinstance(given, bool) and math.isfinite(given) and 0 < given <= 1e6:
        return float(given)
    raise Rejected(f"{name}={given!r}: it must be None, or above 0 and at most 1e6 seconds")


class Durable(Tagging):
    """An optimizer that can have its run written to the daemon's disk."""

    _settings: RunSettings
    _membership: Membership
    _steps: Steps

    def checkpoint(self) -> int:
        """Has the daemon write the run's last step to its disk, beside what it writes by itself, and returns that step when
        it is there for good: a crash of the daemon, or of its machine, then leaves the run at this step or a later one.

        Called between two steps, by one rank or by all of them, who get the same step. Waits for the disk, and with
        overlap_forward for the last step. What is on the disk is what a snapshot has: weights, moments, and the client
        state that is registered. last_result.durable_step and run_status().durability tell what is there.

        Raises:
            Rejected: a step is open; none was made yet; the daemon has no storage, or its disk is full or fails: the
                training may go on.
            RunRewound: the run was taken back to an earlier step, and this trainer with it.
        """
        steps = self._steps
        with steps.lock, steps.following():
            session = steps.joined()
            steps.wait()
            if session.step_open:
                raise Rejected(
                    f"step {session.step} is open: call step() first, then checkpoint()", "FAILED_PRECONDITION"
                )
            client, run = self._membership.connected(), self._settings.rank.run
            client.check_status()  # a rewind is heard of here
            with Waiting(f"waiting until step {session.step - 1} of run '{run}' is on the daemon's disk"):
                return int(client.checkpoint(run)["step"])
