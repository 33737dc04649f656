#!/usr/bin/env python3
"""What a snapshot every 50 steps costs a step: a run with snapshots beside one without, in the same two processes.

    snapshots.py [--quick] [--json FILE]

20 million parameters in fp32 with ballast.AdamW's defaults, so 5.125 bytes of each parameter are copied every 50 steps.
The daemon and the trainer have one thread each. Both runs take turns of 50 steps, in alternating order, so that
whatever else the machine does strikes both. The mean over the turns is compared, not the median: one step in 50 pays.
"""

import json
import statistics
import time

import torch
import trainer
from torch import nn

EVERY = 50
WIDTH, LAYERS, BATCH = 1000, 20, 64
BOUND = 1.03


class Run:
    """One of the two: a model of its own on a run of its own."""

    def __init__(self, name: str, server: str, **options):
        import ballast

        torch.manual_seed(1)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.model = nn.Sequential(*layers)
        self.optimizer = ballast.AdamW(self.model.named_parameters(), lr=1e-4, server=server, run=name, **options)
        self.data = torch.randn(BATCH, WIDTH)
        self.turns: list[float] = []
        self.slowest: list[float] = []

    def step(self) -> float:
        started = time.perf_counter()
        self.model(self.data).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - started

    def turn(self):
        """Fifty steps; the snapshot that the last one of the turn before began is copied in the first."""
        steps = [self.step() for _ in range(EVERY)]
        self.turns.append(sum(steps))
        self.slowest.append(max(steps))


def measure(turns: int) -> tuple[Run, Run]:
    torch.set_num_threads(1)
    with trainer.own_daemon() as daemon:
        runs = (
            Run("without", daemon.server),
            Run("with", daemon.server, snapshots=2, snapshot_every=EVERY),
        )
        for turn in range(1 + turns):
            for run in runs if turn % 2 == 0 else reversed(runs):
                run.turn()
        for run in runs:
            del run.turns[0], run.slowest[0]
        assert runs[1].optimizer.run_status()["snapshot_steps"], "no snapshot was taken"
        for run in runs:
            run.optimizer.close()
    return runs


def main():
    options = trainer.parse_options(__doc__, quick="few turns")
    without, with_ = measure(3 if options.quick else 10)
    # Neighbours in time are compared, so that a slow minute is in both.
    ratios = [theirs / ours for ours, theirs in zip(without.turns, with_.turns)]
    ratio = statistics.median(ratios)
    base, taken = (1000 * statistics.mean(run.turns) / EVERY for run in (without, with_))
    print(f"a step of 20 M parameters: {base:.1f} ms without snapshots, {taken:.1f} ms with one every {EVERY} steps")
    print(
        f"  ratio {ratio:.4f}, median of {len(ratios)} turns from {min(ratios):.4f} to {max(ratios):.4f}; bound {BOUND}"
    )
    slowest = [1000 * statistics.median(run.slowest) for run in (without, with_)]
    print(f"  the slowest step of a turn: {slowest[0]:.1f} ms without, {slowest[1]:.1f} ms with")
    row = {
        "name": f"20 M parameters: a step with a snapshot every {EVERY}, to one without",
        "value": taken,
        "unit": "ms",
    }
    row |= {"bound": base, "ratio": ratio, "n": len(ratios)}
    if options.json:
        options.json.write_text(json.dumps([row]))


if __name__ == "__main__":
    main()
