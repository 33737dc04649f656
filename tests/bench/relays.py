#!/usr/bin/env python3
"""How fast versions pass a relay here, and, on paper, what a tree of relays takes for a run of 10^12 parameters.

    relays.py [--quick] [--json FILE] [--record] [--rounds N]

Here: a trainer's daemon, a relay of it and a relay of that on this machine, 50 M parameters in bf16. How long a reader who
comes anew takes for the whole version, at the trainer's daemon and at the last relay; and how much later than a reader there
one at the last relay has each version, which comes as changes.

On paper: a relay sends what it has once whole, to each of its readers over its one link. So a tree in which the trainer's
daemon has one relay, and every relay FAN_OUT readers, takes bytes / link * (1 + FAN_OUT * depth) seconds, and has
FAN_OUT^depth readers in the end. What changes take is of results/follow.md. --record writes a page among the results.
"""

import datetime
import os
import re
import statistics
import sys
import threading
import time
from pathlib import Path

import ballast
import torch
import trainer
from collect import machine
from turns import Load

ELEMENTS, TENSORS, RATE = 1_000_000, 50, 1e-6
PARAMETERS, FAN_OUT, DEPTHS, LINKS = 10**12, 10, (1, 2, 3), (25, 100, 400)  # Gbit/s
KEPT = 3.5  # versions that a relay has room for (FollowMemoryBytes)
FOLLOWED = Path(__file__).parent / "results" / "follow.md"


def fewer(rate: str) -> float:
    """By how much changes take fewer bytes than the whole, as measured at this learning rate."""
    row = re.search(rf"^\| {rate} \|.*\| 1/([\d.]+) \|", FOLLOWED.read_text(), re.MULTILINE)
    return float(row[1])


