#!/usr/bin/env python3
"""What a whole step costs without a model: client, wire and daemon, against the same bytes pushed and pulled alone.

    steps.py [--quick] [--json FILE] [--record] [--rounds N] [--quiet-wait SECONDS]

Trainers that compute nothing push gradients of plain SGD to a daemon of one thread and get the weights back: by transport, by
pair of formats, by ranks, by tensors, by commit mode, by averages of the weights. All cases take turns, beside transports_bench's push and pull of as many
bytes on the same transport. The time the daemon's device was busy with updates is told by its metrics and taken off, but for
the tables. --record writes results/steps.md. Exit code 1: a limit that was measured undisturbed is not kept.
"""

import argparse
import datetime
import json
import os
import re
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import trainer
from collect import machine
from comparison import noise
from turns import Answering, Load, children, process_seconds, quartiles

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT = 1.15  # of the whole step without its updates, to push and then pull
TRANSPORTS = {
    "grpc": ("gRPC over TCP", "tcp"),
    "shm": ("shared memory", "shm"),
}  # the step's name: ours, transports_bench's
LARGE, MEDIUM, SMALL = 25_000_000, 10_000_000, 2_500_000  # parameters
RANKS = (1, 2, 4, 8, 64)
PAIRS = [
    ("fp32", "fp32"),
    ("bf16", "bf16"),
    ("bf16", "fp8-e4m3"),
    ("bf16", "int8-row"),
    ("fp8-e5m2", "bf16"),
    ("fp8-e5m2", "fp8-e4m3"),
    ("fp8-e5m2", "int8-row"),
]
UPDATE = re.compile(r'^ballast_step_phase_duration_seconds_sum\{[^}]*phase="update"[^}]*\} (\S+)$', re.MULTILINE)


@dataclass
class Case:
    """One kind of step, or one transfer; seconds of one, a value a round."""

    transport: str
    parameters: int
    ranks: int = 1
    tensors: int = 50
    gradient: str = "fp32"
    serving: str = "fp32"
    commit: str = "release"
    averages: int = 0
    steps: int = 5
    seconds: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # seconds of processors, trainers and daemon
    loads: list[float] = field(default_factory=list)  # seconds of an upload of all weights in fp32
    pulls: list[float] = field(default_factory=list)  # and of reading them

    def line(self) -> str:
        shape = f"{self.ranks} {self.tensors} {self.parameters}"
        return f"{self.transport} {shape} {self.gradient} {self.serving} {self.commit} {self.averages} {self.steps}"

    def run(self, steps: Answering, daemon):
        before, cpu_before = update_seconds(daemon), process_seconds(daemon.process.pid)
        seconds, own_cpu, load, pull = map(float, steps.ask(self.line()).split())
        self.seconds.append(seconds / self.steps)
        self.loads.append(load)
        self.pulls.append(pull)
        # The daemon's count includes the first step, which is not timed.
        self.updates.append((update_seconds(daemon) - before) / (self.steps + 1))
        daemons_cpu = (process_seconds(daemon.process.pid) - cpu_before) / (self.steps + 1)
        self.cpu.append(own_cpu / self.steps + daemons_cpu)

    def cpu_per_gigabyte(self) -> str:
        """Of gradients and weights together, as they travel."""
        width = {"fp32": 4, "bf16": 2}
        nbytes = self.parameters * self.ranks * (width.get(self.gradient, 1) + width.get(self.serving, 1))
        return f"{statistics.median(self.cpu) / nbytes * 1e9:.3g}"

    def ms(self) -> str:
        return spread([1000 * s for s in self.seconds])


def update_seconds(daemon) -> float:
    """The sum over all runs: a run's series stay for minutes after it."""
    return sum(map(float, UPDATE.findall(daemon.get("/metrics")[1])))


def spread(values: list[float]) -> str:
    low, middle, high = quartiles(values)
    return f"{middle:.4g} ({low:.4g} to {high:.4g})"


