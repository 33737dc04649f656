"""The runs of the study: what is trained, how, and what befalls it."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass

from tasks import TASKS

BETA2 = (0.9, 0.95, 0.98, 0.99, 0.999)
STEPS, WARM_UP, BEFALLS = 400, 100, 250
# What causes spikes in practice.
CONDITIONS = ("calm", "high lr", "shift", "burst")
HIGH, BURST = 10, 3  # times the usual lr; bad batches in a row
# The first is what the others are held against.
ARMS = ("adamw", "stable_adamw", "adagc", "clipped", "skip", "rewind")


@dataclass(frozen=True)
class Cell:
    task: str
    condition: str
    beta2: float
    batch: int
    arm: str = "adamw"
    seed: int = 1

    @property
    def name(self) -> str:
        return "-".join(str(part).replace(" ", "_") for part in asdict(self).values())

    @property
    def lr(self) -> float:
        return TASKS[self.task].lr * (HIGH if self.condition == "high lr" else 1)

    def source(self, step: int) -> str:
        """Which data the step's batch is drawn from; steps count from 1."""
        if self.condition == "shift" and step > BEFALLS:
            return "shifted"
        if self.condition == "burst" and BEFALLS < step <= BEFALLS + BURST:
            return "bad"
        return "usual"


def all_cells(quick: bool) -> list[Cell]:
    """All cells, in an order in which an interrupted study has something of everything."""
    sizes = {name: task.sizes for name, task in TASKS.items()}
    if quick:
        return [Cell(task, "burst", 0.99, sizes[task][0], arm) for task in TASKS for arm in ARMS[:2]]
    predicted = [
        Cell(task, condition, beta2, sizes[task][place])
        for place, beta2, condition, task in itertools.product((0, 1), BETA2, CONDITIONS, TASKS)
    ]
    answered = [
        Cell(task, condition, beta2, sizes[task][0], arm)
        for condition, beta2, arm, task in itertools.product(CONDITIONS[1:], (0.95, 0.999), ARMS[1:], TASKS)
    ]
    return [cell for pair in itertools.zip_longest(predicted, answered) for cell in pair if cell is not None]
