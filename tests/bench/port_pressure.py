#!/usr/bin/env python3
"""Why a kernel is as fast as it is: what its two hot loops ask of a processor's ports, by llvm-mca's models.

    port_pressure.py [--isa avx2|avx512] [--mcpu NAME] [--llvm-mca PROGRAM]

Compiles AdamW with split24 and companded8 alone, with the isa's own options of kernels/CMakeLists.txt, and takes the
loops over a row's eight blocks of 32: apply (decode, update, largest magnitudes) and encode. Left out are the
widening of gradients, what is done once a row, and memory: the cycles are a bound from below. Beside them stands what
the divider alone allows, three divisions and a root, timed on this processor where it has the isa. Skips, saying so,
without llvm-mca (Debian: package llvm, group bench of deploy/packages.sh).
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = ROOT / "build" / "port-pressure"
# The type, a processor that llvm-mca 14 models, what Linux calls the widest instructions that are needed, elements.
ISAS = {"avx2": ("Avx2Vector", "znver3", "avx2", 8), "avx512": ("Avx512Vector", "icelake-server", "avx512vl", 16)}
APPLY = ("apply, statistics off", "apply, statistics on")
ENCODE = ("encode, nearest", "encode, stochastic")
SOURCE = """#include "kernels/simd/{isa}.h"
#include "kernels/cpu/cpu_tables.h"

