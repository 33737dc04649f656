#!/usr/bin/env python3
"""A step of a run on two daemons against one.

    several_daemons.py [--quick] [--json FILE] [--record] [--rounds N]

A trainer, whose backward makes nothing but copies of gradients, pushes them over shared memory to one daemon of one thread,
or to two, each of which owns half of the run, and waits for the weights. StableAdamW, which passes twice over a tensor, so
that the daemon's arithmetic takes most of the time; released, and staged with clipping, where the ranks bring the verdict
that one daemon makes by itself. The verdict's round trip is of a staged run of small tensors, in which little else takes
time. Ratios are medians over rounds of the ratio within the round. All is on the same cores: with two of them, two daemons
leave none for the trainer. So two daemons more are held by the kernel to a fifth of a core each (core_share.py): they are the
limit there, and the trainer has as many cores as it uses, beside one of them or two. Where the kernel holds nobody, this is left
out, and said. --record writes a page among the results.
"""

import datetime
import os
import statistics
import sys
import time
from contextlib import ExitStack

import ballast
import core_share
import torch
import trainer
from collect import machine
from sides import ratios, rows
from turns import Load, process_seconds, quartiles

LARGE, SMALL = (16, 1_000_000), (16, 1_000)  # tensors, and elements of each
STAGED = {"commit": "staged", "max_grad_norm": 1.0}
FLOOR = 0.6  # of the ratio, where the daemon is the limit
SHARE = 0.2  # of a core, for each daemon that is held to one
# name, against which, the tensors, the daemons, the options, what it is.
FIGURES = (
    ("one", None, LARGE, 1, {}, "16 M parameters, released, one daemon"),
    ("two", "one", LARGE, 2, {}, "the same on two"),
    ("one staged", None, LARGE, 1, STAGED, "the same, staged and clipped, one daemon"),
    ("two staged", "one staged", LARGE, 2, STAGED, "the same on two, with the ranks' verdict"),
    ("one small", None, SMALL, 1, STAGED, "16,000 parameters, staged and clipped, one daemon"),
    ("two small", "one small", SMALL, 2, STAGED, "the same on two: what the verdict's round trip costs"),
)
# The same, with daemons that are held.
HELD = (
    ("one held", None, LARGE, 1, {}, f"16 M parameters, released, one daemon held to {SHARE} of a core"),
    ("two held", "one held", LARGE, 2, {}, "the same on two"),
    ("one staged held", None, LARGE, 1, STAGED, "the same, staged and clipped, one daemon"),
    ("two staged held", "one staged held", LARGE, 2, STAGED, "the same on two, with the ranks' verdict"),
)


class Side:
    """One of the figures: a run, and the daemons that have it."""

    def __init__(self, figure: tuple, daemons: list):
        torch.manual_seed(1)
        name, _, self.shape, self.count, options, _ = figure
        self.pids = [daemon.process.pid for daemon in daemons[: self.count]]
        self.seconds: list[float] = []  # of a step, by round
        self.cores: list[float] = []  # that one of the daemons used meanwhile, by round
        count, elements = self.shape
        self.tensors = [torch.nn.Parameter(torch.randn(elements) / 10) for _ in range(count)]
        self.gradients = [torch.randn(elements) / 10 for _ in range(count)]
        named = [(f"w{i}", tensor) for i, tensor in enumerate(self.tensors)]
        server = ",".join(daemon.server for daemon in daemons[: self.count])
        self.optimizer = ballast.StableAdamW(named, lr=1e-3, server=server, run=name.replace(" ", "-"), **options)

    def step(self, steps: int) -> None:
        for _ in range(steps):
            for tensor, gradient in zip(self.tensors, self.gradients):
                tensor.backward(gradient)
            self.optimizer.step()
            self.optimizer.wait()

    def turn(self, steps: int) -> None:
        used, began = sum(map(process_seconds, self.pids)), time.perf_counter()
        self.step(steps)
        wall = time.perf_counter() - began
        self.seconds.append(wall / steps)
        self.cores.append((sum(map(process_seconds, self.pids)) - used) / wall / self.count)


