#!/usr/bin/env python3
"""Does training through Ballast end where fp32 AdamW ends? The quick start's model from several seeds, both ways.

    quickstart_study.py [--quick] [--seeds N] [--steps N] [--json FILE]

Prints the mean of the last 20 held-out evaluations for every seed, the paired difference, and its standard error.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import trainer


def final_loss(optimizer: str, seed: int, steps: int, server: str, folder: Path) -> float:
    figures = folder / f"{optimizer}-{seed}.json"
    script = trainer.ROOT / "client" / "python" / "examples" / "king_james.py"
    command = [sys.executable, script, "--optimizer", optimizer, "--seed", seed, "--steps", steps]
    command += ["--server", server, "--json", figures]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL, env=environment)
    return json.loads(figures.read_text())["held_out_loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 100 steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds, steps = (1, 100) if options.quick else (options.seeds, options.steps)

    losses = []
    with tempfile.TemporaryDirectory(prefix="ballast-study-") as folder, trainer.own_daemon() as daemon:
        print("seed    Ballast      torch fp32   difference")
        for seed in range(1, seeds + 1):
            pair = [final_loss(name, seed, steps, daemon.server, Path(folder)) for name in ("ballast", "torch")]
            losses.append(pair)
            print(f"{seed:4d}    {pair[0]:.4f}       {pair[1]:.4f}       {pair[0] - pair[1]:+.4f}", flush=True)
    left, right = (statistics.fmean(values) for values in zip(*losses))
    differences = [a - b for a, b in losses]
    error = statistics.stdev(differences) / seeds**0.5 if seeds > 1 else None
    told = f"+- {error:.4f} (standard error)" if error is not None else "(one seed: no error known)"
    print(f"mean    {left:.4f}       {right:.4f}       {left - right:+.4f} {told}")
    if options.json:
        row = {"name": f"held-out loss after {steps} steps, Ballast", "value": left, "unit": "nats/byte"}
        row |= {"bound": right, "ratio": left / right, "n": seeds, "standard_error_of_difference": error}
        options.json.write_text(json.dumps([row]))


if __name__ == "__main__":
    main()
