"""tests/bench/kernel_parts.py builds, and every part takes some time."""

from __future__ import annotations

import subprocess
import sys

from daemon import ROOT


def test_every_part_is_printed() -> None:
    command = [sys.executable, str(ROOT / "tests" / "bench" / "kernel_parts.py"), "--isa", "avx2"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    rows = [line.strip("| ").split(" | ") for line in said.stdout.splitlines() if line.startswith("| ")][2:]
    if "not measured" in said.stdout:
        assert not rows
        return
    cycles = {name: float(of_one) for name, _, of_one in rows}
    assert len(cycles) == 9
    whole = cycles["whole default update"]
    assert 0 < cycles["gradients, from bf16"] < whole and 0 < cycles["decode and rule"] < whole
