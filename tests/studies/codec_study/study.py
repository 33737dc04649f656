#!/usr/bin/env python3
"""What do compressed moments and weights cost? Every format of the daemon, on made signals and in real training.

    study.py OUT [--quick] [--jobs N] [--seeds N] [--text-steps N] [--image-steps N] [--size NAME]
                 [--no-training] [--stop-after SECONDS] [--report-only] [--record]

Everything goes through ballast.numerics.step, so the bits are the daemon's. A result is a file in OUT/cells; what is
there is not run again, so an interrupted study goes on where it was. Then OUT/codec_study.md and pictures are written;
--record puts them into tests/studies/results as well. Seeds are run one after the other, all formats of each: with
--stop-after, no run starts after so many seconds, and the table says how many seeds it has.

--quick: short signals, one seed, 60 steps (under 3 minutes). --size, of the transformer: tiny (46,000 parameters), small
(141,000) or example (the quick start's own, 870,000).
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

os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "bench")]  # trainer.py is the benchmarks'

import report  # noqa: E402
import signals  # noqa: E402
from collect import study_command  # noqa: E402

# (state format, rounding): what is studied as moments.
STATES = [
    ("fp32", "nearest"),
    ("companded8", "stochastic"),
    ("companded8", "nearest"),
    ("flash8", "nearest"),
    ("dynamic8", "nearest"),
    ("bf16", "stochastic"),
    ("bf16", "nearest"),
]
BETAS = (0.95, 0.99, 0.999, 0.9999)
KINDS = ("from zero", "halved", "halved from 1")
OUTLIERS = (1, 200, 2000)
SCALES = (1.0, 1e-6, 1e-8)
DEVIATIONS = (1.0, 0.3, 0.1, 0.03, 0.01)
SIZES = {"tiny": (32, 2), "small": (64, 2), "example": (128, 4)}  # width and layers of the transformer

# (master, state, rounding, factor on the learning rate): what is trained. The first is what the others are held against.
RECIPES = [
    ("fp32", "fp32", "nearest", 1.0),
    ("split24", "companded8", "stochastic", 1.0),
    ("fp32", "companded8", "stochastic", 1.0),
    ("fp32", "companded8", "nearest", 1.0),
    ("fp32", "flash8", "nearest", 1.0),
    ("fp32", "dynamic8", "nearest", 1.0),
    ("fp32", "bf16", "stochastic", 1.0),
    ("fp32", "bf16", "nearest", 1.0),
    ("split24", "fp32", "stochastic", 1.0),
    ("split24", "fp32", "nearest", 1.0),
    ("flash24", "fp32", "nearest", 1.0),
    ("bf16", "fp32", "stochastic", 1.0),
    ("bf16", "fp32", "nearest", 1.0),
    ("mcf8", "fp32", "stochastic", 1.0),
    ("mcf8", "fp32", "nearest", 1.0),
    ("mcf8", "companded8", "stochastic", 1.0),
    ("mcf", "mcf", "nearest", 1.0),  # Collage's plus form
    ("flash24", "flash8", "nearest", 1.0),
    ("fp32", "fp32", "nearest", 1.03),
]


@dataclass(frozen=True)
class Cell:
    """One function with its arguments; the file of its result is named by them."""

    function: str
    arguments: dict

    def path(self, out: Path) -> Path:
        told = "-".join(str(value) for value in self.arguments.values())
        return out / "cells" / (re.sub(r"[^\w.-]+", "_", f"{self.function}-{told}") + ".json")


def signal_cells(quick: bool) -> list[Cell]:
    steps = 1000 if quick else 3000
    cells = []
    for state, rounding in STATES:
        name = {"state": state, "rounding": rounding}
        for kind in KINDS:
            cells += [
                Cell("drift", name | {"kind": kind, "beta2": beta2, "steps": steps, "seed": 1}) for beta2 in BETAS
            ]
        cells += [Cell("outlier", name | {"at": at}) for at in OUTLIERS]
        cells += [Cell("scaled", name | {"scale": scale, "steps": 500, "seed": 1}) for scale in SCALES]
    return cells + [Cell("narrow_weights", {"deviation": deviation}) for deviation in DEVIATIONS]


def training_cells(options: argparse.Namespace) -> list[Cell]:
    width, layers = SIZES["tiny" if options.quick else options.size]
    cells = []
    for seed in range(1, options.seeds + 1):
        for task, steps in (("text", options.text_steps), ("image", options.image_steps)):
            for master, state, rounding, factor in RECIPES:
                recipe = {"master": master, "state": state, "rounding": rounding, "lr_factor": factor}
                arguments = {"task": task, "recipe": recipe, "seed": seed, "steps": steps}
                cells.append(Cell("train", arguments | {"width": width, "layers": layers}))
    return cells


def run(job: tuple[Cell, Path]) -> str:
    cell, out = job
    started = time.perf_counter()
    if cell.function == "train":
        from training import train  # torch: seconds to import, and not needed by the rest

        result = train(**cell.arguments)
    else:
        result = getattr(signals, cell.function)(**cell.arguments)
    path, seconds = cell.path(out), time.perf_counter() - started
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(cell) | {"seconds": round(seconds, 2), "result": result}))
    partial.rename(path)
    return f"{path.stem}: {seconds:.1f} s"


def run_missing(cells: list[Cell], out: Path, jobs: int, stop_after: float | None) -> None:
    (out / "cells").mkdir(parents=True, exist_ok=True)
    missing = [(cell, out) for cell in cells if not cell.path(out).exists()]
    print(f"{len(cells)} cells, {len(cells) - len(missing)} of them known", flush=True)
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for number, told in enumerate(pool.imap(run, missing), 1):
            print(f"{number}/{len(missing)}  {told}", flush=True)
            if stop_after is not None and time.monotonic() - started > stop_after:
                print("out of time", flush=True)
                pool.terminate()
                break


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--text-steps", type=int, default=600)
    parser.add_argument("--image-steps", type=int, default=1000)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS")
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.text_steps, options.image_steps = 1, 60, 60
    return options


def main() -> None:
    options = parse_options()
    cells = signal_cells(options.quick) + ([] if options.no_training else training_cells(options))
    if not options.report_only:
        run_missing(cells, options.out, options.jobs, options.stop_after)
    known = [json.loads(cell.path(options.out).read_text()) for cell in cells if cell.path(options.out).exists()]
    command = study_command("codec_study/study.py", options.out)
    report.write(known, options.out, command)
    if options.record:
        report.write(known, HERE.parent / "results", command, pictures="codec_study/")


if __name__ == "__main__":
    main()
