"""The pictures of study.py."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

# Colours that the colour-blind tell apart; dashes are nearest where the format also rounds stochastically.
STYLES = {
    ("fp32", "nearest"): ("#000000", "-", "fp32"),
    ("companded8", "stochastic"): ("#0072b2", "-", "companded8 stochastic"),
    ("companded8", "nearest"): ("#56b4e9", (0, (6, 2)), "companded8 nearest"),
    ("flash8", "nearest"): ("#d55e00", "-", "flash8"),
    ("dynamic8", "nearest"): ("#009e73", "-", "dynamic8"),
    ("bf16", "stochastic"): ("#cc79a7", "-", "bf16 stochastic"),
    ("bf16", "nearest"): ("#cc79a7", (0, (2, 2)), "bf16 nearest"),
}
BASE, DEFAULT = "fp32 + fp32", "split24 + companded8 stochastic"


def style(arguments: dict) -> dict:
    color, line, label = STYLES[arguments["state"], arguments["rounding"]]
    order = list(STYLES).index((arguments["state"], arguments["rounding"]))
    width = {"companded8 stochastic": 4.0, "companded8 nearest": 2.2}.get(label, 1.4)  # wide ones lie below
    return {
        "color": color,
        "linestyle": line,
        "label": label,
        "linewidth": width,
        "zorder": 3 + order - 2 * (order == 1),
    }


def finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def drift(cells: list[dict], path: Path) -> None:
    """Mean v over exact, by step, a column for each beta2 and a row for each start."""
    betas = sorted({c["arguments"]["beta2"] for c in cells if c["function"] == "drift"})[-2:]
    kinds = {"from zero": "steady noise, from zero", "halved": "noise halves, from the steady state"}
    figure, rows = plt.subplots(2, len(betas), figsize=(9, 6), sharex=True, squeeze=False, layout="constrained")
    for line, (kind, told) in zip(rows, kinds.items(), strict=True):
        for axes, beta2 in zip(line, betas, strict=True):
            for cell in cells:
                arguments = cell["arguments"]
                if cell["function"] == "drift" and (arguments["kind"], arguments["beta2"]) == (kind, beta2):
                    axes.plot(*zip(*cell["result"]["curve"], strict=True), **style(arguments))
            axes.set_yscale("log", base=2)
            axes.set_ylim(0.4, 4.5)
            axes.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
            x = "step" if kind == "halved" else ""
            finish(axes, f"{told}, beta2 = {beta2}", x, "mean v / exact" if beta2 == betas[0] else "")
    figure.legend(*rows[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def outlier(cells: list[dict], path: Path) -> None:
    """The rms of updates beside an outlier at step 200, by step."""
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    for cell in cells:
        if cell["function"] == "outlier" and cell["arguments"]["at"] == 200:
            curve = cell["result"]["curve"]
            axes.plot(range(1, len(curve) + 1), curve, **style(cell["arguments"]))
    axes.set_yscale("log")
    axes.set_ylim(1e-2, 2e4)
    axes.axhline(2.5, color="#888888", linewidth=0.8, linestyle=":")
    axes.text(1095, 2.9, "2.5 lr: what is allowed", ha="right", fontsize=8, color="#555555")
    for step, told in ((200, "outlier"), (600, "gradients are 0")):
        axes.axvline(step, color="#bbbbbb", linewidth=0.8)
        axes.annotate(
            told,
            (step, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, -10),
            textcoords="offset points",
            fontsize=8,
        )
    finish(axes, "updates of the 31 elements beside an outlier", "step", "rms of updates, in lr")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def differences(runs: dict[int, dict], base: dict[int, dict]) -> list[float]:
    """Final losses minus the baseline's on the same seeds, of runs that did not diverge."""
    return [runs[s]["loss"] - base[s]["loss"] for s in runs if s in base and runs[s]["loss"] is not None]


def scale_axis(axes: Axes, values: list[float]) -> None:
    """Linear within 0.005 of zero and logarithmic beyond, with room for all values."""
    low, high = min(-0.006, 1.5 * min(values)), max(0.006, 1.5 * max(values))
    axes.set_xscale("symlog", linthresh=0.005, linscale=2)
    axes.set_xlim(low, high)
    places = [x for x in (-0.5, -0.05, -0.005, 0, 0.005, 0.05, 0.5) if low <= x <= high]
    axes.set_xticks(places, [f"{x:+g}" if x else "0" for x in places], fontsize=8)
    axes.minorticks_off()


def loss(found: dict[str, dict[str, dict[int, dict]]], path: Path) -> None:
    """Held-out loss minus fp32's, a row for each recipe, with its standard error and the seeds as dots."""
    titles = {"text": "King James transformer", "image": "Fashion-MNIST"}
    found = {task: runs for task, runs in found.items() if BASE in runs}
    if not found:
        return
    figure, line = plt.subplots(1, len(found), figsize=(9.5, 4.8), sharey=True, squeeze=False, layout="constrained")
    for axes, (task, recipes) in zip(line[0], found.items(), strict=True):
        base = recipes[BASE]
        names = [name for name in recipes if name != BASE][::-1]
        for y, name in enumerate(names):
            dots = differences(recipes[name], base)
            if not dots:
                axes.text(0, y, " diverged", va="center", fontsize=8)
                continue
            color = "#0072b2" if name == DEFAULT else "#555555"
            error = statistics.stdev(dots) / len(dots) ** 0.5 if len(dots) > 1 else 0
            axes.plot(dots, [y] * len(dots), "o", color=color, alpha=0.35, markersize=4)
            axes.errorbar(statistics.fmean(dots), y, xerr=error, fmt="D", color=color, markersize=5, capsize=3)
        axes.axvline(0, color="#000000", linewidth=0.8)
        scale_axis(axes, [dot for runs in recipes.values() for dot in differences(runs, base)])
        axes.set_yticks(range(len(names)), names, fontsize=8)
        finish(axes, titles[task], "held-out loss minus fp32's on the same seed", "")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw(cells: list[dict], found: dict[str, dict[str, dict[int, dict]]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    drift(cells, folder / "codec_study_drift.png")
    outlier(cells, folder / "codec_study_outlier.png")
    loss(found, folder / "codec_study_loss.png")
