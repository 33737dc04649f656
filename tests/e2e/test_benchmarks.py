"""The benchmarks of tests/bench/benchmarks.json run, in their short form, and give figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from daemon import BUILD, ROOT

BENCH = ROOT / "tests" / "bench"
sys.path.append(str(BENCH))

import collect  # noqa: E402
import comparison  # noqa: E402

Row = dict[str, Any]
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


@pytest.mark.parametrize(
    ("script", "told", "recorded"),
    [
        ("rows(1.0)", "", 1.0),
        ("rows(2.0); sys.exit(1)", "MISSED a bound: odd", 2.0),
        ("sys.exit(1)", "FAILED: odd", 9.0),
        ("rows(3.0); sys.exit(2)", "FAILED: odd", 9.0),
    ],
)
def test_what_misses_a_bound_is_recorded_and_what_fails_is_not(
    script: str,
    told: str,
    recorded: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    (tmp_path / "results").mkdir()
    results = tmp_path / "results" / "results.json"
    of_both = ROW | {"unit": "ms", "bound": None, "ratio": None, "n": 1}
    results.write_text(json.dumps([of_both | {"benchmark": "odd", "value": 9.0}]))
    (tmp_path / "benchmarks.json").write_text('[{"name": "odd", "script": "odd.py", "records": true}]')
    row = {"name": "a step", "unit": "ms", "bound": None, "ratio": None, "n": 1}
    (tmp_path / "odd.py").write_text(
        f"import json, sys\ndef rows(value):\n"
        f"    with open(sys.argv[2], 'w') as file: file.write(json.dumps([{{**{row}, 'value': value}}]))\n{script}\n"
    )
    monkeypatch.setattr(collect, "HERE", tmp_path)
    monkeypatch.setattr(collect, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["collect.py", "--build", str(tmp_path), "--record"])
    assert collect.main() == (1 if told else 0)
    said = capfd.readouterr().out
    assert told in said and ("MISSED" in said or "FAILED" in said) == bool(told), said
    assert [row["value"] for row in json.loads(results.read_text())] == [recorded]


ROW = {"benchmark": "steps", "name": "a step", "machine": "this", "quick": False, "date": "2026-01-02", "commit": "abc"}


@pytest.mark.parametrize(
    ("then", "now", "worse"),
    [
        ({"ratio": 1.0, "noise": 0.01}, {"ratio": 1.2, "noise": 0.02}, "WORSE by 20 %: steps: a step: 1.2, and 1"),
        ({"ratio": 1.0, "noise": 0.01}, {"ratio": 1.04, "noise": 0.01}, ""),
        ({"ratio": 1.0, "noise": 0.2}, {"ratio": 1.2, "noise": 0.1}, ""),
        ({"ratio": 1.0}, {"ratio": 1.2}, ""),  # its noise is not known
        ({"ratio": 1.2, "noise": 0}, {"ratio": 1.0, "noise": 0}, ""),
        ({"unit": "GB/s", "value": 10, "noise": 0}, {"unit": "GB/s", "value": 8, "noise": 0}, "WORSE by 20 %"),
        ({"unit": "GB/s", "value": 8, "noise": 0}, {"unit": "GB/s", "value": 10, "noise": 0}, ""),
        ({"ratio": 1.0, "noise": 0, "machine": "that"}, {"ratio": 2.0, "noise": 0}, "0 of 1 figures can be compared"),
        ({"ratio": 1.0, "noise": 0, "quick": True}, {"ratio": 2.0, "noise": 0}, "0 of 1 figures can be compared"),
        ({"unit": "nats", "value": 1}, {"unit": "nats", "value": 2}, "0 of 1 figures can be compared"),
        ({"name": "another"}, {}, "0 of 1 figures can be compared"),
    ],
)
def test_what_is_worse_than_in_the_committed_table_is_told(then: Row, now: Row, worse: str) -> None:
    of_both = ROW | {"value": 5.0, "unit": "ms", "ratio": None}
    said = comparison.report([of_both | now], [of_both | then])
    assert worse in said and ("WORSE" in said) == worse.startswith("WORSE"), said


def test_noise_is_half_of_what_lies_between_the_quartiles() -> None:
    assert comparison.noise([9, 10, 10, 10, 12, 8]) == pytest.approx(0.0375)
    assert comparison.noise([1]) == comparison.UNKNOWN_NOISE
