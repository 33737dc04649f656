"""The tables of study.py, in Markdown."""

from __future__ import annotations

import datetime
import math
import platform
import re
import statistics
from pathlib import Path

import plots

TASKS = {"text": "King James transformer", "image": "Fashion-MNIST"}
INTRODUCTIONS = {
    "from zero": "Noise of deviation 1 from zero moments, as training starts.",
    "halved": "Noise of deviation 1/2 from the steady state of deviation 1.",
    "halved from 1": "The same from v = 1 in every element, a start that training does not have.",
}


def machine() -> str:
    found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def state_name(arguments: dict) -> str:
    """'companded8 stochastic'; the rounding is not said where the format has one only."""
    rounds = arguments["state"] in ("companded8", "bf16")
    return f"{arguments['state']} {arguments['rounding']}" if rounds else arguments["state"]


def recipe_name(recipe: dict) -> str:
    rounds = {"companded8", "bf16", "split24", "mcf8"} & {recipe["master"], recipe["state"]}
    name = f"{recipe['master']} + {recipe['state']}" + (f" {recipe['rounding']}" if rounds else "")
    return name if recipe["lr_factor"] == 1 else f"{name}, lr x {recipe['lr_factor']}"


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def pivot(cells: list[dict], function: str, column: str, show, **chosen) -> tuple[list, dict[str, dict]]:
    """Results of a function by state, then by the column's value."""
    rows: dict[str, dict] = {}
    columns: list = []
    for cell in cells:
        arguments = cell["arguments"]
        if cell["function"] == function and all(arguments[key] == value for key, value in chosen.items()):
            rows.setdefault(state_name(arguments), {})[arguments[column]] = show(cell["result"])
            if arguments[column] not in columns:
                columns.append(arguments[column])
    return columns, rows


def pivot_table(name: str, columns: list, rows: dict[str, dict], heads: list[str]) -> list[str]:
    body = [[state, *(found.get(column, "-") for column in columns)] for state, found in rows.items()]
    return table([name, *heads], body)


# --- made signals ---------------------------------------------------------------------------------------------------


def drift_part(cells: list[dict]) -> list[str]:
    steps = next(cell["arguments"]["steps"] for cell in cells if cell["function"] == "drift")
    lines = [
        "## Does v follow the gradients?",
        "",
        f"Mean v over the exact mean after {steps} steps, 4096 elements; 1 is right.",
        "",
    ]
    for kind, told in INTRODUCTIONS.items():
        columns, rows = pivot(cells, "drift", "beta2", lambda r: f"{r['ratio']:.4f}", kind=kind)
        lines += [told, "", *pivot_table("state", columns, rows, [f"beta2 {b}" for b in columns])]
    return lines


def outlier_part(cells: list[dict]) -> list[str]:
    columns, rows = pivot(cells, "outlier", "at", lambda r: f"{r['rms']:.3g} / {r['largest']:.3g}")
    return [
        "## Updates beside an outlier",
        "",
        "One element of each block of 32 sees g = 1 once, all else is 1e-4, and exactly 0 from 400 steps later. Of the other",
        "elements, in lr: the largest rms of a step / the largest step of one.",
        "",
        *pivot_table("state", columns, rows, [f"outlier at step {at}" for at in columns]),
    ]


def scaled_part(cells: list[dict]) -> list[str]:
    def show(r: dict) -> str:
        return f"{r['ratio']:.4g} / {r['largest']:.3g} / {r['distance']:.3g} / {r['moved']:.3g}"

    columns, rows = pivot(cells, "scaled", "scale", show)
    return [
        "## Tiny and zero gradients",
        "",
        "500 steps of noise around a fixed direction, times a scale; eps is 1e-4 of the scale; every third gradient is exactly 0.",
        "Mean v over exact / the largest update in lr / distance to fp32's weights over the way these went / how far a weight",
        "without a gradient moved.",
        "",
        *pivot_table("state", columns, rows, [f"gradients x {scale:g}" for scale in columns]),
    ]


def narrow_part(cells: list[dict]) -> list[str]:
    found = {c["arguments"]["deviation"]: c["result"] for c in cells if c["function"] == "narrow_weights"}
    if not found:
        return []  # the study was stopped before
    forms = list(next(iter(found.values())))
    rows = [[form, *(f"{result[form]:.1e}" for result in found.values())] for form in forms]
    return [
        "## Weights in 2 and 3 bytes",
        "",
        "Mean square of what rounding changes over that of the weights, from N(0, deviation^2), to nearest. `mcf8` is a pair of",
        "e4m3 and e5m2; a second e4m3 ends at 2^-9, above what small weights leave over.",
        "",
        *table(["master", *(f"deviation {deviation:g}" for deviation in found)], rows),
    ]


# --- training -------------------------------------------------------------------------------------------------------


def by_recipe(cells: list[dict], task: str) -> dict[str, dict[int, dict]]:
    found: dict[str, dict[int, dict]] = {}
    for cell in cells:
        arguments = cell["arguments"]
        if cell["function"] == "train" and arguments["task"] == task:
            found.setdefault(recipe_name(arguments["recipe"]), {})[arguments["seed"]] = cell["result"]
    return found


def paired(runs: dict[int, dict], base: dict[int, dict]) -> list[float]:
    """Final losses minus the baseline's on the same seeds; a diverged run counts as infinite."""
    both = sorted(runs.keys() & base.keys())
    return [(math.inf if runs[s]["loss"] is None else runs[s]["loss"]) - base[s]["loss"] for s in both]


