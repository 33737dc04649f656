"""The study's table."""

from __future__ import annotations

import datetime
import json
import statistics
from pathlib import Path
from typing import Any

import arms
from collect import machine
from turns import Load

MIB = 1 << 20
HEAD = [
    "optimizer",
    "held-out loss",
    "less torch's",
    "step, to torch's",
    "trainer's peak, MiB",
    "daemon's peak, MiB",
    "planned",
    "of it gradients",
    "daemon's peak, bytes a parameter",
]


def spread(values: list[float], digits: int, sign: str = "") -> str:
    """The mean, and the standard deviation where there are several."""
    told = f"{statistics.fmean(values):{sign}.{digits}f}"
    return told if len(values) < 2 else f"{told} ± {statistics.stdev(values):.{digits}f}"


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """Of the steps of the same turn. The first allocates and, through Ballast, uploads: it does not count."""
    return [mine / other for mine, other in zip(ours[1:], theirs[1:], strict=True)]


def daemon_cells(made: list[dict[str, Any]]) -> list[str]:
    if "planned" not in made[0]:
        return ["-"] * 4
    taken = max(one["daemon_peak"] - one["daemon_idle"] for one in made)
    planned = made[0]["planned"]
    all_kinds, gradients = sum(planned.values()) / MIB, planned["gradients"] / MIB
    return [f"{taken / MIB:.0f}", f"{all_kinds:.0f}", f"{gradients:.0f}", f"{taken / made[0]['parameters']:.2f}"]


def row(name: str, seeds: list[dict[str, Any]]) -> list[str]:
    made, theirs = [seed["arms"][name] for seed in seeds], [seed["arms"][arms.REFERENCE] for seed in seeds]
    absent = next((one["absent"] for one in made if "absent" in one), "")
    if absent:
        return [name, f"does not run here: {absent}", *[""] * (len(HEAD) - 2)]
    less = [one["held_out"] - other["held_out"] for one, other in zip(made, theirs)]
    slower = [r for one, other in zip(made, theirs) for r in ratios(one["seconds"], other["seconds"])]
    peak = max(one["peak"] for one in made) / MIB
    loss = spread([one["held_out"] for one in made], 4)
    return [name, loss, spread(less, 6, "+"), f"{statistics.median(slower):.2f}", f"{peak:.0f}", *daemon_cells(made)]


def text(seeds: list[dict[str, Any]]) -> str:
    first = seeds[0]
    reference = first["arms"][arms.REFERENCE]
    load = Load(shares=[share for seed in seeds for share in seed["others"]])
    each = statistics.median(reference["seconds"][1:])
    before = statistics.fmean(seed["before"] for seed in seeds)
    lines = [
        "# Fine-tuning a real model: loss, memory and time",
        "",
        f"`tests/studies/minilm_study/study.py` on {machine()}; {datetime.date.today()}. all-MiniLM-L6-v2, "
        f"{reference['parameters']:,} parameters in fp32, {first['steps']} steps, {len(seeds)} seeds of the batches, "
        f"which all optimizers share. Loss: cross-entropy of finding the verse that follows, {before:.4f} before. "
        f"± is the standard deviation over seeds. Steps are made in turns, torch's takes {1000 * each:.0f} ms; ratios "
        f"are of the same turn, and their median is shown. Peaks are of resident memory, the largest over seeds; the "
        f"daemon's is what it takes beside {reference_idle(first)} MiB when idle. {load.told()}",
        "",
        f"| {' | '.join(HEAD)} |",
        "| --- " * len(HEAD) + "|",
        *(f"| {' | '.join(row(name, seeds))} |" for name in first["arms"]),
    ]
    return "\n".join(lines) + "\n"


def reference_idle(seed: dict[str, Any]) -> str:
    idle = [one["daemon_idle"] for one in seed["arms"].values() if "daemon_idle" in one]
    return f"{max(idle, default=0) / MIB:.0f}"


def write(out: Path, results: Path | None) -> None:
    seeds = [json.loads(file.read_text()) for file in sorted(out.glob("seed-*.json"))]
    if not seeds:
        raise SystemExit(f"study.py: there is no seed in {out}")
    told = text(seeds)
    for folder in (out, results):
        if folder is not None:
            (folder / "minilm_study.md").write_text(told)
    print(told)
