#!/usr/bin/env python3
"""What readers that follow a run cost its steps, and how many bytes a version's changes take in real trainings.

    follow.py [--quick] [--json FILE] [--record] [--rounds N]

Steps: 20 million parameters in bf16, with ballast.AdamW's defaults; a daemon and a trainer of one thread each, whose backward
is products of matrices and copies of gradients. Three runs take turns: one that nobody follows, one with a reader, one with
sixteen, each of which gets a version of every step. The readers are a process of little priority, since elsewhere they would
be other machines.

Changes: the transformer of the quick start on the King James Bible, first at its own learning rate, then tuned on at smaller
ones, and all-MiniLM-L6-v2, fine-tuned at those (`deploy/setup.sh minilm`; left out where it is not there); what a reader of
every step was sent, and how long it took to put it in place. --record writes a page among the results.
"""

import datetime
import os
import site
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import ballast
import torch
import trainer
from collect import machine
from sides import ratios, rows
from turns import Load, quartiles

READERS = {"nobody": 0, "one": 1, "sixteen": 16}
AGAINST = {"nobody": None, "one": "nobody", "sixteen": "nobody"}
TENSORS, STEPS = 20, 4
BOUND, GOAL = 1.05, 50
PATIENT = {"connect_timeout": 300.0, "reconnect_timeout": 300.0}  # little priority on a busy machine
ROOT = Path(__file__).resolve().parents[2]


def read_along(server: str, run: str, count: int) -> None:
    """Is so many readers, until standard input ends; says when each has a version."""
    group = Path("/proc/self/autogroup")
    if group.exists():
        group.write_text("19")
    os.nice(19)
    ready = threading.Barrier(count + 1)

    def read() -> None:
        with ballast.Subscriber(server, run, **PATIENT) as reader:
            next(reader)
            ready.wait()
            for _ in reader:
                pass

    def read_or_end() -> None:
        try:
            read()
        except ballast.BallastError as error:
            print(f"follow.py: a reader has ended: {error}", file=sys.stderr)
            os._exit(1)  # so that nobody waits for it

    for _ in range(count):
        threading.Thread(target=read_or_end, daemon=True).start()
    ready.wait()
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)  # the threads wait for versions


@dataclass
class Size:
    """elements: of each tensor. work: the rows of the matrices whose product takes what a layer's backward does."""

    elements: int = 1_000_000
    work: int = 700


class Followed:
    """A run with its readers."""

    def __init__(self, server: str, name: str, size: Size):
        torch.manual_seed(1)
        self.tensors = [torch.nn.Parameter((torch.randn(size.elements) / 10).bfloat16()) for _ in range(TENSORS)]
        self.gradients = [torch.randn(size.elements).bfloat16() for _ in range(TENSORS)]
        self.work = torch.randn(size.work, size.work)
        named = [(f"w{i}", tensor) for i, tensor in enumerate(self.tensors)]
        self.optimizer = ballast.AdamW(named, lr=1e-6, server=server, run=name, follow=True)
        self.step()
        self.readers = None
        if READERS[name]:
            command = [sys.executable, __file__, "--read-along", server, name, str(READERS[name])]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.readers = subprocess.Popen(command, start_new_session=True, **pipes)
            assert self.readers.stdout.readline() == "ready\n"

    def step(self) -> None:
        for tensor, gradient in zip(self.tensors, self.gradients):
            self.work @ self.work
            tensor.backward(gradient)
        self.optimizer.step()

    def turn(self) -> float:
        began = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        self.optimizer.wait()
        seconds = time.perf_counter() - began
        while self.readers is not None and self.lag() > 0:  # the next one's turn is its own
            time.sleep(0.01)
        return seconds / STEPS

    def lag(self) -> int:
        status = self.optimizer.run_status()
        return int(status["step"]) - int(status["follow"]["newest"]["step"])

    def close(self) -> None:
        self.optimizer.close()
        if self.readers is not None:
            self.readers.communicate()


def measure_steps(rounds: int, size: Size) -> tuple[dict[str, list[float]], Load]:
    seconds: dict[str, list[float]] = {name: [] for name in READERS}
    load = Load()
    with trainer.own_daemon() as daemon, ExitStack() as stack:
        runs = {name: Followed(daemon.server, name, size) for name in READERS}
        for run in runs.values():
            stack.callback(run.close)
            run.turn()
        readers = [run.readers.pid for run in runs.values() if run.readers is not None]
        for number in range(rounds):
            load.begin_round([os.getpid(), daemon.process.pid, *readers])
            for name in list(READERS)[:: -1 if number % 2 else 1]:
                seconds[name].append(runs[name].turn())
            load.end_round()
    return seconds, load


@dataclass
class Training:
    name: str
    model: torch.nn.Module
    loss: Callable[[], torch.Tensor]  # of the next batch
    learning: dict
    rates: tuple[float, ...]


def king_james_training() -> Training:
    king_james = trainer.king_james
    text, chance = king_james.load_text(), torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    model = king_james.ByteModel().bfloat16()

    def loss() -> torch.Tensor:
        return model.loss(king_james.draw_batch(text, king_james.BATCH, chance))

    return Training("The King James transformer", model, loss, king_james.LEARNING, (1e-3, 1e-5, 1e-6))


