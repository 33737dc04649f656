#!/usr/bin/env python3
"""What do the layers of ballast.nn cost, and what do they save? Each beside what its paper holds it against.

    study.py OUT [--quick] [--jobs N] [--seeds N] [--steps N] [--task NAME]... [--arm WORDS]... [--report-only] [--record]

Trains two small transformers, on a text and on images, through a daemon of the process's own. A result is a file in
OUT/cells; what is there is not run again, so an interrupted study goes on where it was. Then OUT/layer_study.md and
pictures are written; --record puts them into tests/studies/results as well. --arm takes those whose names have the words.

--quick: one seed, 20 steps, two blocks (about two minutes).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("BALLAST_THREADS", "1")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "bench"), str(ROOT / "client" / "python" / "examples")]
BUILD = Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "dev"))
os.environ["PATH"] = f"{BUILD / 'server'}:{os.environ['PATH']}"

import report  # noqa: E402
from arms import ARMS  # noqa: E402
from collect import study_command  # noqa: E402
from tasks import TASKS  # noqa: E402


@dataclass(frozen=True)
class Cell:
    """One training; the file of its result is named by it."""

    task: str
    arm: str
    seed: int
    steps: int
    depth: int

    def path(self, out: Path) -> Path:
        told = "-".join(str(value) for value in asdict(self).values())
        return out / "cells" / (re.sub(r"[^\w.-]+", "_", told) + ".json")


def cells_of(options: argparse.Namespace) -> list[Cell]:
    return [
        Cell(task, name, seed, options.steps, options.depth)
        for seed in range(1, options.seeds + 1)
        for task in options.task or TASKS
        for name, arm in ARMS.items()
        if task in arm.tasks and all(words in name for words in options.arm)
    ]


def run(job: tuple[Cell, Path]) -> str:
    from training import train

    cell, out = job
    started = time.perf_counter()
    result = train(**asdict(cell))
    path, seconds = cell.path(out), time.perf_counter() - started
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"cell": asdict(cell), "seconds": round(seconds, 1), "result": result}))
    partial.rename(path)
    return f"{path.stem}: {seconds:.0f} s, held-out loss {result['loss']}"


def run_missing(cells: list[Cell], out: Path, jobs: int) -> None:
    (out / "cells").mkdir(parents=True, exist_ok=True)
    missing = [(cell, out) for cell in cells if not cell.path(out).exists()]
    print(f"{len(cells)} trainings, {len(cells) - len(missing)} of them known", flush=True)
    # A process for each: its daemon, and what torch keeps, end with it.
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        for number, told in enumerate(pool.imap_unordered(run, missing, chunksize=1), 1):
            print(f"{number}/{len(missing)}  {told}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--depth", type=int, default=4, help="blocks of a model")
    parser.add_argument("--task", action="append", choices=tuple(TASKS), default=[])
    parser.add_argument("--arm", action="append", default=[])
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.depth = 1, 20, 2
    return options


def main() -> None:
    options = parse_options()
    cells = cells_of(options)
    if not cells:
        sys.exit(f"study.py: no arm has {' and '.join(options.arm)} in its name")
    if not options.report_only:
        run_missing(cells, options.out, options.jobs)
    known: list[dict[str, Any]] = [
        json.loads(c.path(options.out).read_text()) for c in cells if c.path(options.out).exists()
    ]
    command = study_command("layer_study/study.py", options.out)
    for folder in [options.out, *([HERE.parent / "results"] if options.record else [])]:
        report.write(known, folder, command)


if __name__ == "__main__":
    main()
