#!/usr/bin/env python3
"""What a tensor more costs in a training step in Python, through Ballast and with torch's fused AdamW, taken in turns.

    many_tensors.py [--quick] [--json FILE]

Models of as many parameters of 500 elements as the table says, whose loss is the sum of all: what is left is what each tensor costs by
itself. torch on one thread, the daemon on one, both on this machine. Processor time is this process's, and the daemon's.
"""

import json
import statistics
import time

import ballast
import torch
import trainer
from comparison import noise
from turns import process_seconds

COUNTS, QUICK = (100, 1_000, 20_000), (100, 1_000)
ELEMENTS = 500


class Side:
    """One optimizer and its model; by step what it took, in seconds."""

    def __init__(self, tensors: int, daemon):
        self.parameters = {f"layers.{i}": torch.nn.Parameter(torch.ones(ELEMENTS)) for i in range(tensors)}
        self.daemon = daemon
        if daemon is None:
            self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-3, fused=True)
        else:
            run = f"tensors-{tensors}"
            self.optimizer = ballast.AdamW(self.parameters.items(), lr=1e-3, server=daemon.server, run=run)
        self.step_s, self.trainer_s, self.daemon_s = [], [], []

    def step(self) -> None:
        served = self._daemon_seconds()
        worked, started = time.process_time(), time.perf_counter()
        sum(parameter.sum() for parameter in self.parameters.values()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_s.append(time.perf_counter() - started)
        self.trainer_s.append(time.process_time() - worked)
        self.daemon_s.append(self._daemon_seconds() - served)

    def _daemon_seconds(self) -> float:
        return 0 if self.daemon is None else process_seconds(self.daemon.process.pid)

    def forget(self) -> None:
        for taken in (self.step_s, self.trainer_s, self.daemon_s):
            taken.clear()


def measure(tensors: int, turns: int, daemon) -> tuple[Side, Side]:
    sides = Side(tensors, daemon), Side(tensors, None)
    for turn in range(turns + 2):
        if turn == 2:
            for side in sides:
                side.forget()
        for side in sides if turn % 2 == 0 else reversed(sides):
            side.step()
    sides[0].optimizer.close()
    return sides


def row_of(tensors: int, ours: Side, theirs: Side) -> dict:
    step, torchs = statistics.median(ours.step_s), statistics.median(theirs.step_s)
    ratios = [a / b for a, b in zip(ours.step_s, theirs.step_s)]
    more = statistics.median(a - b for a, b in zip(ours.trainer_s, theirs.trainer_s))
    served = statistics.mean(ours.daemon_s)
    print(
        f"| {tensors:,} | {1e3 * step:.4g} | {1e3 * torchs:.4g} | {step / torchs:.2f} | {1e6 * more / tensors:.1f} | "
        f"{1e6 * served / tensors:.1f} |"
    )
    row = {"name": f"step of {tensors:,} tensors", "value": 1e3 * step, "unit": "ms", "bound": 1e3 * torchs}
    return row | {"ratio": step / torchs, "n": len(ratios), "noise": noise(ratios)}


def main():
    options = trainer.parse_options(__doc__, quick="without the model of 20,000 tensors")
    torch.set_num_threads(1)
    rows = []
    print(
        "| tensors | step, ms | torch's fused AdamW, ms | ratio | trainer's more, us of processors a tensor | daemon's |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for tensors in QUICK if options.quick else COUNTS:
        with trainer.own_daemon() as daemon:
            rows.append(row_of(tensors, *measure(tensors, max(5, 10_000 // tensors), daemon)))
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