def short(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def paper(gigabytes_per_s: float | None) -> list[str]:
    """gigabytes_per_s: what a relay here makes of one stream; none: no rows of it."""
    kinds = {
        "whole, bf16": 2 * PARAMETERS,
        "whole, int8": PARAMETERS,
        "changes at 1e-5, bf16": 2 * PARAMETERS / fewer("1e-05"),
        "changes at 1e-6, bf16": 2 * PARAMETERS / fewer("1e-06"),
    }
    links = [(f"{gbit} Gbit/s", gbit / 8) for gbit in LINKS]
    if gigabytes_per_s:
        links.insert(0, (f"the {gigabytes_per_s:.2g} GB/s of this machine", gigabytes_per_s))
    readers = ", ".join(f"{FAN_OUT**depth:,}" for depth in DEPTHS)
    lines = [
        f"10^12 parameters, one daemon's run; every relay has {FAN_OUT} readers. Seconds until all of {readers} have it, "
        f"one to {DEPTHS[-1]} relays down, by what a relay sends with:",
        "",
        "| a version | bytes | a relay's memory | link | "
        + " | ".join(f"{FAN_OUT**d:,} readers" for d in DEPTHS)
        + " |",
        "| --- | --- | --- | --- |" + " --- |" * len(DEPTHS),
    ]
    for kind, size in kinds.items():
        whole = PARAMETERS * (1 if "int8" in kind else 2)
        for name, rate in links:
            seconds = " | ".join(short(size / (rate * 1e9) * (1 + FAN_OUT * depth)) for depth in DEPTHS)
            lines.append(f"| {kind} | {size / 1e9:,.4g} GB | {KEPT * whole / 1e12:.3g} TB | {name} | {seconds} |")
    return lines


class Tree:
    """A run, and readers at both ends of two relays."""

    def __init__(self, root: str, leaf: str):
        self.root, self.leaf = root, leaf
        torch.manual_seed(1)
        tensors = [torch.nn.Parameter((torch.randn(ELEMENTS) / 10).bfloat16()) for _ in range(TENSORS)]
        self.gradients = [torch.randn(ELEMENTS).bfloat16() for _ in tensors]
        named = [(f"w{i}", tensor) for i, tensor in enumerate(tensors)]
        self.tensors, self.optimizer = tensors, ballast.AdamW(named, lr=RATE, server=root, run="tree", follow=True)

    def step(self) -> None:
        for tensor, gradient in zip(self.tensors, self.gradients):
            tensor.backward(gradient)
        self.optimizer.step()
        self.optimizer.wait()


def newcomer_s(server: str) -> tuple[float, int]:
    began = time.perf_counter()
    with ballast.Subscriber(server, "tree") as reader:
        version = reader.next(120)
        return time.perf_counter() - began, version.whole_bytes


def later_s(tree: Tree, steps: int) -> tuple[list[float], list[float]]:
    """Of each step's version: how much later it is at the leaf; its share of the whole's bytes."""
    later, share = [], []
    with ballast.Subscriber(tree.root, "tree") as near, ballast.Subscriber(tree.leaf, "tree") as far:
        near.next(120), far.next(120)
        for _ in range(steps):
            times: dict[str, float] = {}
            versions = {}

            def read(name: str, reader: ballast.Subscriber) -> None:
                versions[name] = reader.next(120)
                times[name] = time.perf_counter()

            threads = [threading.Thread(target=read, args=words) for words in (("near", near), ("far", far))]
            for thread in threads:
                thread.start()
            tree.step()
            for thread in threads:
                thread.join()
            assert versions["near"].step == versions["far"].step and versions["far"].base_step is not None
            later.append(times["far"] - times["near"])
            share.append(versions["far"].received_bytes / versions["far"].whole_bytes)
    return later, share


def measure(rounds: int, load: Load) -> dict:
    with trainer.own_daemon() as root:
        relayed = ["--relay.runs", "tree"]
        with trainer.own_daemon("--relay.upstream", root.server, *relayed) as middle:
            with trainer.own_daemon("--relay.upstream", middle.server, *relayed) as leaf:
                tree = Tree(root.server, leaf.server)
                tree.step()
                trainer.daemon.until("it is there", lambda: "ballast_version_step" in leaf.get("/metrics")[1])
                load.begin_round([os.getpid(), *(daemon.process.pid for daemon in (root, middle, leaf))])
                near = [newcomer_s(root.server) for _ in range(rounds)]
                far = [newcomer_s(leaf.server) for _ in range(rounds)]
                later, share = later_s(tree, rounds)
                load.end_round()
                tree.optimizer.close()
    return {
        "near": [s for s, _ in near],
        "far": [s for s, _ in far],
        "bytes": far[0][1],
        "later": later,
        "share": share,
    }


def main() -> int:
    options = trainer.recording_parser(__doc__, "few rounds", 11).parse_args()
    torch.set_num_threads(1)
    rounds = 2 if options.quick else options.rounds
    load = Load()
    found = measure(rounds, load)
    near, far, later = (statistics.median(found[name]) for name in ("near", "far", "later"))
    rate = found["bytes"] / far / 1e9
    lines = [
        "# Relays, measured, and on paper",
        "",
        f"`tests/bench/relays.py --rounds {rounds}` on {machine()}; {datetime.date.today()}. Medians. Trainer, readers and "
        f"three daemons of one thread share the cores. {TENSORS * ELEMENTS / 1e6:g} M parameters in bf16.",
        load.told(),
        "",
        f"- A newcomer has the whole version, {found['bytes'] / 1e6:.0f} MB, after {near:.3g} s at the trainer's daemon, and "
        f"after {far:.3g} s at the second of two relays: {rate:.2g} GB/s.",
        f"- A version that comes as changes ({100 * statistics.median(found['share']):.2g} % of the whole's bytes) is at the "
        f"second relay's reader {later:.2g} s after that of the trainer's daemon.",
        "",
        *paper(rate if load.quiet else None),
    ]
    names = {
        "newcomer, trainer's daemon": near,
        "newcomer, second relay": far,
        "changes, later at the second relay": later,
    }
    fixed = {"unit": "s", "bound": None, "ratio": None, "n": rounds}
    rows = [{"name": name, "value": value} | fixed for name, value in names.items()]
    trainer.publish(options, "relays", "\n".join(lines) + "\n", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
