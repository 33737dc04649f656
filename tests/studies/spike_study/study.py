#!/usr/bin/env python3
"""Do RMS_t, curvature and the gradient's norm tell of loss spikes, and what helps against these?

    study.py OUT [--quick] [--part I/N] [--stop-after SECONDS] [--report-only] [--record]

Real training through the daemon: a byte-level language model on the King James Bible, a perceptron, a convolutional
network and a contrastive image-caption model on Fashion-MNIST, of 30,000 to 86,000 parameters, 1,500 steps a run; beta2,
seed and learning rate are varied, and spikes are provoked as they come about in practice (cells.py). Each run's outcome is a file in
OUT/runs; what is there is not run again, so an interrupted study goes on where it was. Then OUT/spike_study.md and
pictures are written; --record puts them into tests/studies/results as well.

--quick: four short runs. --part: every Nth cell, from the Ith on, so that several can share OUT. --stop-after: no run begins after so many seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "bench")]  # trainer.py and collect.py are the benchmarks'

import ballast  # noqa: E402
import report  # noqa: E402
import torch  # noqa: E402
import trainer  # noqa: E402
from cells import ARMS, QUICK_STEPS, STEPS, WARM_UP, Cell, all_cells  # noqa: E402
from daemon import Daemon, until  # noqa: E402
from tasks import TASKS  # noqa: E402

PAGE = 300  # steps that the daemon is asked for at a time; it tells 500 at most
CLIPPED, SNAPSHOTS, SNAPSHOT_EVERY, MOST_REWINDS = 1.0, 4, 10, 20


def make_optimizer(cell: Cell, model: torch.nn.Module, server: str) -> ballast.Optimizer:
    spikes = {"warmup_steps": WARM_UP, "curvature": True}
    options: dict = {"lr": cell.lr(1), "betas": (0.9, cell.beta2), "weight_decay": 0.1}
    rule = ballast.StableAdamW if cell.arm == "stable_adamw" else ballast.AdamW
    if cell.arm == "paper":
        spikes |= {"rms_margin": 0, "rms_min_elements": 1}
    if cell.arm == "adagc":
        options["tensor_clip"] = "adagc"
    if cell.arm == "clipped":
        options["max_grad_norm"] = CLIPPED
    if cell.arm == "skip":
        spikes |= {"action": "skip"}
    if cell.arm == "rewind":
        spikes |= {"action": "rewind", "cooldown_steps": 20, "max_rewinds": MOST_REWINDS}
        options |= {"snapshots": SNAPSHOTS, "snapshot_every": SNAPSHOT_EVERY}
    run = cell.name.replace("_", "-").replace(".", "-")
    return rule(model.named_parameters(), server=server, run=run, spikes=ballast.Spikes(**spikes), **options)


def found(result: ballast.StepResult, drawn: int) -> list[dict]:
    """The step's events, by the batches drawn, which go on where the run's steps go back."""
    return [
        {"step": drawn, "kind": event.kind, "since": event.since_step and drawn - (result.step - event.since_step)}
        for event in result.spikes
    ]


def train(cell: Cell, daemon: Daemon, steps: int) -> dict:
    task = TASKS[cell.task]
    model, random = task.model(cell.seed), torch.Generator().manual_seed(cell.seed)
    made: dict = {"cell": vars(cell), "losses": [], "events": [], "rewinds": 0, "skipped": 0, "measured": []}
    with make_optimizer(cell, model, daemon.server) as optimizer:
        # Batches go on where they are after a rewind: what was bad is not met twice.
        for drawn in range(1, steps + 1):
            loss = model.loss(task.draw(random, task.size, cell.source(drawn)))
            made["losses"].append(loss.item())
            optimizer.param_groups[0]["lr"] = cell.lr(drawn)
            try:
                loss.backward()
                optimizer.step(loss=loss)
                optimizer.zero_grad()
            except ballast.RunRewound:
                made["rewinds"] += 1
                made["events"].append({"step": drawn, "kind": "loss", "since": drawn})
                continue
            except ballast.Rejected as error:  # the run stopped itself, and says why
                return made | {"stopped": str(error), "held_out": math.inf, "run": optimizer.run}
            made["events"] += found(optimizer.last_result, drawn)
            made["skipped"] += optimizer.last_result.skipped
            if cell.arm == ARMS[0] and drawn % PAGE == 0:
                made["measured"] += measured(daemon, optimizer.run, drawn)
        with torch.no_grad():
            held_out = model.loss(task.held_out()).item()
        return made | {"held_out": held_out, "run": optimizer.run}


def measured(daemon: Daemon, run: str, last: int) -> list[dict]:
    """What detectors.py reads of the PAGE steps up to the last one."""

    def page() -> list[dict]:
        status, text = daemon.get(f"/api/v1/runs/{run}/history?after={last - PAGE}&most={PAGE}")
        assert status == 200, text
        steps = json.loads(text)["steps"]
        return steps if len(steps) == PAGE else []

    read = ("layer_rms", "curvature_ratio", "grad_norm", "loss")
    return [{name: step.get(name) for name in read} for step in until(f"{PAGE} steps in the history", page)]


def run_cells(out: Path, cells: list[Cell], steps: int, stop_after: float) -> None:
    began, folder = time.monotonic(), out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in cells if not (folder / f"{cell.name}.json").exists()]
    with trainer.own_daemon() as daemon:
        for number, cell in enumerate(missing):
            if time.monotonic() - began > stop_after:
                print(f"stopped: {len(missing) - number} of {len(cells)} runs are missing")
                return
            started = time.monotonic()
            made = train(cell, daemon, steps)
            made |= {"seconds": time.monotonic() - started}
            daemon.ctl("delete", made.pop("run"), "--force")
            partial = folder / f"{cell.name}.partial"
            partial.write_text(json.dumps(made))
            partial.rename(folder / f"{cell.name}.json")
            print(
                f"{number + 1} of {len(missing)}: {cell.name}: {made['held_out']:.3f}, {made['seconds']:.0f} s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--stop-after", type=float, default=math.inf)
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)  # of spikes, which are what this is about
    torch.set_num_threads(1)
    cells, steps = all_cells(options.quick), QUICK_STEPS if options.quick else STEPS
    if not options.report_only:
        part, parts = map(int, options.part.split("/"))
        run_cells(options.out, cells[part - 1 :: parts], steps, options.stop_after)
    report.write(options.out, cells, steps, HERE.parent / "results" if options.record else None)


if __name__ == "__main__":
    main()
