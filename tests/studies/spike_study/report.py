"""The study's tables and pictures."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import frontier  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402
from cells import ARMS, BEFALLS, BETA2, CONDITIONS, OF_THE_OPTIMIZER, SEEDS, WARM_UP, Cell  # noqa: E402
from collect import machine  # noqa: E402
from score import HEAD, PREDICTORS, events_of, loss_spikes, score  # noqa: E402
from tasks import TASKS, TUNED  # noqa: E402


def read(out: Path, cells: list[Cell]) -> list[dict]:
    files = [out / "runs" / f"{cell.name}.json" for cell in cells]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows), ""]


def watches(runs: list[dict]) -> list[tuple[str, list[dict], str]]:
    """(what is watched, the runs, the predictor): RMS_t as the paper has it and as here, in the same trainings."""
    chosen = {arm: [run for run in runs if run["cell"]["arm"] == arm] for arm in ARMS[:2]}
    told_twice = {twin(run["cell"]) for run in chosen["paper"]}
    beside = [run for run in chosen["adamw"] if twin(run["cell"]) in told_twice]
    return [
        ("RMS_t, the paper's rule, seed 1", chosen["paper"], "rms"),
        ("RMS_t, the same trainings", beside, "rms"),
        *((f"{name.replace('_', ' ')}, all", chosen["adamw"], name) for name in PREDICTORS),
    ]


def predictors_by(runs: list[dict], groups: dict[str, Callable[[dict], bool]]) -> list[str]:
    rows = []
    for value, belongs in groups.items():
        for name, watched, kind in watches([run for run in runs if belongs(run["cell"])]):
            if watched:
                rows.append([value, name, str(len(watched)), *score(watched, kind).cells()])
    return table(["runs of", "watched", "runs", *HEAD], rows)


def frontier_of(runs: list[dict]) -> list[str]:
    text = (
        f"Of each detector (tests/studies/spike_study/detectors.py) and its variants, at {frontier.THRESHOLDS} thresholds, "
        f"the one with the most recall at a precision of {frontier.TARGET:g} on the tasks for tuning, and the one with the "
        f"most precision at a recall of {frontier.TARGET:g}, where there is one; then how the same does on the tasks held "
        "out. With hindsight: chosen on those held out themselves, of all detectors."
    )
    return ["## What another detector could have", "", text, "", *table(frontier.HEAD, frontier.rows(runs))]


def twin(cell: dict) -> tuple:
    return tuple(value for name, value in cell.items() if name != "arm")


def arms(runs: list[dict]) -> list[str]:
    """Each arm beside plain AdamW in the same runs."""
    plain = {twin(run["cell"]): run for run in runs if run["cell"]["arm"] == "adamw"}
    rows = []
    for condition in CONDITIONS:
        for arm in ARMS[2:]:
            pairs = [
                (run, plain[twin(run["cell"])])
                for run in runs
                if run["cell"]["arm"] == arm and run["cell"]["condition"] == condition and twin(run["cell"]) in plain
            ]
            if pairs:
                rows.append([condition, arm, str(len(pairs)), *arm_cells(pairs)])
    head = ["condition", "arm", "runs", "held-out loss / AdamW's", "better in", "loss spikes", "of AdamW", "acted"]
    return table(head, rows)


def arm_cells(pairs: list[tuple[dict, dict]]) -> list[str]:
    ratio = statistics.median(mine["held_out"] / plain["held_out"] for mine, plain in pairs)
    better = sum(mine["held_out"] < plain["held_out"] for mine, plain in pairs)
    spikes = [sum(len(loss_spikes(pair[side])) for pair in pairs) for side in (0, 1)]
    stopped = sum("stopped" in run for run, _ in pairs)
    acted = sum(run["rewinds"] + run["skipped"] for run, _ in pairs)
    told = f"{acted}" + (f", {stopped} stopped" if stopped else "")
    return [f"{ratio:.3f}", f"{better} of {len(pairs)}", str(spikes[0]), str(spikes[1]), told]


# --- pictures -------------------------------------------------------------------------------------------------------


def draw_runs(runs: list[dict], file: Path) -> None:
    """One run of each task and condition: its loss, its spikes, and what foretold them or not."""
    figure, axes = plt.subplots(len(TASKS), len(CONDITIONS), figsize=(20, 10), sharex=True, squeeze=False)
    for row, task in enumerate(TASKS):
        for column, condition in enumerate(CONDITIONS):
            axis = axes[row][column]
            axis.set_title(f"{task}, {condition}", fontsize=9)
            axis.set_yscale("log")
            for run in runs:
                cell = run["cell"]
                if (cell["task"], cell["condition"], cell["seed"], cell["beta2"]) != (task, condition, 1, BETA2[-1]):
                    continue
                axis.plot(range(1, len(run["losses"]) + 1), run["losses"], lw=0.6, color="#1f77b4")
                for first, _ in loss_spikes(run):
                    axis.axvline(first, color="#d62728", lw=0.8)
                for step in events_of(run, "rms"):
                    axis.plot(step, run["losses"][step - 1], marker="v", color="#ff7f0e", ms=6)
    figure.suptitle("loss (blue), loss spikes (red), RMS events before them (orange); beta2 .999, seed 1")
    figure.tight_layout()
    figure.savefig(file, dpi=70)
    plt.close(figure)


def write(out: Path, cells: list[Cell], steps: int, results: Path | None) -> None:
    runs = read(out, cells)
    if not runs:
        raise SystemExit(f"study.py: there is no run in {out / 'runs'}")
    plain = [run for run in runs if run["cell"]["arm"] == "adamw"]
    watched = [run for run in runs if run["cell"]["arm"] in ARMS[:2]]
    lines = [
        "# Loss spikes: what tells of them, and what helps",
        "",
        f"`tests/studies/spike_study/study.py` on {machine()}; {datetime.date.today()}. {len(runs)} of {len(cells)} runs of "
        f"{steps} steps, of which the first {WARM_UP} are a warm-up; beta2 {' and '.join(f'{b:g}' for b in BETA2)}; "
        f"seeds 1 to {len(SEEDS)} of `calm`, `lr x 10` and `lr x 30`. Jumps, bursts and shifts begin after step {BEFALLS}. "
        "A loss spike is as in server/stability/loss_watch.h: it lasts, or is huge. An event foretells one that begins 1 to "
        "8 steps later; those of a spike's own steps are not counted. Precision: events that one followed; recall: spikes "
        "that one came before; chance: the recall of events that know nothing. The lead is a median. The paper's rule is "
        "`rms_margin = 0`, `rms_min_elements = 1`, on the same trainings.",
        "",
        "## Healthy trainings",
        "",
        *predictors_by(watched, {"calm": lambda cell: cell["condition"] == "calm"}),
        *predictors_by(
            watched, {task: lambda cell, t=task: cell["condition"] == "calm" and cell["task"] == t for task in TASKS}
        ),
        "## Spikes that come from the learning rate",
        "",
        *predictors_by(
            watched,
            {
                "all": lambda cell: cell["condition"] in OF_THE_OPTIMIZER,
                **{
                    f"tasks {'that it was tuned on' if tuned else 'held out'}": lambda cell, w=tuned: (
                        cell["condition"] in OF_THE_OPTIMIZER and (cell["task"] in TUNED) == w
                    )
                    for tuned in (True, False)
                },
                **{
                    f"beta2 {b:g}": lambda cell, b=b: cell["condition"] in OF_THE_OPTIMIZER and cell["beta2"] == b
                    for b in BETA2
                },
            },
        ),
        *frontier_of([run for run in plain if run["cell"]["condition"] in ("calm", *OF_THE_OPTIMIZER)]),
        "## By condition",
        "",
        *predictors_by(watched, {c: lambda cell, c=c: cell["condition"] == c for c in list(CONDITIONS)[1:]}),
        "## What helps: beside AdamW in the same runs",
        "",
        *arms(runs),
        "![runs](spike_study_runs.png)",
    ]
    for folder in (out, results):
        if folder is not None:
            (folder / "spike_study.md").write_text("\n".join(lines) + "\n")
            draw_runs(plain, folder / "spike_study_runs.png")
    print((out / "spike_study.md").read_text())
