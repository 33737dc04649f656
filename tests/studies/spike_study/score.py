"""How well events told of the loss spikes that came, over whole sets of runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from cells import WARM_UP

LEAD = 8  # steps within which an event tells of a spike
KINDS = {"rms": "SPIKE_KIND_RMS", "curvature": "SPIKE_KIND_CURVATURE", "gradient norm": "SPIKE_KIND_GRADIENT_NORM"}


def steps_with(run: dict, kind: str) -> list[int]:
    return [int(s["step"]) for s in run["steps"] if any(e["kind"] == kind for e in s["spikes"])]


def loss_spikes(run: dict) -> list[int]:
    return steps_with(run, "SPIKE_KIND_LOSS")


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

    def add(self, run: dict, kind: str) -> None:
        events, spikes = steps_with(run, kind), loss_spikes(run)
        self.events += len(events)
        self.spikes += len(spikes)
        self.followed += sum(any(1 <= spike - event <= LEAD for spike in spikes) for event in events)
        for spike in spikes:
            before = [spike - event for event in events if 1 <= spike - event <= LEAD]
            self.hit += bool(before)
            self.leads += [min(before)] if before else []
        for step in range(WARM_UP + 1, len(run["losses"]) + 1):
            self.steps += 1
            self.covered += any(1 <= step - event <= LEAD for event in events)

    def cells(self) -> list[str]:
        share = lambda part, whole: f"{100 * part / whole:.0f} %" if whole else "-"  # noqa: E731
        lead = f"{statistics.median(self.leads):g}" if self.leads else "-"
        return [
            str(self.spikes),
            str(self.events),
            share(self.followed, self.events),
            share(self.hit, self.spikes),
            share(self.covered, self.steps),
            lead,
        ]


def score(runs: Iterable[dict], kind: str) -> Score:
    made = Score()
    for run in runs:
        made.add(run, KINDS[kind])
    return made