namespace ballast::kernels {{
void Run(const Update& update, TileStatistics* statistics) {{
  KernelEntry<{type}, AdamW, Split24, Companded8State>::RunUpdate(update, 0, 1, statistics);
}}
}}  // namespace ballast::kernels
"""


def run(*command) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(f"failed: {shlex.join(map(str, command))}\n{done.stderr[-3000:]}")
    return done.stdout


def isa_command(isa: str) -> list[str]:
    """The compiler and the options that kernels/CMakeLists.txt gives the isa's unit, without files."""
    run("cmake", "-S", "kernels", "-B", WORK, "-G", "Ninja", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON")
    units = json.loads((WORK / "compile_commands.json").read_text())
    unit = next(unit for unit in units if unit["file"].endswith(f"cpu/{isa}.cc"))
    words = shlex.split(unit["command"])
    return words[: words.index("-o")]


def innermost_loops(assembly: list[str], instruction: str) -> list[list[str]]:
    """The instructions of each loop that has `instruction` and no smaller loop that has it too."""
    labels = {line.rstrip(":"): i for i, line in enumerate(assembly) if line.startswith(".L")}
    loops = []
    for last, line in enumerate(assembly):
        jump = re.match(r"\s+j\w+\s+(\.L\w+)", line)
        first = labels.get(jump[1], last) if jump else last
        if any(instruction in line for line in assembly[first:last]):
            loops.append((first, last))
    least = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [[line for line in assembly[a : b + 1] if re.match(r"\s+[a-z]", line)] for a, b in least]


def hot_loops(assembly: list[str]) -> dict[str, tuple[list[str], int]]:
    """By name, the instructions and how many vectors of elements one turn handles: only the update takes roots, and of
    the loops that divide without one only the encoders are long. More work, more instructions."""
    update = sorted(innermost_loops(assembly, "vsqrtps"), key=len)
    encode = sorted((x for x in innermost_loops(assembly, "vdivps") if len(x) > 40), key=len)
    encode = [loop for loop in encode if not any("vsqrtps" in line for line in loop)]
    found = {}
    for names, loops, mark in ((APPLY, update, "vsqrtps"), (ENCODE, encode, "vdivps")):
        if len(loops) == len(names):
            found |= {name: (loop, sum(mark in line for line in loop)) for name, loop in zip(names, loops)}
        else:
            print(f"!! {len(loops)} loops instead of {len(names)} for: {', '.join(names)}")
    return found


def analyse(llvm_mca: str, mcpu: str, body: list[str], elements: int) -> dict:
    file = WORK / "loop.s"
    file.write_text("\n".join(body) + "\n")
    said = run(llvm_mca, f"-mcpu={mcpu}", "-iterations=200", file)
    number = {name: float(value) for name, value in re.findall(r"^(Total Cycles|Total uOps):\s+(\d+)", said, re.M)}
    ports = re.findall(r"^\[([\d.]+)\]\s+- (\w+)$", said, re.M)
    pressure = said.split("Resource pressure per iteration:\n")[1].splitlines()[1].split()
    loads = {f"{name}": 0.0 if load == "-" else float(load) for (_, name), load in zip(ports, pressure)}
    return {
        "instructions": len(body) / elements,
        "uops": number["Total uOps"] / 200 / elements,
        "cycles": number["Total Cycles"] / 200 / elements,
        "ports": sorted(((load / elements, name) for name, load in loads.items()), reverse=True)[:4],
    }


def divider(isa: str, command: list[str]) -> tuple[float, float] | None:
    """Nanoseconds an element and the clock in GHz, where this processor has the isa."""
    type_name, _, flag, _ = ISAS[isa]
    if flag not in Path("/proc/cpuinfo").read_text():
        return None
    program = WORK / "divider_floor"
    isa_options = ["-include", f"kernels/simd/{isa}.h", f"-DBALLAST_LANE={type_name}"]
    run(*command, *isa_options, HERE / "divider_floor.cc", "-o", program)
    return tuple(map(float, run(program).split()))


def print_bounds(isa: str, cycles: dict[str, float], measured: tuple[float, float] | None):
    for rounding in ("nearest", "stochastic"):
        for level in ("off", "on"):
            parts = [cycles.get(f"apply, statistics {level}"), cycles.get(f"encode, {rounding}")]
            if not all(parts):
                continue
            text = f"{rounding}, statistics {level}: at least {sum(parts):.2f} cycles a parameter"
            if measured:
                text += f", so at most {1e3 * measured[1] / sum(parts):.0f} Mparam/s at the {measured[1]:.2f} GHz seen"
            print(text + ".")
    if not measured:
        print(f"Divider floor and clock: not measured: this processor has no {ISAS[isa][2]}.")
        return
    nanoseconds, gigahertz = measured
    print(
        f"Divider floor (3 divisions, 1 root), measured: {nanoseconds:.3f} ns or {nanoseconds * gigahertz:.2f} cycles "
        f"a parameter, {1e3 / nanoseconds:.0f} Mparam/s."
    )


def report(isa: str, mcpu: str, llvm_mca: str):
    command = isa_command(isa)
    source, assembly = WORK / f"{isa}.cc", WORK / f"{isa}.s"
    source.write_text(SOURCE.format(isa=isa, type=ISAS[isa][0]))
    run(*command, "-g0", "-S", source, "-o", assembly)
    loops = hot_loops(assembly.read_text().splitlines())
    print(f"AdamW split24 companded8, isa {isa}, model {mcpu}; a parameter each, memory and gradients left out\n")
    print("| loop | instructions | uops | cycles | busiest ports |\n| --- | --- | --- | --- | --- |")
    cycles = {}
    for name, (body, vectors) in loops.items():
        found = analyse(llvm_mca, mcpu, body, vectors * ISAS[isa][3])
        cycles[name] = found["cycles"]
        ports = ", ".join(f"{port} {load:.2f}" for load, port in found["ports"])
        print(f"| {name} | {found['instructions']:.1f} | {found['uops']:.1f} | {found['cycles']:.2f} | {ports} |")
    print()
    print_bounds(isa, cycles, divider(isa, command))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", choices=ISAS, action="append")
    parser.add_argument("--mcpu", help="llvm-mca's name of the processor")
    parser.add_argument("--llvm-mca", default=shutil.which("llvm-mca-14") or shutil.which("llvm-mca"))
    options = parser.parse_args()
    if not options.llvm_mca:
        print("!! SKIPPED: no llvm-mca here (deploy/packages.sh bench)")
        return
    for isa in options.isa or ISAS:
        report(isa, options.mcpu or ISAS[isa][1], options.llvm_mca)
        print()


if __name__ == "__main__":
    main()
