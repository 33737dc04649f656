#!/usr/bin/env python3
"""The speed of the CPU kernels beside the bound of their memory traffic and beside other people's optimizers.

    cpu_kernels.py [--quick] [--json FILE] [--record] [--rounds N] [--elements N] [--quiet-wait SECONDS]

One process of cpu_kernel_bench and one for each peer and thread count (peers.py, run by --peer-python) are asked in
turns, round by round, for one repetition of everything. A ratio is the median over the rounds of the ratio within a
round. A repetition during which other processes used the machine is dropped where at least five others remain; what
could not be cleaned so is marked with a star. --quiet-wait: how long to wait, in all, for the machine to be quiet
before rounds. --record writes results/cpu_kernels.md. Absent peers are listed with the reason, loudly.
"""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

import cpu_kernels_report
import peers
from turns import Answering, Failed, Variant, take_turns

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LEVELS = ("off", "core", "full")
HUGE = " in huge pages"  # ends the name of a peer whose memory is
ROUNDINGS = ("nearest", "stochastic")
USUAL = "split24 companded8"
# Every rule with its usual formats. Collage rounds one way.
RULES = {
    "adam": (USUAL, "stochastic"),
    "stable_adamw": (USUAL, "stochastic"),
    "sgd": (USUAL, "stochastic"),
    "lion": (USUAL, "stochastic"),
    "collage_light": ("mcf bf16", "nearest"),
    "collage_plus": ("mcf mcf", "nearest"),
    "adamw": ("fp32 fp32", "nearest"),
}


class Ours:
    """The variants of cpu_kernel_bench, by what they are."""

    def __init__(self, program: Path, elements: int, gradient: str):
        self.bench = Answering([program, "--elements", elements, "--gradient", gradient])
        self.elements = elements
        self.isas = self.bench.ask("isas").split(", ")
        self.best = self.isas[-1]
        self.variants: dict[str, Variant] = {}
        self.answers: dict[str, float] = {}

    def add(self, name: str, line: str, threads: int, moved: float) -> str:
        if name not in self.variants:
            self.variants[name] = Variant(name, self.bench, line, threads, self.elements, moved)
        return name

    def moved(self, rule: str, formats: str) -> float:
        line = f"bytes {rule} {formats}"
        if line not in self.answers:
            self.answers[line] = float(self.bench.ask(line))
        return self.answers[line]

    def update(self, rule="adamw", formats=USUAL, rounding="nearest", level="off", threads=1, isa=None) -> str:
        isa = isa or self.best
        what = f"{rule} {formats} {rounding} {level}"
        return self.add(
            f"{isa} {what}, {threads} T", f"update {isa} {what} {threads}", threads, self.moved(rule, formats)
        )

    def mimic(self, threads: int) -> str:
        moved = self.moved("adamw", USUAL)
        return self.add(f"mimic of adamw {USUAL}, {threads} T", f"mimic adamw {USUAL} {threads}", threads, moved)

    def memcpy(self, threads: int) -> str:
        moved = self.moved("adamw", USUAL)
        line = f"memcpy {int(moved * self.elements / 2)} {threads}"
        return self.add(f"memcpy of as many bytes, {threads} T", line, threads, moved)


def start_peers(options) -> tuple[list[Variant], list[tuple[str, str]], list[str]]:
    """The peers that run, those that do not with the reason, and the versions of those that do."""
    found, absent, versions = [], [], {}
    for name in (*peers.PEERS, *(name + HUGE for name in peers.IN_HUGE_PAGES)):
        if options.quick and not name.startswith("torch "):
            absent.append((name, "left out by --quick"))
            continue
        for threads in (1, 2):
            try:
                variant, about = start_peer(name, threads, options)
            except (Failed, OSError) as error:
                print(f"!! {name}, {threads} T: NOT MEASURED: {error}", flush=True)
                absent.append((f"{name}, {threads} T", str(error)))
                continue
            found.append(variant)
            versions[name.removesuffix(HUGE)] = about
    return found, absent, [f"{name}: {about}" for name, about in versions.items()]


def start_peer(name: str, threads: int, options) -> tuple[Variant, str]:
    python = options.peer_python
    if not python.exists():
        raise Failed(f"no {python.relative_to(ROOT) if python.is_relative_to(ROOT) else python}: deploy/setup.sh peers")
    environment = {"OMP_NUM_THREADS": str(threads), "THP_MEM_ALLOC_ENABLE": str(int(name.endswith(HUGE)))}
    environment["PATH"] = f"{python.parent}:{os.environ['PATH']}"
    peer = name.removesuffix(HUGE)
    command = [python, HERE / "peers.py", peer, "--threads", threads, "--elements", options.elements]
    program = Answering(command, environment)
    ready = program.read_json(timeout_s=900)
    if "absent" in ready:
        program.close()
        raise Failed(ready["absent"])
    print(f"{name}, {threads} T: {ready['ready']}", flush=True)
    return Variant(f"{name}, {threads} T", program, "step", threads, ready["elements"], ready["bytes"]), ready["ready"]


