#!/usr/bin/env python3
"""Whole training steps beside what they replace: seconds, the trainers' memory, and processors.

    end_to_end.py [--quick] [--json FILE] [--record] [--rounds N] [--model NAME]...

Transformers of 57 and 295 million parameters in fp32 with 1 to 8 ranks: through Ballast, over gRPC and through shared memory; with
torch's fused AdamW, under DistributedDataParallel over gloo where there are several ranks; and with one rank DeepSpeed's
ZeRO-Offload (CPUAdam), where build/bench-venv has it (deploy/setup.sh peers). All of a side may use all processors: the trainers
share them, and a daemon has one thread beside. In a round each side is started, takes steps, and ends, in alternating order; the
first steps do not count. What would not fit into the machine's memory is not tried, and says so. --record writes
results/end_to_end.md.
"""

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import trainer
from collect import machine
from comparison import noise
from overlap import Team
from turns import Failed, process_seconds, quartiles

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PEERS = ROOT / "build" / "bench-venv" / "bin" / "python"
MODELS = {
    "small": 0.9e6,
    "large": 57e6,
    "larger": 295e6,
}  # of overlap_trainer.py, and about how many parameters they have
WARM_UP = 2
# Bytes a parameter: of each trainer, and of a daemon with fp32 gradients of a whole step.
TRAINER_BYTES = {"torch": 20, "deepspeed": 24, "shm": 8, "grpc": 8}
DAEMON_BYTES = 10
TITLES = {
    "torch": "torch's fused AdamW",
    "deepspeed": "DeepSpeed ZeRO-Offload",
    "shm": "Ballast, shared memory",
    "grpc": "Ballast, gRPC",
}


