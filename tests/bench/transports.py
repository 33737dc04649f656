#!/usr/bin/env python3
"""How fast the transports are: push, pull and both at once, against a bare TCP socket and memcpy, in turns.

    transports.py [--quick] [--json FILE] [--record] [--rounds N] [--most-bytes N] [--quiet-wait SECONDS]

In every round each transport moves the same bytes, between two processes and checksums included; then a small message goes
there and back. Ratios are medians over rounds of the ratio within the round. --record writes results/transports.md. Exit code
1: a floor that was measured undisturbed is not reached.
"""

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from collect import machine
from comparison import noise
from turns import Answering, Load, children, quartiles

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TRANSPORTS = ("memcpy", "aes", "raw", "tcp", "tls", "unix", "shm", "inplace")
TITLE = {
    "memcpy": "memcpy, 1 thread",
    "aes": "AES-256-GCM of both ends, 1 thread",
    "raw": "raw TCP socket",
    "tcp": "gRPC over TCP",
    "tls": "gRPC over TLS",
    "unix": "gRPC over a Unix socket",
    "shm": "shared memory, copied in",
    "inplace": "shared memory, in place",
}
# mode, transport, bound, floor, reach: of the largest size.
TARGETS = (
    ("push", "tcp", "raw", 0.45, 0.60),
    ("push", "tls", "tcp", 0.6, 0.8),
    ("push", "shm", "memcpy", 0.6, 0.8),
    ("push", "shm", "raw", 1.5, 2.4),
    ("push", "inplace", "raw", 2.5, 3.4),
)
PING_FLOOR_US = 5
SHARE = 256 << 20  # bytes that a small size is repeated to, a round


class Figure:
    """One transport, mode and size: a value for each round."""

    def __init__(self):
        self.gbps: list[float] = []
        self.cpu: list[float] = []  # of both processes, s/GB

    def add(self, answer: str, nbytes: float) -> None:
        took, own, peer = map(float, answer.split())
        self.gbps.append(nbytes / took / 1e9)
        self.cpu.append((own + peer) / nbytes * 1e9)


def sizes(most: int) -> list[int]:
    return [size for size in (64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30) if size <= most]


