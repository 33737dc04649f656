"""What could be had: how far each detector gets on the recorded trainings, with the threshold that suits it best."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import fitted
import numpy as np
from cells import OF_THE_OPTIMIZER
from detectors import Trace, crossings, detectors
from score import Score, outside_spikes, told
from tasks import TUNED

THRESHOLDS = 40  # tried, from what one step has to what a tenth of the steps have
TARGET = 0.5  # of precision, and of recall

HEAD = ["detector", "chosen for", "variant", "threshold", "precision", "recall", "held out: precision", "recall",
        "false alarms in 10,000 healthy steps"]  # fmt: skip


@dataclass(frozen=True)
class Tried:
    """A detector at one threshold: its scores on the tasks for tuning and on those held out, and in healthy trainings."""

    family: str
    variant: str
    threshold: float
    tuned: Score
    held_out: Score
    healthy: Score

    def cells(self, wanted: str) -> list[str]:
        scores = [told(value, 2) for of in (self.tuned, self.held_out) for value in (of.precision(), of.recall())]
        return [
            self.family,
            wanted,
            self.variant,
            f"{self.threshold:.3g}",
            *scores,
            told(self.healthy.false_alarms(), 1),
        ]


def thresholds(series: list[np.ndarray]) -> list[float]:
    values = np.concatenate(series)
    values = np.sort(values[np.isfinite(values)])
    ranks = np.geomspace(1, max(1, len(values) / 10), THRESHOLDS).round().astype(int)
    return sorted({float(values[-rank]) for rank in ranks}) if len(values) else []


def try_all(runs: list[dict]) -> list[Tried]:
    series: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
    for run in runs:
        for family, variant, values in detectors(Trace.of(run)):
            series[family, variant].append(values)
    series[fitted.NAME] = fitted.series(runs)
    return [try_one(runs, *name, at, found) for name, found in series.items() for at in thresholds(found)]


def try_one(runs: list[dict], family: str, variant: str, threshold: float, series: list[np.ndarray]) -> Tried:
    made = Tried(family, variant, threshold, Score(), Score(), Score())
    for run, of_run in zip(runs, series):
        events = outside_spikes(run, crossings(of_run, threshold))
        cell = run["cell"]
        if cell["condition"] in OF_THE_OPTIMIZER:
            (made.tuned if cell["task"] in TUNED else made.held_out).add(run, events)
        else:
            made.healthy.add(run, events)
    return made


def best(tried: list[Tried], of: Callable[[Tried], Score]) -> list[tuple[str, Tried]]:
    """The most recall at the target's precision, and the most precision at its recall; on which tasks, `of` says."""

    def most(wanted: Callable[[Score], float], held: Callable[[Score], float]) -> list[Tried]:
        good = [one for one in tried if held(of(one)) >= TARGET]
        return sorted(good, key=lambda one: (wanted(of(one)), held(of(one)), one.threshold))[-1:]

    exact, complete = most(Score.recall, Score.precision), most(Score.precision, Score.recall)
    return [("precision", one) for one in exact] + [("recall", one) for one in complete]


def rows(runs: list[dict]) -> list[list[str]]:
    tried = try_all(runs)
    families: dict[str, list[Tried]] = defaultdict(list)
    for one in tried:
        families[one.family].append(one)
    made = [one.cells(wanted) for of_one in families.values() for wanted, one in best(of_one, lambda one: one.tuned)]
    return made + [one.cells(f"{wanted}, with hindsight") for wanted, one in best(tried, lambda one: one.held_out)]
