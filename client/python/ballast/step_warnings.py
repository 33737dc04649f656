"""Python warnings for what a person should see of a run's steps."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType

from ballast.rank import Rank
from ballast.result import StepResult
from ballast.spikes import SpikeEvent, Spikes

# So many tensors a warning names.
_NAMED = 3
_EVERY_S = 60.0
# The daemon's: steps of warm-up, and half a window of what is compared with its past (server/stability/spikes.h).
_WARMUP, _HALF_WINDOW = 100, 64


class StepWarnings:
    """Warns without a flood: of each kind of spike event once, and of what else there is, losses that are not finite among
    it, once a minute a kind, with how many were passed over. What is found while a loss spike goes on is counted, and no
    warning. One thread at a time.

    counts: spike events so far, by their kind.
    """

    def __init__(self, run: str, spikes: Spikes | None = None, now_s: Callable[[], float] = time.monotonic):
        """spikes: as the user asked for them; None: he did not."""
        self.counts: Counter[str] = Counter()
        self._run, self._spikes, self._now_s, self._last_step = run, spikes, now_s, 0
        self._told_at_s: dict[str, float] = {}
        self._told_kinds: set[str] = set()
        self._passed_over: Counter[str] = Counter()

    def tell(self, result: StepResult) -> None:
        self._last_step = result.step
        where = f"run '{self._run}', step {result.step}"
        if not result.applied and result.reason != "overflow":  # which is a GradScaler's daily bread
            untouched = f"; not applied: {_few(result.not_applied)}" if result.not_applied else ""
            why = f"{result.reason}: {result.detail}" if result.detail else result.reason
            self._tell(f"{result.outcome} {result.reason}", f"{where} ended {result.outcome} ({why}){untouched}")
        of_events = {event.text for event in result.spikes}
        for warning in result.warnings:
            if warning not in of_events:
                self._tell("other", f"{where}: {warning}")
        for event in result.spikes:
            self.counts[event.kind] += 1
            if event.text in result.warnings:
                self._tell_of(event, where)

    def end(self) -> None:
        """The run is left: perhaps before anything that was asked for could be found. Said once."""
        spikes, self._spikes = self._spikes, None
        if spikes is None or self._last_step == 0:
            return
        deaf = max(_WARMUP if spikes.warmup_steps is None else spikes.warmup_steps, _HALF_WINDOW)
        if self._last_step <= deaf:
            _warn(
                f"run '{self._run}' is left at step {self._last_step}: of loss spikes, which spikes= asks for, only what is "
                f"not finite is looked for in the first {deaf} steps (warmup_steps, and {_HALF_WINDOW} to compare with)"
            )

    def _tell_of(self, event: SpikeEvent, where: str) -> None:
        if event.kind == "loss" and not math.isfinite(event.value):
            self._tell("loss that is not finite", f"{where}: {event.text}")
        elif event.kind not in self._told_kinds and (event.kind == "loss" or event.since_step == 0):
            self._told_kinds.add(event.kind)
            _warn(f"{where}: {event.text} (spike_counts counts more events of kind '{event.kind}')")

    def _tell(self, kind: str, text: str) -> None:
        now_s = self._now_s()
        if now_s - self._told_at_s.get(kind, -_EVERY_S) < _EVERY_S:
            self._passed_over[kind] += 1
            return
        self._told_at_s[kind] = now_s
        passed_over = self._passed_over.pop(kind, 0)
        more = f" (and {passed_over} more like it since the last warning)" if passed_over else ""
        _warn(text + more)


def _warn(text: str) -> None:
    """Of the line that called step(): the first that is neither ours nor torch's, which wraps it."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("ballast", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _few(names: Sequence[str]) -> str:
    """The first of them, and how many there are besides: `not_applied` has all."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


class Unpaired:
    """Of a rank among several that makes no step where the others may make one."""

    def __init__(self, rank: Rank):
        self._rank = rank
        self._told = rank.world == 1

    def tell(self) -> None:
        """A step() had no gradient. Warns, once."""
        if self._told:
            return
        self._told = True
        warnings.warn(
            f"rank {self._rank.number} of run '{self._rank.run}' called step() without a gradient, which is no step of the run: if "
            "other ranks had one, they wait, and this rank's next gradients go with those. Have every rank make a gradient in each "
            "step (of a loss times 0), or leave that step out on all of them",
            stacklevel=4,
        )
