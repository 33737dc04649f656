#!/usr/bin/env python3
"""libFuzzer on every target of tests/fuzz, and a table of how far each came.

    tests/fuzz.py [--executions N] [--seconds N] [--seed N] [--only TARGET] [--jobs N] [--record]

Each target begins with its files in tests/fuzz/corpus, which stay as they are, and what earlier runs found, in
build/fuzz/found, to which it adds what is new. It ends after its share of the executions, or after so many seconds, or at the
first input that fails, which is kept in build/fuzz/failed. Ctrl-C ends all at once, and the table has how far they came.
--record writes the table to tests/bench/results/fuzz.md, where all targets were run, and adds the run to those that are
listed there.

Wants the targets built with clang: deploy/packages.sh fuzz && deploy/setup.sh build fuzz fuzzers. Exits with 1 if an input
failed. The last line says how it went.
"""

import argparse
import datetime
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "bench"))

from collect import machine  # noqa: E402

PROGRAMS = ROOT / "build" / "fuzz" / "tests" / "fuzz"
RESULTS = ROOT / "tests" / "bench" / "results" / "fuzz.md"


@dataclass(frozen=True)
class Target:
    """`share`: of the executions, to those of the others. The slow ones have less, but minutes in a run of 1e8."""

    name: str
    most_bytes: int
    share: int


# Those that take longest first.
TARGETS = (
    Target("edge", 1024, 5000),
    Target("shm", 1024, 4720),
    Target("changes", 512, 4720),
    Target("checkpoint", 16384, 200),
    Target("journal", 400, 4),
    Target("session", 200, 46),
    Target("kernels", 8192, 30),
)
# What libFuzzer leaves an input under that is too slow for its taste: no failure.
SLOW = "slow-unit-"
INTERRUPTED = 72  # libFuzzer's exit code, by Ctrl-C


@dataclass
class Outcome:
    target: Target
    executions: int
    seconds: float
    edges: int
    features: int
    inputs: int  # in the corpus in the end
    failed: int  # inputs
    interrupted: bool


class Unusable(Exception):
    """A target that cannot be run: why."""


def command(target: Target, options: argparse.Namespace, folder: Path) -> list[str]:
    program = options.programs / f"{target.name}_fuzz"
    if not program.exists():
        raise Unusable(f"{program} is not there: deploy/packages.sh fuzz && deploy/setup.sh build fuzz fuzzers")
    found, corpus = options.found / target.name, ROOT / "tests" / "fuzz" / "corpus" / program.name
    found.mkdir(parents=True, exist_ok=True)
    words = [program, found, *([corpus] if corpus.exists() else [])]
    words += [f"-artifact_prefix={folder}/", f"-max_len={target.most_bytes}", f"-seed={options.seed}"]
    runs = options.executions * target.share // sum(other.share for other in TARGETS)
    words += ["-print_final_stats=1", f"-runs={max(1, runs)}"]
    if options.seconds:
        words.append(f"-max_total_time={options.seconds}")
    return [str(word) for word in words]


def last_number(pattern: str, text: str) -> int:
    """0 where there is none: libFuzzer says nothing of the corpus where the first input fails."""
    numbers = re.findall(pattern, text)
    return int(numbers[-1]) if numbers else 0


def run(target: Target, options: argparse.Namespace, stopped: threading.Event) -> Outcome | None:
    """None: `stopped` before it began."""
    if stopped.is_set():
        return None
    folder = options.failed / target.name
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    done = subprocess.run(command(target, options, folder), capture_output=True, text=True, errors="replace")
    seconds = time.monotonic() - began
    if done.returncode == INTERRUPTED:
        stopped.set()
    said = done.stderr
    (folder / "log").write_text(said)
    failed = [path for path in re.findall(r"Test unit written to (\S+)", said) if SLOW not in path]
    executions = last_number(r"stat::number_of_executed_units:\s*(\d+)", said)
    if (done.returncode not in (0, INTERRUPTED) and not failed) or executions == 0:
        raise Unusable(f"{target.name}_fuzz ended with {done.returncode}, and its output with:\n{said[-4000:]}")
    for path in failed:
        print(f"{target.name}: {path} fails; {folder}/log says how", flush=True)
    counts = [last_number(rf"\b{what}: (\d+)", said) for what in ("cov", "ft", "corp")]
    return Outcome(target, executions, seconds, *counts, len(failed), done.returncode == INTERRUPTED)


