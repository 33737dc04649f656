#!/usr/bin/env python3
"""Lays the quick start's runs beside each other: one table, and one picture of the loss curves.

    quickstart_report.py FOLDER

FOLDER holds ballast-SEED.json and torch-SEED.json as king_james.py writes them, and daemon.json: the daemon's resident
memory before and after training.
"""

import json
import statistics
import sys
from pathlib import Path


def load_runs(folder: Path, optimizer: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{optimizer}-*.json"))]


def mean_curve(runs: list[dict]) -> dict[int, float]:
    """Held-out loss by step, averaged over the runs' seeds."""
    curves = [{point["step"]: point["held_out"] for point in run["evaluations"]} for run in runs]
    return {step: statistics.fmean(curve[step] for curve in curves) for step in curves[0]}


def row(title: str, *cells: str) -> str:
    return f"  {title:<44}" + "".join(f"{cell:>22}" for cell in cells)


def curve_rows(ballast: list[dict], torch: list[dict]) -> list[str]:
    left, right = mean_curve(ballast), mean_curve(torch)
    steps = sorted(left)
    shown = sorted({steps[round(i * (len(steps) - 1) / 7)] for i in range(8)}) if steps else []
    return [row(f"held-out loss after step {step}", f"{left[step]:.4f}", f"{right[step]:.4f}") for step in shown]


def final_rows(ballast: list[dict], torch: list[dict]) -> list[str]:
    pairs = [(b["held_out_loss"], t["held_out_loss"]) for b, t in zip(ballast, torch)]
    if any(value is None for pair in pairs for value in pair):
        return []
    left, right = (statistics.fmean(values) for values in zip(*pairs))
    differences = [b - t for b, t in pairs]
    count = ballast[0]["held_out_evaluations"]
    rows = [
        row(f"mean of the last {count} evaluations", f"{left:.4f}", f"{right:.4f}"),
        row("  difference", f"{left - right:+.4f}", f"{100 * (left - right) / right:+.2f} %"),
    ]
    if len(pairs) > 1:
        error = statistics.stdev(differences) / len(differences) ** 0.5
        rows.append(row("  standard error over the seeds, paired", f"{error:.4f}", ""))
    return rows


def per_parameter(run: dict, byte_count: int) -> str:
    return f"{byte_count / run['parameters']:.3f}"


def trainer_rows(ballast: dict, torch: dict) -> list[str]:
    rows = []
    for kind in ("parameters", "gradients", "state"):
        cells = [per_parameter(run, run["trainer_bytes"][kind]) for run in (ballast, torch)]
        rows.append(row(f"trainer, bytes a parameter: {kind}", *cells))
    sums = [per_parameter(run, sum(run["trainer_bytes"].values())) for run in (ballast, torch)]
    return rows + [row("trainer, bytes a parameter: together", *sums)]


def server_rows(ballast: dict, daemon: dict) -> list[str]:
    held = ballast["server"]["bytes"]
    stored = held["weights"] + held["momentum"] + held["variance"]
    working = held["gradients"] + held["staging"]
    growth = 1024 * (daemon["rss_after_kib"] - daemon["rss_before_kib"])
    return [
        row("daemon, bytes a parameter: weights, moments", per_parameter(ballast, stored), "-"),
        row("daemon, working buffers of the run, MiB", f"{working / 2**20:.2f}", "-"),
        row("daemon, growth of its resident memory, MiB", f"{growth / 2**20:.2f}", "-"),
        row("client's send buffer, at most, MiB", f"{ballast['server']['trainer_buffer_bytes'] / 2**20:.2f}", "-"),
    ]


def time_rows(ballast: dict, torch: dict) -> list[str]:
    rows = []
    for name, key in (("median", "median"), ("lower quartile", "q1"), ("upper quartile", "q3")):
        rows.append(
            row(f"step time, {name}, ms", *(f"{1000 * run['step_seconds'][key]:.1f}" for run in (ballast, torch)))
        )
    for name, key in (("gradient bytes sent", "pushed_in_backward"), ("weight bytes received", "pulled_in_backward")):
        if key in ballast:
            rows.append(row(f"{name} during backward", f"{100 * ballast[key]:.0f} %", "-"))
    return rows


def table(ballast: list[dict], torch: list[dict], daemon: dict) -> str:
    first, local = ballast[0], torch[0]
    seeds = ", ".join(str(run["seed"]) for run in ballast)
    lines = [
        f"  {first['parameters']:,} parameters, {first['steps']} steps, seed {seeds}; torch {first['torch_version']} on "
        f"{first['torch_threads']} thread in both columns, the daemon on {daemon['threads']}",
        row("", "Ballast", "torch AdamW"),
        row("", first["server"]["optimizer"].removeprefix("adamw/"), "fp32, local"),
        *([] if first["recipe"] == "plain" else [row("", f"recipe {first['recipe']}", "")]),
    ]
    lines += curve_rows(ballast, torch) + final_rows(ballast, torch)
    lines += trainer_rows(first, local) + server_rows(first, daemon) + time_rows(first, local)
    return "\n".join(lines)


def draw(ballast: list[dict], torch: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    for runs, label, style in ((torch, "torch AdamW, fp32, in the trainer", "-"), (ballast, "Ballast", "--")):
        curve = mean_curve(runs)
        axes.plot(list(curve), list(curve.values()), style, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss (nats a byte)")
    axes.set_title(f"King James Bible, {ballast[0]['parameters']:,} parameters")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    ballast, torch = load_runs(folder, "ballast"), load_runs(folder, "torch")
    if not ballast or len(ballast) != len(torch):
        sys.exit(f"quickstart_report.py: {folder} holds {len(ballast)} Ballast and {len(torch)} torch runs")
    daemon = json.loads((folder / "daemon.json").read_text())
    print(table(ballast, torch, daemon))
    if ballast[0]["evaluations"]:
        draw(ballast, torch, folder / "loss.png")
        print(f"  picture: {folder / 'loss.png'}")


if __name__ == "__main__":
    main()
