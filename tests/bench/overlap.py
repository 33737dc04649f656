#!/usr/bin/env python3
"""How much of push, update and pull backward hides, and what a step costs beside torch's own fused AdamW.

    overlap.py [--quick] [--json FILE]

The quick start's model and one of 57 million parameters, in fp32, with one rank and with two: through Ballast, and with
fused AdamW, of two ranks under DistributedDataParallel over gloo. Each trainer has one thread, and so has the daemon.
All trainers stay up and take steps in turns, in alternating order, so that whatever else the machine does strikes all.

A weight that is in before backward ends was pushed, updated and pulled behind it. "exposed" is the time from the end of
backward to the end of the step, over the step.
"""

import json
import socket
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import trainer
from comparison import noise
from turns import Answering

HERE = Path(__file__).resolve().parent
WARM_UP = 3
PATIENCE_S = 300


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@dataclass
class Team:
    """The trainers of one side, one process a rank."""

    side: str
    model: str
    ranks: int
    threads: int = 1
    transport: str = "auto"
    python: str = sys.executable
    trainers: list[Answering] = field(default_factory=list)
    parameters: int = 0
    steps: list[dict] = field(default_factory=list)

    def start(self, server: str):
        port, run = free_port(), f"overlap-{self.model}-{self.ranks}"
        for rank in range(self.ranks):
            command = [self.python, HERE / "overlap_trainer.py", self.side, self.model, "--threads", self.threads]
            command += ["--rank", rank, "--world", self.ranks, "--port", port, "--server", server, "--run", run]
            command += ["--transport", self.transport]
            self.trainers.append(Answering(command))
        for trainer_ in self.trainers:
            self.parameters = trainer_.read_json(PATIENCE_S)["parameters"]

    def step(self):
        """Makes a step on all ranks at once, and keeps what the slowest took."""
        for trainer_ in self.trainers:
            trainer_.process.stdin.write(b"step\n")
        self.steps.append(max((t.read_json(PATIENCE_S) for t in self.trainers), key=lambda a: a["step_s"]))

    def close(self):
        for trainer_ in self.trainers:
            trainer_.close()

    def values(self, key: str) -> list[float]:
        return [answer[key] for answer in self.steps]

    def median(self, key: str) -> float:
        return statistics.median(self.values(key))

    def exposed(self) -> float:
        return statistics.median(1 - answer["compute_s"] / answer["step_s"] for answer in self.steps)


def measure(model: str, ranks: int, turns: int) -> tuple[Team, Team]:
    teams = (Team("ballast", model, ranks), Team("torch", model, ranks))
    try:
        with trainer.own_daemon() as daemon:
            for team in teams:
                team.start(daemon.server)
            for turn in range(WARM_UP + turns):
                for team in teams if turn % 2 == 0 else reversed(teams):
                    team.step()
            for team in teams:
                del team.steps[:WARM_UP]
    finally:
        for team in teams:
            team.close()
    return teams


def rows_of(ballast: Team, torch: Team) -> list[dict]:
    what = f"{ballast.parameters / 1e6:.1f} M parameters, {ballast.ranks} rank{'s' if ballast.ranks > 1 else ''}"
    peer = "fused AdamW" if ballast.ranks == 1 else "fused AdamW under DDP (gloo)"
    ours, theirs = ballast.median("step_s"), torch.median("step_s")
    print(f"{what}: step {1000 * ours:.0f} ms, {peer} {1000 * theirs:.0f} ms, ratio {ours / theirs:.3f}")
    print(
        f"  exposed after backward: {100 * ballast.exposed():.1f} % of the step, {peer} {100 * torch.exposed():.1f} %"
    )
    rows = [{"name": f"{what}: step, to {peer}", "value": 1000 * ours, "unit": "ms"}]
    rows[0] |= {"bound": 1000 * theirs, "ratio": ours / theirs, "n": len(ballast.steps)}
    rows[0] |= {"noise": noise([a / b for a, b in zip(ballast.values("step_s"), torch.values("step_s"))])}
    for key, text in (("pushed", "pushed"), ("pulled", "pushed, updated and pulled")):
        share = ballast.median(key)
        print(f"  {text} before backward ended: {100 * share:.0f} % of the bytes")
        rows.append({"name": f"{what}: {text} in backward", "value": 100 * share, "unit": "%"})
        rows[-1] |= {"bound": 100.0, "ratio": share, "n": len(ballast.steps), "noise": noise(ballast.values(key))}
    return rows


def main():
    options = trainer.parse_options(__doc__, quick="few turns")
    turns = {"small": 10, "large": 5} if options.quick else {"small": 40, "large": 20}
    rows = []
    for model, count in turns.items():
        for ranks in (1, 2):
            rows += rows_of(*measure(model, ranks, count))
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
