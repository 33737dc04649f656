"""The study's tables and pictures."""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from cells import ARMS, BEFALLS, BETA2, CONDITIONS, STEPS, Cell  # noqa: E402
from collect import machine  # noqa: E402
from score import KINDS, loss_spikes, score, steps_with  # noqa: E402
from tasks import TASKS  # noqa: E402


def read(out: Path, cells: list[Cell]) -> list[dict]:
    files = [out / "runs" / f"{cell.name}.json" for cell in cells]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows), ""]


SCORED = ["loss spikes", "events", "precision", "recall", "chance", "lead, steps"]


def predictors_by(runs: list[dict], what: str, values, key: Callable[[dict], object]) -> list[str]:
    rows = []
    for value in values:
        chosen = [run for run in runs if key(run) == value]
        for kind in KINDS:
            rows.append([str(value), str(len(chosen)), kind, *score(chosen, kind).cells()])
    return table([what, "runs", "predictor", *SCORED], rows)


def twin(cell: dict) -> tuple:
    return tuple(value for name, value in cell.items() if name != "arm")


def arms(runs: list[dict]) -> list[str]:
    """Each arm beside plain AdamW in the same runs."""
    plain = {twin(run["cell"]): run for run in runs if run["cell"]["arm"] == "adamw"}
    rows = []
    for condition in CONDITIONS[1:]:
        for arm in ARMS[1:]:
            pairs = [
                (run, plain[twin(run["cell"])])
                for run in runs
                if run["cell"]["arm"] == arm and run["cell"]["condition"] == condition and twin(run["cell"]) in plain
            ]
            if pairs:
                rows.append([condition, arm, str(len(pairs)), *arm_cells(pairs)])
    head = ["condition", "arm", "runs", "held-out loss", "of AdamW", "better in", "loss spikes", "of AdamW", "acted"]
    return table(head, rows)


def arm_cells(pairs: list[tuple[dict, dict]]) -> list[str]:
    ours, plain = (statistics.median(pair[side]["held_out"] for pair in pairs) for side in (0, 1))
    better = sum(mine["held_out"] < theirs["held_out"] for mine, theirs in pairs)
    spikes = [sum(len(loss_spikes(pair[side])) for pair in pairs) for side in (0, 1)]
    acted = sum(run["rewinds"] + sum(s["outcome"] == "STEP_OUTCOME_SKIPPED" for s in run["steps"]) for run, _ in pairs)
    stopped = sum("stopped" in run for run, _ in pairs)
    told = f"{acted}" + (f", {stopped} stopped" if stopped else "")
    return [f"{ours:.3f}", f"{plain:.3f}", f"{better} of {len(pairs)}", str(spikes[0]), str(spikes[1]), told]


# --- pictures -------------------------------------------------------------------------------------------------------


def largest_rms(step: dict) -> float:
    values = [float(value) for value in step["layer_rms"]]
    return max((value for value in values if math.isfinite(value)), default=math.nan)


def draw_runs(runs: list[dict], file: Path) -> None:
    """One run of each task and condition: its loss, and the largest RMS_t."""
    figure, axes = plt.subplots(len(TASKS), len(CONDITIONS), figsize=(15, 8), sharex=True, squeeze=False)
    for row, task in enumerate(TASKS):
        for column, condition in enumerate(CONDITIONS):
            axis = axes[row][column]
            axis.set_title(f"{task}, {condition}", fontsize=9)
            chosen = [
                r
                for r in runs
                if (r["cell"]["task"], r["cell"]["condition"], r["cell"]["arm"]) == (task, condition, "adamw")
            ]
            if not chosen:
                continue
            run = max(chosen, key=lambda r: r["cell"]["beta2"])
            axis.plot(range(1, len(run["losses"]) + 1), run["losses"], lw=0.8, color="#1f77b4")
            for step in loss_spikes(run):
                axis.axvline(step, color="#d62728", lw=0.8)
            second = axis.twinx()
            second.plot(
                [int(s["step"]) for s in run["steps"]], [largest_rms(s) for s in run["steps"]], lw=0.6, color="#999"
            )
            second.axhline(2.3, color="#999", lw=0.5, ls=":")
            for step in steps_with(run, KINDS["rms"]):
                second.plot(step, 2.3, marker="v", color="#ff7f0e", ms=5)
            second.set_ylim(0, 8)
    figure.suptitle("loss (blue), loss spikes (red), largest RMS_t (grey) and its events (orange); largest beta2")
    figure.tight_layout()
    figure.savefig(file, dpi=80)
    plt.close(figure)


def draw_scores(runs: list[dict], file: Path) -> None:
    """Recall against chance, by predictor and beta2."""
    figure, axis = plt.subplots(figsize=(6, 5))
    most = 0.1
    for kind, marker, color in zip(KINDS, "osD", ("#1f77b4", "#d62728", "#777")):
        points = []
        for beta2 in BETA2:
            made = score([run for run in runs if run["cell"]["beta2"] == beta2], kind)
            if made.spikes and made.steps:
                points.append((made.covered / made.steps, made.hit / made.spikes))
                axis.annotate(
                    f"{beta2:g}", points[-1], fontsize=8, xytext=(4, 3), textcoords="offset points", color=color
                )
                most = max(most, *points[-1])
        if points:
            axis.plot(*zip(*points), marker, color=color, label=kind)
    axis.plot([0, 1], [0, 1], ":", color="#999", lw=1, label="knows nothing")
    axis.legend(loc="lower right", title="by beta2", frameon=False)
    axis.set_xlabel("chance: steps that lie 1 to 8 after an event")
    axis.set_ylabel("recall: loss spikes with an event 1 to 8 steps before")
    axis.set_xlim(0, 1.1 * most)
    axis.set_ylim(-0.01, 1.1 * most)
    figure.tight_layout()
    figure.savefig(file, dpi=80)
    plt.close(figure)


def write(out: Path, cells: list[Cell], results: Path | None) -> None:
    runs = read(out, cells)
    if not runs:
        raise SystemExit(f"study.py: there is no run in {out / 'runs'}")
    plain = [run for run in runs if run["cell"]["arm"] == "adamw"]
    lines = [
        "# Loss spikes: what tells of them, and what helps",
        "",
        f"`tests/studies/spike_study/study.py` on {machine()}; {datetime.date.today()}. {len(runs)} of {len(cells)} runs of "
        f"{STEPS} steps, warm-up 100; conditions begin after step {BEFALLS}, but for the tenfold learning rate of `high lr`. "
        "Loss spikes are losses above the mean of the last 128 by 3.2 standard deviations; an event tells of a spike that "
        "follows within 8 steps. Precision: events that one followed; recall: spikes that one came before; chance: the "
        "recall of events that know nothing. The lead is a median.",
        "",
        "## Predictors, of AdamW, by beta2",
        "",
        *predictors_by(plain, "beta2", BETA2, lambda run: run["cell"]["beta2"]),
        "## By condition",
        "",
        *predictors_by(plain, "condition", CONDITIONS, lambda run: run["cell"]["condition"]),
        "## By task",
        "",
        *predictors_by(plain, "task", TASKS, lambda run: run["cell"]["task"]),
        "## What helps: beside AdamW in the same runs",
        "",
        *arms(runs),
        "![runs](spike_study_runs.png)",
        "",
        "![scores](spike_study_scores.png)",
    ]
    for folder in (out, results):
        if folder is not None:
            (folder / "spike_study.md").write_text("\n".join(lines) + "\n")
            draw_runs(plain, folder / "spike_study_runs.png")
            draw_scores(plain, folder / "spike_study_scores.png")
    print((out / "spike_study.md").read_text())
