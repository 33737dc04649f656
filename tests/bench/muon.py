#!/usr/bin/env python3
"""What Muon's rule costs: a step of one matrix, beside the matrix products that it needs and beside torch.optim.Muon.

    muon.py [--quick] [--json FILE]

A matrix in fp32 with the default formats, its gradient given, in two runs of one daemon: by Muon and by AdamW; what the one
takes more than the other is Muon's. The products are torch's, in fp32: five times X X^T, G G and B X, of which the daemon
makes half of the first two. All have one thread, and take turns, so that whatever else the machine does strikes all.
"""

import json
import statistics
import time

import torch
import trainer
from comparison import noise
from torch import nn

SHAPES = [(1024, 1024), (1024, 4096), (4096, 1024)]
QUICK_SHAPES = [(256, 512)]
STEPS = 5  # of the iteration


class Stepper:
    """A matrix that is stepped, by one of ballast's optimizers or torch's."""

    def __init__(self, name: str, shape: tuple[int, int], make):
        self.name, self.weight, self.taken = name, nn.Parameter(torch.randn(shape)), []
        self._optimizer = make([("w", self.weight)])
        self._gradient = torch.randn(shape)

    def turn(self):
        self.weight.grad = self._gradient.clone()
        started = time.perf_counter()
        self._optimizer.step()
        self.taken.append(time.perf_counter() - started)


class Products:
    """Those of one step."""

    def __init__(self, shape: tuple[int, int]):
        self._x, self.taken = torch.randn(min(shape), max(shape)), []

    def turn(self):
        started = time.perf_counter()
        for _ in range(STEPS):
            gram = self._x @ self._x.T
            (gram @ gram) @ self._x
        self.taken.append(time.perf_counter() - started)


def measure(shape: tuple[int, int], turns: int) -> dict[str, list[float]]:
    import ballast

    with trainer.own_daemon() as daemon:
        options = {"lr": 1e-4, "server": daemon.server}
        sides = {
            "muon": Stepper("muon", shape, lambda p: ballast.Muon(p, run="muon", **options)),
            "adamw": Stepper("adamw", shape, lambda p: ballast.AdamW(p, run="adamw", **options)),
            "products": Products(shape),
        }
        if hasattr(torch.optim, "Muon"):
            sides["torch"] = Stepper("torch", shape, lambda p: torch.optim.Muon([w for _, w in p], lr=1e-4))
        for turn in range(1 + turns):
            for side in sides.values() if turn % 2 == 0 else reversed(sides.values()):
                side.turn()
    return {name: side.taken[1:] for name, side in sides.items()}


def rows_of(shape: tuple[int, int], taken: dict[str, list[float]]) -> list[dict]:
    middle = {name: 1000 * statistics.median(times) for name, times in taken.items()}
    added = [1000 * (ours - theirs) for ours, theirs in zip(taken["muon"], taken["adamw"])]
    name, rows = f"{shape[0]} x {shape[1]}", []
    told = f"{name}: Muon adds {statistics.median(added):.0f} ms to a step of {middle['adamw']:.0f} ms"
    for peer, words in (("products", "its products in fp32 by torch"), ("torch", "a step of torch.optim.Muon")):
        if peer not in taken:
            continue
        ratios = [ours / (1000 * theirs) for ours, theirs in zip(added, taken[peer])]
        ratio = statistics.median(ratios)
        told += f"; {words}: {middle[peer]:.0f} ms, ratio {ratio:.2f}"
        row = {"name": f"{name}: what Muon adds to a step, to {words}", "value": statistics.median(added), "unit": "ms"}
        rows.append(row | {"bound": middle[peer], "ratio": ratio, "n": len(ratios), "noise": noise(ratios)})
    print(told)
    return rows


def main():
    options = trainer.parse_options(__doc__, quick="a turn of a small matrix")
    torch.set_num_threads(1)
    rows = []
    for shape in QUICK_SHAPES if options.quick else SHAPES:
        rows += rows_of(shape, measure(shape, 1 if options.quick else 9))
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