def minilm_training(characters: int | None, batch: int) -> Training | None:
    """On so much of the text. None: its weights are not installed."""
    packages = next(ROOT.glob("build/minilm-venv/lib/python*/site-packages"), None)
    if packages is None:
        return None
    site.addsitedir(str(packages))
    sys.path.insert(0, str(ROOT / "tests" / "studies" / "minilm_study"))
    import encoder
    import verses
    from arms import LEARNING

    model = encoder.load(verses.file_of_wheel("model.safetensors")).bfloat16()
    pieces = verses.WordPieces(verses.file_of_wheel("vocab.txt"))
    text = bytes(trainer.king_james.load_text()[:characters].to(torch.uint8)).decode("latin-1")
    book = verses.Verses(text, pieces)
    chance = torch.Generator().manual_seed(1)

    def loss() -> torch.Tensor:
        return verses.loss_of(model, book.draw(batch, chance))

    return Training("all-MiniLM-L6-v2, fine-tuned on verses", model, loss, LEARNING, (1e-5, 1e-6))


def measure_changes(training: Training, rates: tuple[float, ...], steps: int) -> list[dict]:
    """By learning rate, medians over the versions of the last half of its steps."""
    told = []
    with trainer.own_daemon() as daemon:
        options = {"server": daemon.server, "run": "text", "follow": True}
        with ballast.AdamW(training.model.named_parameters(), **(training.learning | options)) as optimizer:

            def step() -> None:
                training.loss().backward()
                optimizer.step()
                optimizer.wait()

            step()  # makes the run
            with ballast.Subscriber(daemon.server, "text") as reader:
                next(reader)
                for rate in rates:
                    optimizer.param_groups[0]["lr"] = rate
                    seen = []
                    for _ in range(steps):
                        step()
                        assert reader.await_next(60)
                        began = time.perf_counter()
                        version = reader.next(0)
                        seen.append((version, time.perf_counter() - began))
                    told.append(figures(rate, seen[steps // 2 :]))
    return told


def figures(rate: float, seen: list) -> dict:
    assert all(version.skipped == 0 for version, _ in seen)
    return {
        "rate": rate,
        "changed": statistics.median(version.changed_ratio for version, _ in seen),
        "sent": statistics.median(version.received_bytes for version, _ in seen),
        "whole": seen[0][0].whole_bytes,
        "fewer": statistics.median(version.whole_bytes / version.received_bytes for version, _ in seen),
        "place_ms": statistics.median(1000 * seconds for _, seconds in seen),
    }


def table_of(name: str, changes: list[dict]) -> list[str]:
    lines = [
        "",
        f"{name}, {changes[0]['whole'] // 2:,} parameters in bf16: what a step changes of the weights that are served, and "
        f"what it takes to send that without loss. Goal at the smallest rate: 1/{GOAL}.",
        "",
        "| learning rate | weights changed | bytes sent | of the whole's | put in place, ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in changes:
        lines.append(
            f"| {row['rate']:g} | {100 * row['changed']:.2f} % | {row['sent']:,.0f} | 1/{row['fewer']:.1f} "
            f"| {row['place_ms']:.2f} |"
        )
    return lines


def report(seconds: dict, load: Load, changes: dict[str, list[dict]], rounds: int, size: Size) -> str:
    lines = [
        "# Readers that follow a run, measured",
        "",
        f"`tests/bench/follow.py --rounds {rounds}` on {machine()}; {datetime.date.today()}. Medians over rounds of {STEPS} "
        f"steps, quartiles in brackets; ratios within a round, bound {BOUND}. {TENSORS * size.elements / 1e6:g} M parameters in bf16, a version of "
        "every step.",
        load.told(),
        "",
        "| readers | a step, ms | ratio |",
        "| --- | --- | --- |",
    ]
    for name, count in READERS.items():
        low, middle, high = (1000 * value for value in quartiles(seconds[name]))
        ratio = f"{statistics.median(ratios(seconds, name, AGAINST[name])):.3f}" if AGAINST[name] else "-"
        lines.append(f"| {count} | {middle:.4g} ({low:.4g} to {high:.4g}) | {ratio} |")
    for name, told in changes.items():
        lines += table_of(name, told)
    return "\n".join(lines) + "\n"


def main() -> int:
    if sys.argv[1:2] == ["--read-along"]:
        read_along(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    options = trainer.recording_parser(__doc__, "few rounds, steps and rates", 15).parse_args()
    torch.set_num_threads(1)
    rates, steps, characters, batch, size = slice(None), 16, None, 8, Size()
    if options.quick:  # the readers, whose priority is little, get hardly a processor on a busy machine
        rates, steps, characters, batch, options.rounds, size = slice(1), 2, 100_000, 2, 2, Size(20_000, 100)
    trainings = [king_james_training(), minilm_training(characters, batch)]
    changes = {
        training.name: measure_changes(training, training.rates[rates], steps) for training in trainings if training
    }
    seconds, load = measure_steps(options.rounds, size)
    text = report(seconds, load, changes, options.rounds, size)
    trainer.publish(options, "follow", text, rows(seconds, AGAINST, options.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
