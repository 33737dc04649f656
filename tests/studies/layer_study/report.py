"""The study's tables and pictures."""

from __future__ import annotations

import datetime
import statistics
from pathlib import Path
from typing import Any

from arms import ARMS, FP32
from collect import machine

Result = dict[str, Any]
UNIT_FP8 = "unit-scaled, fp8 served, e5m2 gradients, no loss scale"
PLAIN_FP8 = "fp8 served, e5m2 gradients, no loss scale"
WITH, WITHOUT = "fp8, a scale for each tensor, LayerScale of 0", "fp8, a scale for each tensor"
# fp8-e5m2: the least number that is not 0, and the largest.
E5M2_RANGE = (-16, 15)


def spread(values: list[float], sign: str = "") -> str:
    told = f"{statistics.fmean(values):{sign}.4f}"
    return told if len(values) < 2 else f"{told} ± {statistics.stdev(values) / len(values) ** 0.5:.4f}"


def of(known: list[Result], task: str, arm: str) -> dict[int, Result]:
    """By seed."""
    chosen = [one for one in known if one["cell"]["task"] == task and one["cell"]["arm"] == arm]
    return {one["cell"]["seed"]: one["result"] for one in chosen}


def row(known: list[Result], task: str, name: str) -> list[str] | None:
    made, theirs = of(known, task, name), of(known, task, ARMS[name].against)
    if not made:
        return None
    bytes_held = f"{statistics.fmean(one['bytes'] for one in made.values()):.3f}"
    in_layers = next(iter(made.values()))["in_layers"]
    told = "-" if in_layers is None else f"{in_layers:.3f}"
    losses = [one["loss"] for one in made.values()]
    if None in losses:
        return [
            name,
            f"diverged, {losses.count(None)} of {len(losses)} seeds",
            "",
            "",
            str(len(made)),
            bytes_held,
            told,
        ]
    both = [seed for seed in made if theirs.get(seed, {}).get("loss") is not None]
    less = [made[seed]["loss"] - theirs[seed]["loss"] for seed in both]
    against = "-" if ARMS[name].against == name else ARMS[name].against
    return [name, spread(losses), spread(less, "+") if less else "-", against, str(len(made)), bytes_held, told]


def table(known: list[Result], task: str) -> list[str]:
    head = [
        "way",
        "held-out loss",
        "difference to",
        "which",
        "seeds",
        "trainer, bytes a parameter",
        "of these layers' weights",
    ]
    rows = [made for name in ARMS if (made := row(known, task, name)) is not None]
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def losses_of_fp8(known: list[Result]) -> list[str]:
    """How much of the gradients e5m2 would lose."""
    lines = ["| gradients of the layers' outputs, text | beyond 57344 | become 0 |", "| --- | --- | --- |"]
    for name in (UNIT_FP8, PLAIN_FP8, "fp8 served, e5m2 gradients, loss scale 2^14"):
        made = list(of(known, "text", name).values())
        if made and "gone" in made[0]:
            beyond, gone = (statistics.fmean(one[key] for one in made) for key in ("beyond", "gone"))
            lines.append(f"| {name} | {100 * beyond:.4f} % | {100 * gone:.2f} % |")
    return lines


def draw(known: list[Result], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (gradients, features, curves) = pyplot.subplots(1, 3, figsize=(13, 3.6), dpi=110)
    for name in (UNIT_FP8, PLAIN_FP8):
        for one in list(of(known, "text", name).values())[:1]:
            if "exponents" in one:
                gradients.step(range(-40, 21), one["exponents"], where="mid", label=name.split(",")[0])
    gradients.axvspan(*E5M2_RANGE, alpha=0.15, label="range of e5m2")
    gradients.set(xlabel="log2 of the gradients of outputs, last step", ylabel="share", title="gradients before fp8")
    for name in (WITH, WITHOUT, FP32):
        for one in list(of(known, "images", name).values())[:1]:
            features.plot(range(1, len(one["features"]) + 1), one["features"], "o-", label=name.replace(WITHOUT, "fp8"))
    features.set(xlabel="block", ylabel="mean |x| after it", title="features after training on images")
    for name in (FP32, *(arm for arm in ARMS if "unit-scaled" in arm), PLAIN_FP8):
        for one in list(of(known, "text", name).values())[:1]:
            steps, losses = zip(*one["curve"])
            curves.plot(steps, losses, label=name)
    curves.set(xlabel="step", ylabel="held-out loss", title="text")
    for axes in (gradients, features, curves):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(folder / "layer_study.png")
    pyplot.close(figure)


def write(known: list[Result], folder: Path, command: str) -> None:
    cells = [one["cell"] for one in known]
    seeds, steps = sorted({cell["seed"] for cell in cells}), sorted({cell["steps"] for cell in cells})
    today = datetime.date.today().isoformat()
    lines = [
        "# Layers in 8 bits: what they cost and save",
        "",
        f"`{command}` on {machine()}; {today}. Transformers of {cells[0]['depth']} blocks and width 64, {steps[-1]} steps, seeds "
        f"{', '.join(map(str, seeds))}; held-out loss: mean of the last 5 evaluations, ± the standard error over seeds; differences "
        "are of the same seed. Everything but torch's rows goes through a daemon. Bytes: of the trainer's weights, codes and "
        "scales after the last step; gradients and optimizer state take none there.",
    ]
    for task, title in (("text", "King James Bible, bytes"), ("images", "Fashion-MNIST")):
        if any(cell["task"] == task for cell in cells):
            lines += ["", f"## {title}", "", *table(known, task)]
    lines += [
        "",
        "## What fp8 would lose of gradients",
        "",
        *losses_of_fp8(known),
        "",
        "![pictures](layer_study.png)",
        "",
    ]
    (folder / "layer_study.md").write_text("\n".join(lines))
    draw(known, folder)
