#!/usr/bin/env python3
"""Where a CPU kernel's time goes, part by part, on this processor: the default update, in cache, on one thread.

    kernel_parts.py [--isa avx2|avx512]

Compiles kernel_parts.cc with the options that kernels/CMakeLists.txt gives each isa's unit, runs it where the processor
has the isa, and prints nanoseconds and cycles a parameter. A part is what an update takes longer than one without it.
llvm-mca's models are not used: that of znver4 has a division block the multiplier beside it, which it does not.
"""

import argparse
import json
import shlex
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = ROOT / "build" / "kernel-parts"
# The vector type, and what Linux calls the widest instructions that are needed.
ISAS = {"avx2": ("Avx2Vector", "avx2"), "avx512": ("Avx512Vector", "avx512vl")}


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


def report(isa: str) -> None:
    vector, flag = ISAS[isa]
    program = WORK / f"kernel_parts_{isa}"
    of_isa = ["-include", f"kernels/simd/{isa}.h", f"-DBALLAST_VECTOR={vector}"]
    run(*isa_command(isa), *of_isa, HERE / "kernel_parts.cc", "-o", program)
    if flag not in Path("/proc/cpuinfo").read_text().split():
        print(f"{isa}: compiled; not measured, since this processor has no {flag}\n")
        return
    rows = [line.split("\t") for line in run(program).splitlines()]
    clock = float(rows.pop()[1])
    print(f"AdamW split24 companded8 stochastic, {isa}, at the {clock:.2f} GHz seen; a parameter each\n")
    print("| part | ns | cycles |\n| --- | --- | --- |")
    for name, nanoseconds in rows:
        print(f"| {name} | {float(nanoseconds):.3f} | {float(nanoseconds) * clock:.2f} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", choices=ISAS, action="append")
    for isa in parser.parse_args().isa or ISAS:
        report(isa)


if __name__ == "__main__":
    main()
