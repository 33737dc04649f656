"""tests/fuzz.py with programs that say what libFuzzer says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from daemon import ROOT

SAYS = """#!/bin/sh
echo "$@" >{folder}/told
cat >&2 <<'END'
#2	INITED cov: 4 ft: 4 corp: 1/1b exec/s: 0 rss: 29Mb
#1200	NEW    cov: 70 ft: 90 corp: 12/300b lim: 4 exec/s: 0 rss: 30Mb L: 2/2 MS: 1 ChangeBit-
{more}
stat::number_of_executed_units: 1234
stat::average_exec_per_sec:     617
END
exit {code}
"""
DONE = "#1234	DONE   cov: 71 ft: 91 corp: 13/310b lim: 4 exec/s: 617 rss: 31Mb\nDone 1234 runs in 2 second(s)"


def fuzz_targets() -> list[str]:
    listing = [sys.executable, ROOT / "tests" / "fuzz.py", "--list"]
    return subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()


def run(folder: Path, more: str, code: int, *words: str) -> subprocess.CompletedProcess[str]:
    program = folder / "edge_fuzz"
    program.write_text(SAYS.format(folder=folder, more=more, code=code))
    program.chmod(0o755)
    command = [sys.executable, ROOT / "tests" / "fuzz.py", "--only", "edge", "--programs", folder, "--seed", "7"]
    command += ["--found", folder / "found", "--failed", folder / "failed", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_table_has_what_the_target_says(tmp_path: Path) -> None:
    said = run(tmp_path, DONE, 0, "--executions", "1000", "--seconds", "60")
    assert said.returncode == 0, said.stderr
    assert re.search(
        r"^\| edge \| 1,234 \| 0 \| [\d,]+ \| 13 \| 71 \| 91 \| 0 \|$", said.stdout, re.MULTILINE
    ), said.stdout
    assert said.stdout.splitlines()[-1] == "1,234 executions, 0 inputs failed"
    told = (tmp_path / "told").read_text().split()
    assert told[:2] == [str(tmp_path / "found" / "edge"), str(ROOT / "tests" / "fuzz" / "corpus" / "edge_fuzz")]
    (runs,) = (int(word.removeprefix("-runs=")) for word in told if word.startswith("-runs="))
    assert 0 < runs < 1000  # its share
    assert "-max_total_time=60" in told and "-seed=7" in told and "-max_len=1024" in told


def test_an_input_that_fails_is_told(tmp_path: Path) -> None:
    slow = "artifact_prefix='x/'; Test unit written to x/slow-unit-12"
    said = run(tmp_path, f"{slow}\nartifact_prefix='x/'; Test unit written to x/crash-34", 77)
    assert said.returncode == 1, said.stderr
    assert "edge: x/crash-34 fails" in said.stdout and "slow-unit" not in said.stdout
    assert said.stdout.splitlines()[-1] == "1,234 executions, 1 inputs failed"


def test_what_was_interrupted_is_told_as_far_as_it_came(tmp_path: Path) -> None:
    said = run(tmp_path, "== libFuzzer: run interrupted; exiting", 72)
    assert said.returncode == 0, said.stderr
    assert re.search(
        r"^\| edge \| 1,234 \| 0 \| [\d,]+ \| 12 \| 70 \| 90 \| 0 \|$", said.stdout, re.MULTILINE
    ), said.stdout
    assert "1,234 executions together, of 100,000,000. Interrupted before their share: edge." in said.stdout
    everything = [sys.executable, ROOT / "tests" / "fuzz.py", "--programs", tmp_path, "--found", tmp_path / "found"]
    everything += ["--failed", tmp_path / "failed"]  # but there is none beside edge_fuzz, the first
    said = subprocess.run(everything, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0 and "\n1,234 executions" in said.stdout, said.stdout + said.stderr


def test_recorded_runs_add_up(tmp_path: Path) -> None:
    page, names = tmp_path / "fuzz.md", fuzz_targets()
    run(tmp_path, DONE, 0)
    for name in set(names) - {"edge"}:
        shutil.copy(tmp_path / "edge_fuzz", tmp_path / f"{name}_fuzz")
    command = [sys.executable, ROOT / "tests" / "fuzz.py", "--programs", tmp_path, "--found", tmp_path / "found"]
    command += ["--failed", tmp_path / "failed", "--page", page, "--record"]
    for seed in ("7", "8"):
        said = subprocess.run([*command, "--seed", seed], capture_output=True, text=True, timeout=60)
        assert said.returncode == 0, said.stderr
    table = page.read_text().partition("\n## ")[0]
    said = subprocess.run([*command, "--seed", "9", "--only", "edge"], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0 and page.read_text().startswith(table), said.stderr
    executions = 1234 * len(names)
    line = re.compile(rf"^\| 20\d\d-\d\d-\d\d \| all \| 7 \| {executions:,} \| 0 \|$", re.MULTILINE)
    assert line.search(page.read_text()), page.read_text()
    total = 2 * executions + 1234
    assert page.read_text().endswith(f"| edge | 9 | 1,234 | 0 |\n\n{total:,} executions in all.\n"), page.read_text()
    assert "seed 8, on" in page.read_text() and "seed 7, on" not in page.read_text()


def test_a_program_that_cannot_run_is_no_target_that_passed(tmp_path: Path) -> None:
    said = run(tmp_path, "no such flag", 1)
    assert said.returncode == 2 and "edge_fuzz ended with 1" in said.stderr and "no such flag" in said.stderr
    missing = [sys.executable, ROOT / "tests" / "fuzz.py", "--only", "shm", "--programs", tmp_path]
    said = subprocess.run(
        [*missing, "--failed", tmp_path, "--found", tmp_path], capture_output=True, text=True, timeout=60
    )
    assert said.returncode == 2 and "deploy/setup.sh build fuzz fuzzers" in said.stderr


def test_every_target_of_the_build_is_one_of_the_table() -> None:
    built = re.findall(r"^ballast_fuzz\((\w+)_fuzz ", (ROOT / "tests/fuzz/CMakeLists.txt").read_text(), re.MULTILINE)
    assert sorted(fuzz_targets()) == sorted(built)
