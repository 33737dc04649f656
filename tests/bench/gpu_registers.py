#!/usr/bin/env python3
"""What ptxas makes of each GPU kernel: registers, shared memory, and what it spills.

    tests/bench/gpu_registers.py [--arch NN]... [--output FILE]

Compiles every CUDA source of kernels/ as the preset dev does, for the architectures named (default 80, 90, 100), and
writes the table to FILE (default tests/bench/results/gpu_registers.md). Needs nvcc and build/dev/compile_commands.json,
no GPU. Exits 1 where a kernel spills.
"""

import argparse
import concurrent.futures
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ROOT / "build" / "dev" / "compile_commands.json"
DEFAULT = "UpdateOrdinaryTiles<AdamW, Split24, Companded8State>"
# What ptxas says of one kernel, after its name.
NAME = re.compile(r"Compiling entry function '(\w+)'")
SPILLS = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
USED = re.compile(r"Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?")


def commands(arch: str) -> list[list[str]]:
    """The compiler's command for each CUDA source, for one architecture, that keeps nothing but what ptxas says."""
    found = []
    for unit in json.loads(COMMANDS.read_text()):
        if not unit["file"].startswith(str(ROOT / "kernels")) or not unit["file"].endswith(".cu"):
            continue
        words = [word for word in shlex.split(unit["command"]) if not word.startswith("--generate-code")]
        words = words[: words.index("-x")] + [
            "-x",
            "cu",
            unit["file"],
            "-cubin",
            "-o",
            os.devnull,
        ]
        found.append([*words, f"-arch=sm_{arch}", "-Xptxas=-v"])
    return found


def compile_unit(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    return done.stdout + done.stderr


def short(name: str) -> str:
    """A demangled kernel without namespaces, return type and arguments."""
    name = re.sub(r"\b(?:\w+::)+", "", name.split("(")[0])
    return re.sub(r"Triple<(.*?)\s*>", r"\1", name.removeprefix("void ")).replace(" >", ">")


def kernels(arch: str) -> dict[str, dict[str, int]]:
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        said = "\n".join(pool.map(compile_unit, commands(arch)))
    _, *words = NAME.split(said)  # name, what is said of it, the next name...
    mangled, texts = words[::2], words[1::2]
    names = subprocess.run(
        ["c++filt"],
        input="\n".join(mangled),
        capture_output=True,
        text=True,
        check=True,
    )
    found = {}
    for name, text in zip(names.stdout.splitlines(), texts, strict=True):
        row = SPILLS.search(text).groupdict() | USED.search(text).groupdict()
        found[short(name)] = {key: int(value or 0) for key, value in row.items()}
    if len(found) != len(mangled):
        sys.exit(f"{len(mangled)} kernels, but {len(found)} names")
    return found


def table(by_arch: dict[str, dict[str, dict[str, int]]]) -> list[str]:
    lines = [
        "| architecture | kernels | updates | registers: median | most | default recipe | others, most | shared memory, most "
        "| bytes spilled |",
        "| --- |" + " ---: |" * 8,
    ]
    for arch, rows in by_arch.items():
        updates = [row["registers"] for name, row in rows.items() if name.startswith("Update")]
        others = [row["registers"] for name, row in rows.items() if not name.startswith("Update")]
        spilled = sum(row["stores"] + row["loads"] for row in rows.values())
        lines.append(
            f"| sm_{arch} | {len(rows)} | {len(updates)} | {statistics.median(updates):.0f} | {max(updates)} "
            f"| {rows[DEFAULT]['registers']} | {max(others)} | {max(row['shared'] for row in rows.values())} | {spilled} |"
        )
    return lines


def details(by_arch: dict[str, dict[str, dict[str, int]]]) -> list[str]:
    arches = list(by_arch)
    lines = [
        "| kernel | " + " | ".join(f"sm_{arch}" for arch in arches) + " |",
        "| --- |" + " ---: |" * len(arches),
    ]
    for name in sorted(by_arch[arches[0]]):
        lines.append(f"| {name} | " + " | ".join(str(by_arch[arch][name]["registers"]) for arch in arches) + " |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", help="compute capability without its dot")
    parser.add_argument("--output", type=Path, default=ROOT / "tests/bench/results/gpu_registers.md")
    flags = parser.parse_args()
    by_arch = {arch: kernels(arch) for arch in flags.arch or ["80", "90", "100"]}
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release ([\d.]+)", version).group(1)
    text = [
        "# Registers of the GPU kernels",
        "",
        f"By `tests/bench/gpu_registers.py`, nvcc {release}. Counted by ptxas; no GPU took part.",
        "",
        *table(by_arch),
        "",
        "Registers of each kernel:",
        "",
        *details(by_arch),
    ]
    flags.output.write_text("\n".join(text) + "\n")
    print("\n".join(table(by_arch)))
    spills = [n for rows in by_arch.values() for n, row in rows.items() if row["stores"] + row["loads"] + row["stack"]]
    return 1 if spills else 0


if __name__ == "__main__":
    sys.exit(main())