@dataclass
class Side:
    """One way to train a model with so many ranks."""

    name: str
    model: str
    ranks: int
    absent: str = ""  # why it was not measured
    parameters: int = 0
    rounds: list[float] = field(default_factory=list)  # the median step of each, in seconds
    nbytes: list[int] = field(default_factory=list)  # of the largest trainer, at most
    cpu: list[float] = field(default_factory=list)  # a step's seconds of processors, daemon included

    @property
    def ours(self) -> bool:
        return self.name in ("shm", "grpc")

    def needs(self) -> float:
        """Bytes of the machine, about."""
        return MODELS[self.model] * (self.ranks * TRAINER_BYTES[self.name] + (DAEMON_BYTES if self.ours else 0))

    def measure(self, steps: int):
        with tempfile.TemporaryDirectory(prefix="ballast-end-") as folder:
            if not self.ours:
                return self.train(steps, "", None)
            with trainer.own_daemon("--shm_socket", f"{folder}/shm") as daemon:
                self.train(steps, daemon.server, daemon)

    def train(self, steps: int, server: str, daemon):
        threads = max(1, os.cpu_count() // self.ranks)
        python = PEERS if self.name == "deepspeed" else sys.executable
        side, transport = ("ballast", self.name) if self.ours else (self.name, "auto")
        team = Team(side, self.model, self.ranks, threads, transport, python)
        try:
            team.start(server)
            for _ in range(WARM_UP):
                team.step()
            del team.steps[:]
            before = process_seconds(daemon.process.pid) if daemon else 0
            for _ in range(steps):
                team.step()
            served = (process_seconds(daemon.process.pid) - before) / steps if daemon else 0
        finally:
            team.close()
        self.parameters = team.parameters
        self.rounds.append(team.median("step_s"))
        self.nbytes.append(max(team.values("bytes")))
        self.cpu.append(team.median("cpu_s") * self.ranks + served)


def sides(model: str, ranks: int) -> list[Side]:
    made = [Side(name, model, ranks) for name in ("torch", "shm", "grpc")]
    if ranks == 1:
        made.insert(1, Side("deepspeed", model, ranks))
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for side in made:
        if side.name == "deepspeed" and not PEERS.exists():
            side.absent = "it is not installed: deploy/setup.sh peers"
        if side.needs() > 0.9 * has:
            side.absent = f"it takes some {side.needs() / 2**30:.0f} GiB, and the machine has {has / 2**30:.0f}"
    return made


def measure(compared: list[list[Side]], rounds: int, steps: int):
    for group in compared:
        for number in range(rounds):
            for side in group if number % 2 == 0 else reversed(group):
                if side.absent:
                    continue
                try:
                    side.measure(steps)
                except (Failed, OSError, subprocess.SubprocessError) as error:
                    side.absent = f"it failed: {error}"
        for side in group:
            print(line(side, group[0]), file=sys.stderr)


def ratios(side: Side, torch: Side) -> list[float]:
    return [ours / theirs for ours, theirs in zip(side.rounds, torch.rounds)]


def line(side: Side, torch: Side) -> str:
    if side.absent:
        return f"| {side.ranks} | {TITLES[side.name]} | not measured: {side.absent} | | | |"
    low, middle, high = (1000 * value for value in quartiles(side.rounds))
    of_torch = f"{statistics.median(ratios(side, torch)):.2f}" if torch.rounds else "-"
    nbytes = max(side.nbytes)
    cells = [side.ranks, TITLES[side.name], f"{middle:.0f} ({low:.0f} to {high:.0f})", of_torch]
    cells += [f"{nbytes / 1e6:.0f} ({nbytes / side.parameters:.1f})", f"{statistics.median(side.cpu):.2f}"]
    return "| " + " | ".join(map(str, cells)) + " |"


def report(compared: list[list[Side]], rounds: int, steps: int) -> str:
    lines = [
        "# Training steps beside what they replace, measured",
        "",
        f"`tests/bench/end_to_end.py --rounds {rounds}` on {machine()}; {datetime.date.today()}. fp32 throughout, one sequence of "
        f"128 bytes a rank and step. Medians over rounds of the median of {steps} steps, quartiles in brackets; the ratio within a "
        "round. Memory: what the largest trainer has resident at most in a step, over what it had before its model was made: "
        "weights, gradients, optimizer state, activations and buffers, shared memory included. Processor seconds: of all "
        "trainers and the daemon, a step. torchao's CPUOffloadOptimizer is not measured: it runs beside CUDA or XPU only.",
        "",
    ]
    for model in dict.fromkeys(group[0].model for group in compared):
        parameters = max((side.parameters for group in compared for side in group if side.model == model), default=0)
        lines += [f"## {parameters / 1e6:.1f} M parameters", ""]
        lines += [
            "| ranks | optimizer | step, ms | of torch's | a trainer's memory, MB (bytes a parameter) | processor s |"
        ]
        lines += ["| --- " * 6 + "|"]
        for group in compared:
            lines += [line(side, group[0]) for side in group if side.model == model]
        lines.append("")
    return "\n".join(lines)


def rows(compared: list[list[Side]]) -> list[dict]:
    made = []
    for group in compared:
        torch = group[0]
        for side in group[1:]:
            if not side.rounds or not torch.rounds:
                continue
            ranks = f"{side.ranks} rank{'s' if side.ranks > 1 else ''}"
            of = ratios(side, torch)
            made.append(
                {"name": f"{side.parameters / 1e6:.1f} M parameters, {ranks}: {TITLES[side.name]}", "unit": "ms"}
            )
            made[-1] |= {
                "value": 1000 * statistics.median(side.rounds),
                "bound": 1000 * statistics.median(torch.rounds),
            }
            made[-1] |= {"ratio": statistics.median(of), "noise": noise(of), "n": len(of)}
    return made


def main():
    parser = trainer.recording_parser(__doc__, quick="the quick start's model, one round, 1 rank", rounds=1)
    parser.add_argument("--model", action="append", choices=MODELS, help="large, larger")
    options = parser.parse_args()
    models, worlds, steps = options.model or ["large", "larger"], (1, 2, 4, 8), 5
    if options.quick:
        models, worlds, steps, options.rounds = ["small"], (1,), 3, 1
    compared = [sides(model, ranks) for model in models for ranks in worlds]
    measure(compared, options.rounds, steps)
    text = report(compared, options.rounds, steps)
    print(text)
    if options.record and not options.quick:
        (HERE / "results" / "end_to_end.md").write_text(text)
    if options.json:
        options.json.write_text(json.dumps(rows(compared)))


if __name__ == "__main__":
    main()