def measure(program: Answering, options: argparse.Namespace) -> tuple[dict, dict, Load]:
    figures: dict[tuple[str, str, int], Figure] = {}
    pings: dict[str, list[float]] = {}
    load = Load()
    program.ask("memcpy push 1024 1")  # by its answer the peers are there
    pids = [program.process.pid, os.getpid(), *children(program.process.pid)]
    for number in range(options.rounds):
        load.wait_until_quiet(options.quiet_wait / options.rounds)
        load.begin_round(pids)
        for size in sizes(options.most_bytes):
            for mode in ("push", "pull", "both"):
                count = max(1, min(SHARE, options.most_bytes) // size)
                for transport in TRANSPORTS if number % 2 == 0 else reversed(TRANSPORTS):
                    if transport in ("inplace", "aes") and mode != "push":
                        continue  # weights lie in place on every shared transport, and AES knows no direction
                    moved = size * count * (2 if mode == "both" else 1)
                    figure = figures.setdefault((transport, mode, size), Figure())
                    figure.add(program.ask(f"{transport} {mode} {size} {count}"), moved)
        for transport in ("tcp", "tls", "unix", "shm"):
            count = 2000
            took = float(program.ask(f"{transport} ping 0 {count}").split()[0])
            pings.setdefault(transport, []).append(took / count * 1e6)
        load.end_round()
        print(f"round {number + 1} of {options.rounds}: others used {load.shares[-1]:.2f} cores", file=sys.stderr)
    return figures, pings, load


def ratio(figures: dict, transport: str, bound: str, mode: str, size: int) -> list[float]:
    pairs = zip(figures[transport, mode, size].gbps, figures[bound, mode, size].gbps)
    return [value / against for value, against in pairs]


def spread(values: list[float]) -> str:
    low, middle, high = quartiles(values)
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def human(size: int) -> str:
    return f"{size >> 30} GiB" if size >= 1 << 30 else f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def left_by_aes(figures: dict, size: int) -> list[float]:
    """gRPC over TLS / gRPC over TCP, if TLS took the processors for AES and for nothing else."""
    pairs = zip(figures["tcp", "push", size].cpu, figures["aes", "push", size].cpu)
    return [tcp / (tcp + aes) for tcp, aes in pairs]


def verdicts(figures: dict, pings: dict, size: int) -> list[tuple[str, list[float], float, float | None, bool]]:
    """(what, its values, floor, reach, whether the floor is reached)."""
    found = []
    for mode, transport, bound, floor, reach in TARGETS:
        values = ratio(figures, transport, bound, mode, size)
        what = f"{mode}, {TITLE[transport]} / {TITLE[bound]}"
        found.append((what, values, floor, reach, statistics.median(values) >= floor))
    us = pings["shm"]
    found.append(("small message there and back, shared memory, us", us, PING_FLOOR_US, None, min(us) < PING_FLOOR_US))
    return found


def report(figures: dict, pings: dict, load: Load, options: argparse.Namespace) -> str:
    largest = sizes(options.most_bytes)[-1]
    lines = [
        "# The transports, measured",
        "",
        f"`tests/bench/transports.py --rounds {options.rounds} --most-bytes {options.most_bytes}` on {machine()}; "
        f"{datetime.date.today()}. Two processes on the same cores, chunks of 1 MiB, both ends compute or check each "
        "chunk's checksum but for raw TCP and memcpy; GB = 1e9 bytes of payload, of both directions together in "
        "`both`. Medians over rounds in which every transport had its turn, quartiles in brackets; ratios within a round.",
        load.told(),
        "",
        f"| target, at {human(largest)} | ratio | floor | reach | |",
        "| --- | --- | --- | --- | --- |",
    ]
    for what, values, floor, reach, met in verdicts(figures, pings, largest):
        lines.append(f"| {what} | {spread(values)} | {floor} | {reach or '-'} | {'met' if met else '**not met**'} |")
    lines += [
        "",
        f"What AES-256-GCM alone leaves of gRPC over TCP's speed, by processors' seconds: {spread(left_by_aes(figures, largest))}.",
    ]
    lines += ["", "| mode | size | transport | GB/s | of raw TCP | of memcpy | CPU s/GB |", "| --- " * 7 + "|"]
    for (transport, mode, size), figure in sorted(
        figures.items(), key=lambda f: (f[0][1], f[0][2], TRANSPORTS.index(f[0][0]))
    ):
        of = [f"{statistics.median(ratio(figures, transport, bound, mode, size)):.2f}" for bound in ("raw", "memcpy")]
        lines.append(
            f"| {mode} | {human(size)} | {TITLE[transport]} | {spread(figure.gbps)} | {of[0]} | {of[1]} | "
            f"{statistics.median(figure.cpu):.3f} |"
        )
    lines += ["", "| a small message there and back | us |", "| --- | --- |"]
    lines += [
        f"| {TITLE[transport]} | {spread(values)}, best {min(values):.2f} |" for transport, values in pings.items()
    ]
    return "\n".join(lines) + "\n"


def rows(figures: dict, pings: dict, largest: int, rounds: int) -> list[dict]:
    made = []
    for mode, transport, bound, _floor, _reach in TARGETS:
        value, against = (statistics.median(figures[x, mode, largest].gbps) for x in (transport, bound))
        name = f"{mode} {human(largest)}, {TITLE[transport]} / {TITLE[bound]}"
        shares = ratio(figures, transport, bound, mode, largest)
        made.append({"name": name, "value": value, "unit": "GB/s", "bound": against, "n": rounds})
        made[-1] |= {"ratio": statistics.median(shares), "noise": noise(shares)}
    us = statistics.median(pings["shm"])
    made.append({"name": "small message there and back, shared memory", "value": us, "unit": "us"})
    made[-1] |= {"bound": PING_FLOOR_US, "ratio": us / PING_FLOOR_US, "n": rounds, "noise": noise(pings["shm"])}
    return made


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--most-bytes", type=int, default=1 << 30)
    parser.add_argument("--quiet-wait", type=float, default=60, help="seconds to wait for a quiet machine, in all")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.most_bytes, options.quiet_wait = 1, 16 << 20, 0
    build = Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "release"))
    with tempfile.TemporaryDirectory(prefix="ballast-transports-") as folder:
        program = Answering([build / "tests" / "bench" / "transports_bench", folder])
        try:
            figures, pings, load = measure(program, options)
        finally:
            program.close()
    text = report(figures, pings, load, options)
    print(text)
    if options.record:
        (HERE / "results" / "transports.md").write_text(text)
    largest = sizes(options.most_bytes)[-1]
    if options.json:
        options.json.write_text(json.dumps(rows(figures, pings, largest, options.rounds)))
    return int(load.quiet and not options.quick and not all(met for *_rest, met in verdicts(figures, pings, largest)))


if __name__ == "__main__":
    sys.exit(main())