def told_difference(differences: list[float]) -> str:
    diverged = sum(math.isinf(d) for d in differences)
    if diverged:
        return f"{diverged} of {len(differences)} diverged"
    if len(differences) < 2:
        return f"{differences[0]:+.4f} (1 seed)" if differences else "-"
    return f"{statistics.fmean(differences):+.4f} ± {statistics.stdev(differences) / len(differences) ** 0.5:.4f}"


def training_rows(found: dict[str, dict[int, dict]], base: dict[int, dict]) -> list[list[str]]:
    rows = []
    for name, runs in found.items():
        losses = [run["loss"] for run in runs.values() if run["loss"] is not None]
        variances = [run["variance"] for run in runs.values()]
        mean, median = (statistics.fmean(v[key] for v in variances) for key in ("mean", "median"))
        band = "-".join(f"{statistics.fmean(v[key] for v in variances):.3g}" for key in ("low", "high"))
        unchanged = statistics.fmean(run["unchanged"] for run in runs.values())
        row = [name, f"{statistics.fmean(losses):.4f}" if losses else "diverged"]
        row += ["0" if runs is base else told_difference(paired(runs, base)), str(len(runs))]
        row += [
            f"{mean:.3f} / {median:.3f}",
            band,
            f"{100 * unchanged:.2f} %",
            f"{statistics.fmean(run.get('edq', math.nan) for run in runs.values()):.4f}",
            f"{max(r['largest'] for r in runs.values()):.3g}",
        ]
        rows.append(row)
    return rows


def training_part(cells: list[dict], task: str) -> list[str]:
    found = by_recipe(cells, task)
    base = found.get("fp32 + fp32")
    if not base:
        return []
    one = next(c for c in cells if c["function"] == "train" and c["arguments"]["task"] == task)
    learning = {
        "text": "lr 2e-3, betas .9 .99, decay 0.1, batches of 16 x 128 bytes",
        "image": "lr 2e-3, betas .9 .999, decay 0.01, batches of 64",
    }[task]
    heads = ["master + state", "held-out loss", "minus fp32 (± s.e.)", "seeds", "v / exact: mean / median", "5-95 %"]
    heads += ["unchanged a step", "EDQ", "largest update, lr"]
    return [
        f"## {TASKS[task]}",
        "",
        f"{one['result']['parameters']:,} parameters, {one['arguments']['steps']} steps, {learning}; the loss is the mean of the",
        "last 10 evaluations, 20 steps apart, and differences are paired by seed. Updates are sampled at every 10th step.",
        "",
        *table(heads, training_rows(found, base)),
        *verdict(found, base),
    ]


def verdict(found: dict[str, dict[int, dict]], base: dict[int, dict]) -> list[str]:
    """Says in words what ended below the default recipe, and which differences exceed two standard errors."""
    default = "split24 + companded8 stochastic"
    ours = found.get(default)
    if not ours:
        return []
    lower, clear = [], []
    for name, runs in found.items():
        against = paired(runs, ours) if name != default else []
        if against and statistics.fmean(against) < 0:
            lower.append(f"{name} ({told_difference(against)})")
        differences = paired(runs, base) if runs is not base else []
        if len(differences) > 2 and not any(map(math.isinf, differences)):
            error = statistics.stdev(differences) / len(differences) ** 0.5
            if abs(statistics.fmean(differences)) > 2 * error:
                clear.append(f"{name} ({told_difference(differences)})")
    return [
        f"Below the default, {default}, on the same seeds: " + ("; ".join(lower) if lower else "none") + ".",
        "",
        "Beyond two standard errors from fp32: "
        + (", ".join(clear) if clear else "none")
        + f". (Of {len(found) - 1}; with few",
        "seeds the errors themselves are rough.)",
        "",
    ]


# --- all of it ------------------------------------------------------------------------------------------------------


def write(cells: list[dict], out: Path, command: str, pictures: str = "") -> None:
    """codec_study.md in `out`, and the pictures in out/pictures."""
    seconds = sum(cell["seconds"] for cell in cells)
    lines = [
        "# What compressed moments and weights cost",
        "",
        f"{machine()}, one thread a run; {datetime.date.today().isoformat()}; {len(cells)} runs that took {seconds / 60:.0f} minutes",
        f"together, with other work on the machine. `{command}`",
        "",
        "Every update is the daemon's own kernel, through `ballast.numerics.step`. The exact v is kept in double precision from",
        "the same gradients. `companded8 stochastic` with the master `split24` is the default; `flash8` and `flash24` are",
        "FlashOptim's codecs, `dynamic8` is that of bitsandbytes, `mcf` + `mcf` is Collage's plus form, which rounds all it computes",
        "to bf16. EDQ is the part of the wanted updates that was stored: 1 is all, less is lost, more is noise along them.",
        "",
        f"![v over exact v]({pictures}codec_study_drift.png)",
        f"![updates after an outlier]({pictures}codec_study_outlier.png)",
        f"![held-out loss against fp32]({pictures}codec_study_loss.png)",
        "",
        *drift_part(cells),
        *outlier_part(cells),
        *scaled_part(cells),
        *narrow_part(cells),
    ]
    for task in TASKS:
        lines += training_part(cells, task)
    out.mkdir(parents=True, exist_ok=True)
    (out / "codec_study.md").write_text("\n".join(lines).rstrip() + "\n")
    plots.draw(cells, {task: by_recipe(cells, task) for task in TASKS}, out / pictures)