def hold(stack: ExitStack, daemons: list) -> bool:
    """Whether the kernel does."""
    try:
        for daemon in daemons:
            stack.enter_context(core_share.held(daemon.process.pid, SHARE))
    except core_share.CannotHold as error:
        print(f"NOT MEASURED, daemons that are held to {SHARE} of a core: {error}", file=sys.stderr)
        return False
    return True


def measure(options) -> tuple[dict[str, Side], Load]:
    steps = {LARGE: 4, SMALL: 40}
    if options.quick:
        options.rounds, steps = 1, {LARGE: 1, SMALL: 4}
    load = Load()
    with ExitStack() as stack:
        free, held = ([stack.enter_context(trainer.own_daemon()) for _ in range(2)] for _ in range(2))
        given = [(figure, free) for figure in FIGURES]
        if hold(stack, held):
            given += [(figure, held) for figure in HELD]
        sides = {}
        for figure, daemons in given:
            side = sides[figure[0]] = Side(figure, daemons)
            stack.enter_context(side.optimizer)
            side.step(2)  # what is made at first
        for number in range(options.rounds):
            load.begin_round([os.getpid(), *(daemon.process.pid for daemon in free + held)])
            for side in list(sides.values())[:: -1 if number % 2 else 1]:
                side.turn(steps[side.shape])
            load.end_round()
    return sides, load


def of_held(sides: dict[str, Side]) -> list[str]:
    """What the page says beside the table of the daemons that are held."""
    if HELD[0][0] not in sides:
        return [f"**Not measured here: daemons that are held to {SHARE} of a core.**"]
    one, two = (statistics.median(sides[name].cores) for name in ("one held", "two held"))
    return [
        f"Held daemons were the limit as far as they used what they may, {SHARE} cores: one alone used {one:.2f} in released "
        f"steps, each of two {two:.2f}. The trainer's part of a step is not held, and not halved."
    ]


def report(sides: dict[str, Side], load: Load, rounds: int) -> str:
    lines = [
        "# A run on two daemons, measured",
        "",
        f"`tests/bench/several_daemons.py --rounds {rounds}` on {machine()}; {datetime.date.today()}. StableAdamW, shared "
        "memory, one thread for each daemon, and the trainer's on the same cores. Medians over rounds, quartiles in brackets; "
        f"ratios within a round. Floor of the ratio where the daemon is the limit: {FLOOR}.",
        load.told(),
        "",
        "| step | ms | ratio |",
        "| --- | --- | --- |",
    ]
    seconds = {name: side.seconds for name, side in sides.items()}
    for name, against, *_, what in FIGURES + HELD:
        if name not in sides:
            continue
        low, middle, high = (1000 * value for value in quartiles(seconds[name]))
        ratio = f"{statistics.median(ratios(seconds, name, against)):.2f}" if against else "-"
        lines.append(f"| {what} | {middle:.3g} ({low:.3g} to {high:.3g}) | {ratio} |")
    trip = [two - one for two, one in zip(seconds["two small"], seconds["one small"])]
    low, middle, high = (1000 * value for value in quartiles(trip))
    lines += [
        "",
        f"The verdict's round trip, with all that a second daemon adds: {middle:.2f} ms ({low:.2f} to {high:.2f}).",
        *of_held(sides),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    options = trainer.recording_parser(__doc__, "one round of few steps", 15).parse_args()
    torch.set_num_threads(1)
    sides, load = measure(options)
    text = report(sides, load, options.rounds)
    seconds = {name: side.seconds for name, side in sides.items()}
    against = {name: other for name, other, *_ in FIGURES + HELD if name in sides}
    trainer.publish(options, "several_daemons", text, rows(seconds, against, options.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
