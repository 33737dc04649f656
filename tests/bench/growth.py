#!/usr/bin/env python3
"""How a step's cost grows with parameters, tensors and ranks; what the daemon's decisions alone cost; and what threads help.

    growth.py [--quick] [--json FILE] [--record] [--rounds N]

Trainers that compute nothing push bf16 gradients of plain SGD to a daemon of one thread and get bf16 weights back, over gRPC and
through shared memory (steps_bench); one axis grows at a time. The decisions: step_machine_bench, one event a gradient. Threads:
cpu_device_bench, updates of AdamW in the default formats. --record writes results/growth.md and the plots, results/growth.svg.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import trainer
from collect import machine
from comparison import noise
from memory import status_bytes  # tests/e2e, by trainer
from steps import TRANSPORTS, Case, spread
from turns import Answering, Load

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TENSORS = 50  # of a step, where they do not grow


@dataclass
class Axis:
    """What grows, from the first of its sizes to the last, and what does not."""

    name: str
    sizes: list[int]
    fixed: str
    shape: dict[str, int] = field(default_factory=dict)  # of Case, beside the size

    def case(self, transport: str, size: int) -> Case:
        shape = {"parameters": 1, "tensors": TENSORS} | self.shape | {self.name: size}
        volume = shape["parameters"] * shape.get("ranks", 1)
        return Case(transport, gradient="bf16", serving="bf16", steps=max(1, min(10, 10**8 // volume)), **shape)


@dataclass
class Steps:
    """One size of an axis over one transport."""

    case: Case
    daemon_bytes: list[int] = field(default_factory=list)  # at most, by round


@dataclass
class Decisions:
    """One run of step_machine_bench."""

    ranks: int
    tensors: int
    micros: int = 1
    room: float = 1
    events: int = 0
    seconds: list[float] = field(default_factory=list)
    work: int = 0  # chunks, ranks and sets that were looked at
    nbytes: int = 0
    planned: int = 0  # bytes of the accounts, by the memory plan

    def run(self, build: Path):
        words = [build / "tests" / "bench" / "step_machine_bench", self.ranks, self.tensors, self.micros, self.room]
        said = subprocess.run(list(map(str, words)), check=True, stdout=subprocess.PIPE, text=True).stdout.split()
        self.events, _effects, self.work, self.nbytes, self.planned = (int(said[i]) for i in (0, 1, 3, 4, 5))
        self.seconds.append(float(said[2]))

    def microseconds(self) -> float:
        """An event."""
        return 1e6 * statistics.median(self.seconds) / self.events


@dataclass
class Updates:
    """One shape of a model in cpu_device_bench, by one thread and by all."""

    tensors: int
    elements: int  # of each
    seconds: dict[int, list[float]] = field(default_factory=dict)  # by threads

    def run(self, build: Path):
        for threads in (1, os.cpu_count()):
            words = [build / "tests" / "bench" / "cpu_device_bench", threads, self.tensors, self.elements, 3]
            said = subprocess.run(list(map(str, words)), check=True, stdout=subprocess.PIPE, text=True).stdout
            self.seconds.setdefault(threads, []).append(min(map(float, said.split())))

    def speedups(self) -> list[float]:
        return [one / all_ for one, all_ in zip(self.seconds[1], self.seconds[os.cpu_count()])]


def axes(quick: bool) -> list[Axis]:
    if quick:
        return [
            Axis("parameters", [10**5, 10**6], "1 rank, 50 tensors"),
            Axis("tensors", [10, 100], "1 rank, 1 M parameters", {"parameters": 10**6}),
            Axis("ranks", [1, 2], "0.1 M parameters from each, 50 tensors", {"parameters": 10**5}),
        ]
    return [
        Axis("parameters", [10**6, 10**7, 10**8, 10**9], "1 rank, 50 tensors"),
        Axis("tensors", [10, 100, 10**3, 10**4, 10**5], "1 rank, 10 M parameters", {"parameters": 10**7}),
        Axis("ranks", [1, 2, 4, 8, 16, 32, 64], "2.5 M parameters from each, 50 tensors", {"parameters": 2_500_000}),
    ]


def decisions(quick: bool) -> list[Decisions]:
    if quick:
        return [Decisions(1, 100), Decisions(8, 100), Decisions(8, 100, 8), Decisions(8, 1000, room=0.01)]
    by_ranks = [Decisions(ranks, 10**4) for ranks in (1, 8, 64)]
    by_tensors = [Decisions(8, tensors) for tensors in (10**2, 10**3, 10**5)]
    return by_ranks + by_tensors + [Decisions(8, 10**5, room=0.0001), Decisions(64, 10**5, 8)]


def updates(quick: bool) -> list[Updates]:
    if quick:
        return [Updates(200, 500), Updates(2, 50_000)]
    return [Updates(10**7 // elements, elements) for elements in (500, 5000, 50_000, 500_000, 10**7)]


def measure_steps(grown: dict[tuple[str, str, int], Steps], build: Path, rounds: int) -> Load:
    """By axis, transport and size. Each has a daemon of its own, whose memory no other run has touched."""
    load = Load()
    for number in range(rounds):
        for steps in grown.values():
            with tempfile.TemporaryDirectory(prefix="ballast-growth-") as folder:
                with trainer.own_daemon("--shm_socket", f"{folder}/daemon.sock") as daemon:
                    measure_one(steps, build, daemon, load)
        print(f"round {number + 1} of {rounds}: others used {max(load.shares):.2f} cores at most", file=sys.stderr)
    return load


def measure_one(steps: Steps, build: Path, daemon, load: Load):
    bench = Answering([build / "tests" / "bench" / "steps_bench", daemon.server])
    try:
        load.begin_round([os.getpid(), bench.process.pid, daemon.process.pid])
        steps.case.run(bench, daemon)
        load.end_round()
        steps.daemon_bytes.append(status_bytes(daemon.process.pid, "VmHWM"))
    finally:
        bench.close()


def steps_table(axis: Axis, grown: dict[tuple[str, str, int], Steps]) -> list[str]:
    lines = [
        f"## As {axis.name} grow: {axis.fixed}",
        "",
        f"| transport | {axis.name} | step, ms | of the one before | CPU seconds a gigabyte | daemon's memory at most, MB |",
        "| --- " * 6 + "|",
    ]
    for transport, (title, _name) in TRANSPORTS.items():
        before = None
        for size in axis.sizes:
            steps = grown[axis.name, transport, size]
            case = steps.case
            of = f"{statistics.median(a / b for a, b in zip(case.seconds, before.seconds)):.2f}" if before else "-"
            cells = [title, f"{size:,}", case.ms(), of, case.cpu_per_gigabyte()]
            lines.append("| " + " | ".join([*cells, f"{statistics.median(steps.daemon_bytes) / 1e6:.0f}"]) + " |")
            before = case
    return lines + [""]


def decisions_table(decided: list[Decisions]) -> list[str]:
    lines = [
        "## What deciding costs",
        "",
        "A step machine is handed every event of a step, one gradient each; nothing is sent or summed. `room`: the share of "
        "the sums that their pool holds at a time. Looks: chunks, ranks and sets that the accounts looked at.",
        "",
        "| ranks | tensors | micro-batches | room | events | seconds | us an event | looks an event | memory, MB | "
        "accounts in the memory plan, MB |",
        "| --- " * 10 + "|",
    ]
    for one in decided:
        cells = [one.ranks, f"{one.tensors:,}", one.micros, one.room, f"{one.events:,}", spread(one.seconds)]
        cells += [f"{one.microseconds():.2f}", f"{one.work / one.events:.1f}"]
        cells += [f"{one.nbytes / 1e6:.1f}", f"{one.planned / 1e6:.1f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def updates_table(updated: list[Updates]) -> list[str]:
    lines = [
        "",
        f"## What {os.cpu_count()} threads help: updates of as many parameters in tensors of one size",
        "",
        "AdamW, split24 and companded8, stochastic, core statistics, fp32 gradients. The best of three rounds each time.",
        "",
        "| tensors | of elements | ns a parameter, one thread | all threads | times as fast |",
        "| --- " * 5 + "|",
    ]
    for one in updated:
        each = [1e9 * statistics.median(values) / one.tensors / one.elements for values in one.seconds.values()]
        cells = [f"{one.tensors:,}", f"{one.elements:,}", f"{each[0]:.2f}", f"{each[-1]:.2f}", spread(one.speedups())]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def report(
    grown: dict, decided: list[Decisions], updated: list[Updates], load: Load, options: argparse.Namespace
) -> str:
    lines = [
        "# Growth, measured",
        "",
        f"`tests/bench/growth.py --rounds {options.rounds}` on {machine()}; {datetime.date.today()}. Trainers that compute "
        "nothing, in one process, and a daemon of one thread, on the same cores; bf16 gradients and weights, plain SGD over fp32 "
        "weights. Medians of the rounds, quartiles in brackets. The plots: [growth.svg](growth.svg).",
        load.told(),
        "",
    ]
    for axis in axes(options.quick):
        lines += steps_table(axis, grown)
    return "\n".join(lines + decisions_table(decided) + updates_table(updated)) + "\n"


def plot(grown: dict, decided: list[Decisions], file: Path):
    """Log-log, with a line in grey that grows as the axis does."""
    from matplotlib import pyplot

    pyplot.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "growth", "font.size": 9}
    figure, panels = pyplot.subplots(2, 2, figsize=(9, 7), layout="constrained")
    for axis, panel in zip(axes(quick=False), panels.flat):
        for transport, (title, _name) in TRANSPORTS.items():
            times = [statistics.median(grown[axis.name, transport, size].case.seconds) for size in axis.sizes]
            panel.plot(axis.sizes, times, "o-", label=title)
        panel.plot(axis.sizes, [times[-1] * size / axis.sizes[-1] for size in axis.sizes], ":", color="grey")
        panel.set(title=f"{axis.fixed}", xlabel=axis.name, ylabel="seconds a step")
    deciding = sorted((one.events, statistics.median(one.seconds)) for one in decided)
    panels.flat[3].plot(*zip(*deciding), "o")
    panels.flat[3].plot(*zip(*[(n, n / deciding[-1][0] * deciding[-1][1]) for n, _s in deciding]), ":", color="grey")
    panels.flat[3].set(title="the step machine alone", xlabel="events", ylabel="seconds")
    for panel in panels.flat:
        panel.set(xscale="log", yscale="log")
        panel.grid(alpha=0.3)
    panels.flat[0].legend()
    figure.savefig(file, metadata={"Date": None, "Creator": None})


def rows(grown: dict, decided: list[Decisions], updated: list[Updates], rounds: int) -> list[dict]:
    made = []
    for (axis, transport, size), steps in grown.items():
        name = f"{TRANSPORTS[transport][0]}: step of {size:,} {axis}"
        values = steps.case.seconds
        made.append({"name": name, "value": 1000 * statistics.median(values), "unit": "ms", "noise": noise(values)})
    for one in decided:
        name = f"deciding: {one.ranks} ranks, {one.tensors:,} tensors, {one.micros} micro-batches, room {one.room}"
        made.append({"name": name, "value": one.microseconds(), "unit": "us", "noise": noise(one.seconds)})
    for one in updated:
        name = f"updates of {one.tensors:,} tensors of {one.elements:,}, {os.cpu_count()} threads"
        value = 1e9 * statistics.median(one.seconds[os.cpu_count()]) / one.tensors / one.elements
        made.append({"name": name, "value": value, "unit": "ns", "noise": noise(one.speedups())})
    return [row | {"bound": None, "ratio": None, "n": rounds} for row in made]


def main() -> int:
    options = trainer.recording_parser(__doc__, quick="one round of small sizes", rounds=3).parse_args()
    if options.quick:
        options.rounds = 1
    build = Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "release"))
    grown = {
        (axis.name, transport, size): Steps(axis.case(transport, size))
        for axis in axes(options.quick)
        for transport in TRANSPORTS
        for size in axis.sizes
    }
    decided = decisions(options.quick)
    load = measure_steps(grown, build, options.rounds)
    updated = updates(options.quick)
    for one in (decided + updated) * options.rounds:
        one.run(build)
    text = report(grown, decided, updated, load, options)
    print(text)
    if options.record and not options.quick:
        (HERE / "results" / "growth.md").write_text(text)
        plot(grown, decided, HERE / "results" / "growth.svg")
    if options.json:
        options.json.write_text(json.dumps(rows(grown, decided, updated, options.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
