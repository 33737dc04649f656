"""How well events told of the loss spikes that came, over whole sets of runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from cells import WARM_UP

LEAD = 8  # steps within which an event tells of a spike
PREDICTORS = ("rms", "curvature", "gradient_norm")


def loss_spikes(run: dict) -> list[tuple[int, int]]:
    """(first step, the one that made it known) of each."""
    return [(event["since"], event["step"]) for event in run["events"] if event["kind"] == "loss"]


def outside_spikes(run: dict, steps: Iterable[int]) -> list[int]:
    """Those at which no loss spike was going on."""
    spikes = loss_spikes(run)
    return [step for step in steps if not any(first <= step <= known for first, known in spikes)]


def events_of(run: dict, kind: str) -> list[int]:
    steps = {event["step"] for event in run["events"] if event["kind"] == kind and event["since"] == 0}
    return outside_spikes(run, sorted(steps))


@dataclass
class Score:
    """precision: events that a spike followed; recall: spikes that an event came before; chance: steps that lie 1 to 8
    after an event, which is the recall of events that know nothing."""

    events: int = 0
    followed: int = 0
    spikes: int = 0
    hit: int = 0
    steps: int = 0
    covered: int = 0
    leads: list[int] = field(default_factory=list)

    def add(self, run: dict, events: list[int]) -> None:
        """events: steps outside of loss spikes, ascending."""
        spikes = [first for first, _ in loss_spikes(run)]
        self.events += len(events)
        self.spikes += len(spikes)
        self.followed += sum(any(1 <= spike - event <= LEAD for spike in spikes) for event in events)
        for spike in spikes:
            before = [spike - event for event in events if 1 <= spike - event <= LEAD]
            self.hit += bool(before)
            self.leads += [min(before)] if before else []
        self.steps += len(run["losses"]) - WARM_UP
        self.covered += len({event + lead for event in events for lead in range(1, LEAD + 1)})

    def precision(self) -> float:
        return self.followed / self.events if self.events else math.nan

    def recall(self) -> float:
        return self.hit / self.spikes if self.spikes else math.nan

    def false_alarms(self) -> float:
        """In 10,000 steps."""
        return 1e4 * (self.events - self.followed) / self.steps if self.steps else math.nan

    def cells(self) -> list[str]:
        lead = f"{statistics.median(self.leads):g}" if self.leads else "-"
        chance = self.covered / self.steps if self.steps else math.nan
        return [
            str(self.steps),
            str(self.spikes),
            str(self.events),
            told(self.false_alarms(), 1),
            told(self.precision(), 2),
            told(self.recall(), 2),
            told(chance, 2),
            lead,
        ]


def told(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


HEAD = [
    "steps",
    "loss spikes",
    "events",
    "false alarms in 10,000 steps",
    "precision",
    "recall",
    "chance",
    "lead, steps",
]


def score(runs: Iterable[dict], kind: str) -> Score:
    made = Score()
    for run in runs:
        made.add(run, events_of(run, kind))
    return made