@dataclass
class Suite:
    overhead: dict[str, Case]
    commit: dict[str, Case]
    pairs: dict[tuple[str, str, str], Case]
    ranks: dict[tuple[str, int], Case]
    tensors: dict[tuple[str, int], Case]
    averages: dict[tuple[str, int], Case]
    floors: dict[int, Case]  # by ranks: what shared memory cannot do without
    transfers: dict[tuple[str, str], list[float]]  # transport, mode

    def cases(self) -> list[Case]:
        return [
            case
            for group in (self.overhead, self.commit, self.pairs, self.ranks, self.tensors, self.averages, self.floors)
            for case in group.values()
        ]


def make_suite(scale: int) -> Suite:
    return Suite(
        {transport: Case(transport, LARGE // scale) for transport in TRANSPORTS},
        {transport: Case(transport, LARGE // scale, commit="staged") for transport in TRANSPORTS},
        {
            (transport, *pair): Case(transport, LARGE // scale, gradient=pair[0], serving=pair[1])
            for transport in TRANSPORTS
            for pair in PAIRS[1:]
        },
        {
            (transport, ranks): Case(transport, SMALL // scale, ranks=ranks)
            for transport in TRANSPORTS
            for ranks in RANKS
        },
        {
            (transport, count): Case(transport, MEDIUM // scale, tensors=count)
            for transport in TRANSPORTS
            for count in (10, 1000, 20000)
        },
        {
            (transport, count): Case(transport, LARGE // scale, averages=count)
            for transport in TRANSPORTS
            for count in (1, 2)
        },
        {ranks: Case("memory", SMALL // scale, ranks=ranks) for ranks in RANKS},
        {},
    )


def measure(suite: Suite, build: Path, options: argparse.Namespace) -> Load:
    load = Load()
    with tempfile.TemporaryDirectory(prefix="ballast-steps-") as folder:
        with trainer.own_daemon("--shm_socket", f"{folder}/daemon.sock") as daemon:
            steps = Answering([build / "tests" / "bench" / "steps_bench", daemon.server])
            transports = Answering([build / "tests" / "bench" / "transports_bench", folder])
            try:
                for number in range(options.rounds):
                    one_round(suite, number, (steps, transports, daemon), load, options)
            finally:
                steps.close()
                transports.close()
    return load


def one_round(suite: Suite, number: int, programs, load: Load, options: argparse.Namespace):
    steps, transports, daemon = programs
    transports.ask("memcpy push 1024 1")  # by its answer its peers are there
    load.wait_until_quiet(options.quiet_wait / options.rounds)
    load.begin_round(
        [os.getpid(), steps.process.pid, transports.process.pid, daemon.process.pid, *children(transports.process.pid)]
    )
    nbytes = next(iter(suite.overhead.values())).parameters * 4
    for transport, (_title, name) in TRANSPORTS.items():
        for mode in ("push", "pull", "both"):
            taken = float(transports.ask(f"{name} {mode} {nbytes} 5").split()[0]) / 5
            suite.transfers.setdefault((transport, mode), []).append(taken)
    for case in suite.cases() if number % 2 == 0 else reversed(suite.cases()):
        case.run(steps, daemon)
    load.end_round()
    print(f"round {number + 1} of {options.rounds}: others used {load.shares[-1]:.2f} cores", file=sys.stderr)


def overheads(suite: Suite, transport: str) -> list[float]:
    """By round, the time of a step without its updates, as a multiple of a push and then a pull."""
    case, push, pull = suite.overhead[transport], suite.transfers[transport, "push"], suite.transfers[transport, "pull"]
    return [(s - u) / (a + b) for s, u, a, b in zip(case.seconds, case.updates, push, pull)]


def relative(case: Case, to: Case) -> str:
    return f"{statistics.median(a / b for a, b in zip(case.seconds, to.seconds)):.2f}"


def report(suite: Suite, load: Load, options: argparse.Namespace) -> str:
    lines = [
        "# Whole steps, measured",
        "",
        f"`tests/bench/steps.py --rounds {options.rounds}` on {machine()}; {datetime.date.today()}. Trainers that "
        "compute nothing, in one process, and a daemon of one thread, on the same cores; plain SGD over fp32 weights. "
        "Medians over rounds in which every case had its turn, quartiles in brackets; ratios within a round.",
        load.told(),
        "",
    ]
    return (
        "\n".join(lines + overhead_table(suite) + pairs_table(suite) + averages_table(suite) + growth_tables(suite))
        + "\n"
    )


def overhead_table(suite: Suite) -> list[str]:
    parameters = next(iter(suite.overhead.values())).parameters
    lines = [
        f"## {parameters / 1e6:.3g} M parameters in fp32, {parameters * 4e-6:.0f} MB each way, 50 tensors, 1 rank",
        "",
        f"The limit is {LIMIT} for the step without its updates, to the same bytes pushed and then pulled.",
        "",
        "| transport | step, ms | updates in it, ms | push, ms | pull, ms | both at once, ms | step without updates / push "
        "and pull | whole step / push and pull | staged step, ms |",
        "| --- " * 9 + "|",
    ]
    for transport, (title, _name) in TRANSPORTS.items():
        case, moved = suite.overhead[transport], [suite.transfers[transport, mode] for mode in ("push", "pull", "both")]
        whole = [s / (a + b) for s, a, b in zip(case.seconds, moved[0], moved[1])]
        cells = [title, case.ms(), spread([1000 * u for u in case.updates])]
        cells += [spread([1000 * t for t in times]) for times in moved]
        cells += [spread(overheads(suite, transport)), spread(whole), suite.commit[transport].ms()]
        lines.append("| " + " | ".join(cells) + " |")
    return lines + [""]


def pairs_table(suite: Suite) -> list[str]:
    lines = [
        "## The same by what gradients and weights travel in",
        "",
        "| transport | gradients | weights | bytes a parameter | step, ms | of fp32, fp32 |",
        "| --- " * 6 + "|",
    ]
    width = {"fp32": 4, "bf16": 2}
    for transport, (title, _name) in TRANSPORTS.items():
        for pair in PAIRS:
            case = suite.overhead[transport] if pair == PAIRS[0] else suite.pairs[transport, *pair]
            nbytes = sum(width.get(name, 1) for name in pair)
            share = relative(case, suite.overhead[transport])
            lines.append(f"| {title} | {pair[0]} | {pair[1]} | {nbytes} | {case.ms()} | {share} |")
    return lines + [""]


def averages_table(suite: Suite) -> list[str]:
    """The update is the cheapest there is: of a step of another rule averages are a smaller part."""
    lines = [
        "## The same with averages of the weights",
        "",
        "| transport | averages | step, ms | of none | more of a step for each, ms |",
        "| --- " * 5 + "|",
    ]
    for (transport, count), case in suite.averages.items():
        none = suite.overhead[transport]
        more = spread([1000 * (a - b) / count for a, b in zip(case.seconds, none.seconds)])
        lines.append(f"| {TRANSPORTS[transport][0]} | {count} | {case.ms()} | {relative(case, none)} | {more} |")
    return lines + [""]


def growth_tables(suite: Suite) -> list[str]:
    small, medium = (next(iter(group.values())).parameters / 1e6 for group in (suite.ranks, suite.tensors))
    lines = [
        f"## As ranks grow: {small:.3g} M parameters of fp32 from each",
        "",
        "The last rows are what shared memory cannot do without: copies, checksums and sums by threads that do nothing else, "
        "one of them in the daemon's place (`step_floor.h`).",
        "",
        "| transport | ranks | step, ms | of one rank | a rank, of one rank | CPU seconds a gigabyte |",
        "| --- " * 6 + "|",
    ]
    floors = {("memory", ranks): case for ranks, case in suite.floors.items()}
    for (transport, ranks), case in (suite.ranks | floors).items():
        first = suite.floors[1] if transport == "memory" else suite.ranks[transport, 1]
        each = statistics.median(a / b / ranks for a, b in zip(case.seconds, first.seconds))
        title = "copies and sums alone" if transport == "memory" else TRANSPORTS[transport][0]
        cells = [title, str(ranks), case.ms(), relative(case, first), f"{each:.2f}"]
        lines.append("| " + " | ".join([*cells, case.cpu_per_gigabyte()]) + " |")
    lines += [
        "",
        f"## As tensors grow: {medium:.3g} M parameters of fp32 in all",
        "",
        "A load before the steps and a pull after them go over gRPC. To the right what a tensor more costs, in us.",
        "",
        "| transport | tensors | step, ms | of 10 tensors | load, s | pull, s | more of a step | of a load | of a pull |",
        "| --- " * 9 + "|",
    ]
    for (transport, count), case in suite.tensors.items():
        first = suite.tensors[transport, 10]
        taken = [f"{statistics.median(of):.3g}" for of in (case.loads, case.pulls)]
        more = [
            f"{1e6 * statistics.median(a - b for a, b in zip(many, few)) / max(1, count - 10):.3g}"
            for many, few in ((case.seconds, first.seconds), (case.loads, first.loads), (case.pulls, first.pulls))
        ]
        cells = [TRANSPORTS[transport][0], f"{count:,}", case.ms(), relative(case, first), *taken, *more]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def rows(suite: Suite, rounds: int) -> list[dict]:
    made = []
    for transport, (title, _name) in TRANSPORTS.items():
        case = suite.overhead[transport]
        step = statistics.median(s - u for s, u in zip(case.seconds, case.updates))
        bound = statistics.median(
            a + b for a, b in zip(suite.transfers[transport, "push"], suite.transfers[transport, "pull"])
        )
        name = f"{title}: step without updates, to push and then pull"
        made.append({"name": name, "value": 1000 * step, "unit": "ms", "bound": 1000 * bound})
        ratios = overheads(suite, transport)
        made[-1] |= {"ratio": statistics.median(ratios), "n": rounds, "noise": noise(ratios)}
    for (transport, count), case in suite.ranks.items():
        made.append(growth_row(f"{count} ranks, to one", case, suite.ranks[transport, 1]))
    for (transport, count), case in suite.tensors.items():
        made.append(growth_row(f"{count:,} tensors, to ten", case, suite.tensors[transport, 10]))
    for (transport, count), case in suite.averages.items():
        made.append(growth_row(f"{count} average{'s' * (count > 1)}, to none", case, suite.overhead[transport]))
    return [row for row in made if row]


def growth_row(what: str, case: Case, least: Case) -> dict:
    if case is least or not case.seconds:
        return {}
    ratios = [ours / first for ours, first in zip(case.seconds, least.seconds)]
    value, bound = (1000 * statistics.median(of.seconds) for of in (case, least))
    row = {"name": f"{TRANSPORTS[case.transport][0]}: step of {what}", "value": value, "unit": "ms", "bound": bound}
    return row | {"ratio": statistics.median(ratios), "n": len(ratios), "noise": noise(ratios)}


def main() -> int:
    parser = trainer.recording_parser(__doc__, quick="one round of a tenth of the parameters", rounds=7)
    parser.add_argument("--quiet-wait", type=float, default=60, help="seconds to wait for a quiet machine, in all")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.quiet_wait = 1, 0
    suite = make_suite(10 if options.quick else 1)
    load = measure(suite, Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "release")), options)
    text = report(suite, load, options)
    print(text)
    if options.record:
        (HERE / "results" / "steps.md").write_text(text)
    if options.json:
        options.json.write_text(json.dumps(rows(suite, options.rounds)))
    return int(
        load.quiet
        and not options.quick
        and any(statistics.median(overheads(suite, transport)) > LIMIT for transport in TRANSPORTS)
    )


if __name__ == "__main__":
    sys.exit(main())
