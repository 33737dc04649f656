"""The benchmarks of tests/bench/benchmarks.json run, in their short form, and give figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from daemon import BUILD, ROOT

BENCH = ROOT / "tests" / "bench"
# These train, for one to three minutes even in their short form: `tests/bench/run.sh --quick` runs them.
LONG = {"closed loop", "overlap", "quick start study", "snapshots"}
NAMES = [entry["name"] for entry in json.loads((BENCH / "benchmarks.json").read_text()) if entry["name"] not in LONG]


@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    command = [sys.executable, BENCH / "collect.py", "--build", BUILD, "--only", name, "--quick", "--json", rows]
    said = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert said.returncode == 0, said.stdout + said.stderr
    figures = json.loads(rows.read_text())
    assert any(row["value"] > 0 for row in figures), figures  # a stall of 0 is a figure, too