def ratio_rows(ours: Ours) -> list[dict]:
    """What is held against what. `of` gives for a level of statistics the two variants: the faster is to be the first.
    `target` (None: stated only) is what the ratio of speeds must reach; for `time` of the times, and may not pass."""
    rows = []

    def row(what, of, target=None, kind="speed", missing=None):
        pairs = {} if missing else {level: of(level) for level in LEVELS}
        rows.append({"what": what, "pairs": pairs, "target": target, "kind": kind, "missing": missing})

    def adamw(level, rounding="nearest", **more):
        return ours.update(level=level, rounding=rounding, **more)

    for rounding, target in zip(ROUNDINGS, (0.30, 0.22)):
        row(f"{rounding} / mimic, 1 T", lambda x: (adamw(x, rounding), ours.mimic(1)), target)
    for rounding in ROUNDINGS:
        row(f"{rounding} / mimic, 2 T", lambda x: (adamw(x, rounding, threads=2), ours.mimic(2)))
    for rounding in ROUNDINGS:
        row(f"{rounding}, 2 T / 1 T", lambda x: (adamw(x, rounding, threads=2), adamw(x, rounding)), 1.85)
    row("mimic, 2 T / 1 T", lambda x: (ours.mimic(2), ours.mimic(1)))
    if "avx512" in ours.isas:
        row("AVX2 / AVX-512, nearest", lambda x: (adamw(x, isa="avx2"), adamw(x, isa="avx512")), 0.65)
        row("AVX-512 / scalar, nearest", lambda x: (adamw(x, isa="avx512"), adamw(x, isa="scalar")), 7)
    else:
        missing = "not measured: this processor has no AVX-512"
        row("AVX2 / AVX-512, nearest", None, 0.65, missing=missing)
        row("AVX-512 / scalar, nearest", None, 7, missing=missing)
        if "avx2" in ours.isas:
            row("AVX2 / scalar, nearest", lambda x: (adamw(x, isa="avx2"), adamw(x, isa="scalar")))
    for rounding in ROUNDINGS:
        stable = {"rule": "stable_adamw", "rounding": rounding}
        row(
            f"StableAdamW / AdamW, time, {rounding}",
            lambda x: (ours.update(level=x, **stable), adamw(x, rounding)),
            1.4,
            "time",
        )
    for rounding in ROUNDINGS:
        row(
            f"statistics' share of a step, {rounding}",
            lambda x: (adamw(x, rounding), adamw("off", rounding)),
            0.25,
            "share",
        )
    return rows


def peer_rows(ours: Ours, found: list[Variant]) -> list[dict]:
    """Made once the peers' speeds are known: the fastest of each thread count, as it comes and in huge pages, is the one
    that counts."""
    rows = []
    for threads, huge, target in ((2, False, 1.1), (2, True, 1.1), (1, False, None), (1, True, None)):
        there = [v for v in found if v.threads == threads and (HUGE in v.name) == huge]
        for rounding in ROUNDINGS:
            label = f"{rounding} / fastest peer{HUGE * huge}, {threads} T"
            if not there:
                rows.append(
                    {
                        "what": label,
                        "pairs": {},
                        "target": target,
                        "kind": "speed",
                        "missing": "not measured: no peer ran",
                    }
                )
                continue
            best = min(there, key=lambda v: min(v.seconds) / v.elements).name
            for isa in isas_beside_peers(ours, threads):
                pairs = {
                    level: (ours.update(rounding=rounding, level=level, threads=threads, isa=isa), best)
                    for level in LEVELS
                }
                what = f"{label} ({best})" if isa == ours.best else f"{isa}, {label} ({best}, {ours.best})"
                rows.append({"what": what, "pairs": pairs, "target": target, "kind": "speed", "missing": None})
    return rows


def isas_beside_peers(ours: Ours, threads: int) -> list[str]:
    """On two threads AVX2 as well, beside peers that have all that the processor does."""
    return [isa for isa in ours.isas if isa == ours.best or (isa == "avx2" and threads == 2)]


def all_variants(ours: Ours) -> None:
    for threads in (1, 2):
        ours.memcpy(threads)
        for rounding in ROUNDINGS:
            for level in LEVELS:
                for isa in isas_beside_peers(ours, threads):
                    ours.update(rounding=rounding, level=level, threads=threads, isa=isa)
        for rule, (formats, rounding) in RULES.items():
            ours.update(rule, formats, rounding, "core", threads)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2^22 elements, 3 rounds, of the peers torch only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--elements", type=int)
    parser.add_argument("--gradient", choices=("bf16", "fp32"), default="bf16", help="ours; the peers' are fp32")
    parser.add_argument("--quiet-wait", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--program", type=Path)
    parser.add_argument("--peer-python", type=Path, default=ROOT / "build" / "bench-venv" / "bin" / "python")
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else 15)
    options.elements = options.elements or (1 << 22 if options.quick else 1 << 25)
    build = Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "release"))
    options.program = options.program or build / "tests" / "bench" / "cpu_kernel_bench"
    return options


def main() -> int:
    options = parse()
    ours = Ours(options.program, options.elements, options.gradient)
    ratios = ratio_rows(ours)
    all_variants(ours)
    found, absent, versions = start_peers(options)
    load_before = os.getloadavg()
    variants = list(ours.variants.values()) + found
    try:
        load = take_turns(variants, options.rounds, options.quiet_wait, lambda text: print(text, flush=True))
    finally:
        for variant in variants:
            variant.program.close()
    for variant in variants:
        if variant.lost and variant.program is ours.bench:
            raise SystemExit(f"{variant.name}: {variant.lost}")
    absent += [(v.name, v.lost) for v in found if v.lost]
    found = [v for v in found if not v.lost]
    variants = list(ours.variants.values()) + found
    about = {
        "command": shlex.join(["tests/bench/cpu_kernels.py", *sys.argv[1:]]),
        "options": options,
        "load": load,
        "load_before": load_before,
        "absent": absent,
        "versions": versions,
    }
    report = cpu_kernels_report.Report({v.name: v for v in variants}, ratios + peer_rows(ours, found), about)
    print(report.markdown())
    if options.json:
        options.json.write_text(json.dumps(report.rows()))
    if options.record:
        (HERE / "results").mkdir(exist_ok=True)
        (HERE / "results" / "cpu_kernels.md").write_text(report.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
