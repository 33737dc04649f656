#!/usr/bin/env python3
"""A step of a run on two daemons against one, where the daemon is the limit.

    several_daemons.py [--quick] [--json FILE] [--record] [--rounds N]

A trainer, whose backward makes nothing but copies of gradients, pushes them over shared memory to one daemon of one thread,
or to two, each of which owns half of the run, and waits for the weights. StableAdamW, which passes twice over a tensor, so
that the daemon's arithmetic takes most of the time; released, and staged with clipping, where the ranks bring the verdict
that one daemon makes by itself. The verdict's round trip is of a staged run of small tensors, in which little else takes
time. Ratios are medians over rounds of the ratio within the round. All is on the same cores: with two of them, two daemons
leave none for the trainer. --record writes a page among the results.
"""

import datetime
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import ballast
import torch
import trainer
from collect import machine
from sides import ratios, rows
from turns import Load, quartiles

LARGE, SMALL = (16, 1_000_000), (16, 1_000)  # tensors, and elements of each
STAGED = {"commit": "staged", "max_grad_norm": 1.0}
FLOOR = 0.6
# name, against which, the tensors, the daemons, the options, what it is.
FIGURES = (
    ("one", None, LARGE, 1, {}, "16 M parameters, released, one daemon"),
    ("two", "one", LARGE, 2, {}, "the same on two"),
    ("one staged", None, LARGE, 1, STAGED, "the same, staged and clipped, one daemon"),
    ("two staged", "one staged", LARGE, 2, STAGED, "the same on two, with the ranks' verdict"),
    ("one small", None, SMALL, 1, STAGED, "16,000 parameters, staged and clipped, one daemon"),
    ("two small", "one small", SMALL, 2, STAGED, "the same on two: what the verdict's round trip costs"),
)
AGAINST = {name: against for name, against, *_ in FIGURES}


class Stepping:
    def __init__(self, server: str, run: str, tensors: tuple[int, int], options: dict):
        torch.manual_seed(1)
        count, elements = tensors
        self.tensors = [torch.nn.Parameter(torch.randn(elements) / 10) for _ in range(count)]
        self.gradients = [torch.randn(elements) / 10 for _ in range(count)]
        named = [(f"w{i}", tensor) for i, tensor in enumerate(self.tensors)]
        self.optimizer = ballast.StableAdamW(named, lr=1e-3, server=server, run=run, **options)

    def turn(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            for tensor, gradient in zip(self.tensors, self.gradients):
                tensor.backward(gradient)
            self.optimizer.step()
            self.optimizer.wait()
        return (time.perf_counter() - began) / steps


def measure(options) -> tuple[dict[str, list[float]], Load]:
    steps = {LARGE: 4, SMALL: 40}
    if options.quick:
        options.rounds, steps = 1, {LARGE: 1, SMALL: 4}
    seconds: dict[str, list[float]] = {name: [] for name, *_ in FIGURES}
    load = Load()
    with ExitStack() as stack:
        daemons = [stack.enter_context(trainer.own_daemon()) for _ in range(2)]
        sides = {}
        for name, _, tensors, count, given, _ in FIGURES:
            server = ",".join(daemon.server for daemon in daemons[:count])
            sides[name] = Stepping(server, name.replace(" ", "-"), tensors, given)
            stack.enter_context(sides[name].optimizer)
            sides[name].turn(2)  # what is made at first
        for number in range(options.rounds):
            load.begin_round([os.getpid(), *(daemon.process.pid for daemon in daemons)])
            for name, _, tensors, *_ in FIGURES[:: -1 if number % 2 else 1]:
                seconds[name].append(sides[name].turn(steps[tensors]))
            load.end_round()
    return seconds, load


def report(seconds: dict, load: Load, rounds: int) -> str:
    lines = [
        "# A run on two daemons, measured",
        "",
        f"`tests/bench/several_daemons.py --rounds {rounds}` on {machine()}; {datetime.date.today()}. StableAdamW, shared "
        "memory, one thread for each daemon, and the trainer's on the same cores. Medians over rounds, quartiles in brackets; "
        f"ratios within a round. Floor of the first ratio: {FLOOR}.",
        load.told(),
        "",
        "| step | ms | ratio |",
        "| --- | --- | --- |",
    ]
    for name, against, *_, what in FIGURES:
        low, middle, high = (1000 * value for value in quartiles(seconds[name]))
        ratio = f"{statistics.median(ratios(seconds, name, against)):.2f}" if against else "-"
        lines.append(f"| {what} | {middle:.3g} ({low:.3g} to {high:.3g}) | {ratio} |")
    trip = [two - one for two, one in zip(seconds["two small"], seconds["one small"])]
    low, middle, high = (1000 * value for value in quartiles(trip))
    lines += [
        "",
        f"The verdict's round trip, with all that a second daemon adds: {middle:.2f} ms ({low:.2f} to {high:.2f}).",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    options = trainer.recording_parser(__doc__, "one round of few steps", 15).parse_args()
    torch.set_num_threads(1)
    seconds, load = measure(options)
    text = report(seconds, load, options.rounds)
    print(text)
    if options.record:
        (Path(__file__).parent / "results" / "several_daemons.md").write_text(text)
    if options.json:
        options.json.write_text(json.dumps(rows(seconds, AGAINST, options.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
