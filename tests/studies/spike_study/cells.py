"""The runs of the study: what is trained, how, and what befalls it."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass

from tasks import TASKS

BETA2 = (0.95, 0.999)
SEEDS = (1, 2, 3)
STEPS, QUICK_STEPS, WARM_UP = 1500, 600, 100
BEFALLS, EVERY, LASTS = 400, 400, 3  # the first step of a burst or a jump, from one to the next, and a burst's batches
JUMP = 200  # steps of a jump
# The first is healthy; the next three are the optimizer's own doing.
CONDITIONS = {"calm": 1, "lr x 10": 10, "lr x 30": 30, "lr jumps": 10, "shift": 1, "burst": 1}  # times the usual lr
OF_THE_OPTIMIZER = ("lr x 10", "lr x 30", "lr jumps")
# The first is what the others are held against; the second is the same training, watched as StableAdamW's paper does.
ARMS = ("adamw", "paper", "stable_adamw", "adagc", "clipped", "skip", "rewind")


@dataclass(frozen=True)
class Cell:
    task: str
    condition: str
    beta2: float
    seed: int
    arm: str = "adamw"

    @property
    def name(self) -> str:
        return "-".join(str(part).replace(" ", "_") for part in asdict(self).values())

    def befallen(self, step: int, steps: int) -> bool:
        return step > BEFALLS and (step - BEFALLS - 1) % EVERY < steps

    def lr(self, step: int) -> float:
        """Warmed up over the first steps; steps count from 1."""
        calm = self.condition == "lr jumps" and not self.befallen(step, JUMP)
        times = 1 if calm else CONDITIONS[self.condition]
        return TASKS[self.task].lr * times * min(1, step / WARM_UP)

    def source(self, step: int) -> str:
        """Which data the step's batch is drawn from."""
        if self.condition == "shift" and step > STEPS // 2:
            return "shifted"
        return "bad" if self.condition == "burst" and self.befallen(step, LASTS) else "usual"


def all_cells(quick: bool) -> list[Cell]:
    """All cells, in an order in which an interrupted study has something of everything."""
    if quick:
        plain = [Cell("image", condition, 0.999, 1) for condition in ("calm", "lr x 30")]
        return [*plain, Cell("convolution", "lr x 30", 0.999, 1), Cell("image", "lr x 30", 0.999, 1, "rewind")]
    steady, befallen = list(CONDITIONS)[:3], list(CONDITIONS)[3:]
    watched = [
        Cell(task, condition, beta2, seed, arm)
        for seed, condition, beta2, task, arm in itertools.product(SEEDS, steady, BETA2, TASKS, ARMS[:2])
        if seed == 1 or arm == "adamw"
    ] + [Cell(task, condition, beta2, 1) for condition, beta2, task in itertools.product(befallen, BETA2, TASKS)]
    answered = [
        Cell(task, condition, 0.999, 1, arm)
        for condition, arm, task in itertools.product(("lr x 30", *befallen), ARMS[2:], TASKS)
    ]
    return [cell for pair in itertools.zip_longest(watched, answered) for cell in pair if cell is not None]