def table(outcomes: list[Outcome], options: argparse.Namespace) -> str:
    lines = [
        "# The fuzz targets, last run",
        "",
        f"`tests/fuzz.py {' '.join(options.told)}`, seed {options.seed}, on {machine()}, {options.jobs} at a time; "
        f"{datetime.date.today()}. Edges and features are libFuzzer's counts of what was reached, with clang's address and "
        "undefined-behaviour sanitizers.",
        "",
        "| target | executions | seconds | executions a second | inputs in the corpus | edges | features | failed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for o in outcomes:
        cells = [
            o.executions,
            round(o.seconds),
            round(o.executions / o.seconds),
            o.inputs,
            o.edges,
            o.features,
            o.failed,
        ]
        lines.append(" | ".join([f"| {o.target.name}", *(f"{cell:,}" for cell in cells)]) + " |")
    lines += ["", f"{sum(o.executions for o in outcomes):,} executions together, of {options.executions:,}."]
    if interrupted := [o.target.name for o in outcomes if o.interrupted]:
        lines[-1] += f" Interrupted before their share: {', '.join(interrupted)}."
    return "\n".join(lines) + "\n"


LISTED = "\n## All recorded runs\n"


def with_runs(table_text: str, listed: str, outcomes: list[Outcome], options: argparse.Namespace) -> str:
    """The page: a table, and all runs, of which an earlier page lists those before."""
    executions, failed = sum(o.executions for o in outcomes), sum(o.failed for o in outcomes)
    runs = [line for line in listed.splitlines() if line.startswith("| 20")]
    cells = [datetime.date.today(), options.only or "all", options.seed, f"{executions:,}", f"{failed:,}"]
    runs.append(f"| {' | '.join(map(str, cells))} |")
    total = sum(int(line.split("|")[4].replace(",", "")) for line in runs)
    head = ["", "| date | targets | seed | executions | failed |", "| --- | --- | --- | --- | --- |"]
    return table_text + LISTED + "\n".join([*head, *runs, "", f"{total:,} executions in all."]) + "\n"


def record(text: str, outcomes: list[Outcome], options: argparse.Namespace) -> None:
    """The table stays that of the last run of all targets."""
    before, _, listed = options.page.read_text().partition(LISTED) if options.page.exists() else ("", "", "")
    options.page.write_text(with_runs(before if options.only else text, listed, outcomes, options))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=100_000_000, help="of all targets together")
    parser.add_argument("--seconds", type=int, default=0, help="of each at most; 0: no limit")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 2**31))
    parser.add_argument("--only", choices=[target.name for target in TARGETS], help="this target")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--programs", type=Path, default=PROGRAMS, help="where the targets are")
    parser.add_argument("--found", type=Path, default=ROOT / "build" / "fuzz" / "found")
    parser.add_argument("--failed", type=Path, default=ROOT / "build" / "fuzz" / "failed")
    parser.add_argument("--page", type=Path, default=RESULTS, help="what --record writes")
    parser.add_argument("--list", action="store_true", help="the targets' names, and nothing else")
    options = parser.parse_args()
    if options.executions < 1 or options.seconds < 0 or options.jobs < 1:
        parser.error("--executions and --jobs want at least 1, --seconds at least 0")
    options.told = [word for word in sys.argv[1:] if word != "--record"]
    return options


def main() -> int:
    options = parse()
    if options.list:
        print(*(target.name for target in TARGETS), sep="\n")
        return 0
    chosen = [target for target in TARGETS if options.only in (None, target.name)]
    stopped = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: None)  # the targets get it, too
    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = [o for o in pool.map(lambda target: run(target, options, stopped), chosen) if o]
    except Unusable as error:
        print(error, file=sys.stderr)
        return 2
    text = table(outcomes, options)
    print(text)
    if options.record and len(outcomes) == len(chosen):
        record(text, outcomes, options)
    executions, failed = sum(o.executions for o in outcomes), sum(o.failed for o in outcomes)
    print(f"{executions:,} executions, {failed} inputs failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
