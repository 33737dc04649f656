"""The study of layers in 8 bits, in short: its trainings run, and its table says what each held and lost."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from daemon import BUILD, ROOT, plain_environment

STUDY = ROOT / "tests" / "studies" / "layer_study" / "study.py"


def run(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = plain_environment() | {"BALLAST_BUILD": str(BUILD)}
    return subprocess.run(
        [sys.executable, program, *words], capture_output=True, text=True, env=environment, timeout=900
    )


def study(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(STUDY, str(out), "--quick", *words)


def test_the_study_runs(tmp_path: Path) -> None:
    told = study(tmp_path, "--task", "text", "--arm", "fp8 served")
    assert told.returncode == 0, told.stdout + told.stderr
    text = (tmp_path / "layer_study.md").read_text()
    rows = {cells[1]: cells for line in text.splitlines() if len(cells := [c.strip() for c in line.split("|")]) == 9}
    for name in (
        "fp8 served, e5m2 gradients, loss scale 2^14",
        "unit-scaled, fp8 served, e5m2 gradients, no loss scale",
    ):
        assert re.fullmatch(r"[2-5]\.\d{4}", rows[name][2]) and rows[name][7] == "1.000"
    lost = dict(re.findall(r"^\| (.*) \| 0.0000 % \| ([\d.]+) % \|$", text, re.MULTILINE))
    assert float(lost["fp8 served, e5m2 gradients, no loss scale"]) > 20
    assert float(lost["unit-scaled, fp8 served, e5m2 gradients, no loss scale"]) < 2
    assert (tmp_path / "layer_study.png").stat().st_size > 10_000


def test_an_arm_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    told = study(tmp_path, "--arm", "int4")
    assert told.returncode == 1 and "no arm has int4 in its name" in told.stderr


def test_the_deep_study_runs_without_a_gpu(tmp_path: Path) -> None:
    small = "--device cpu --depth 1 --width 64 --batch 2 --steps 20 --rate 0.002".split()
    told = run(STUDY.with_name("deep.py"), str(tmp_path), *small)
    assert told.returncode == 0, told.stdout + told.stderr
    text = (tmp_path / "deep_layers.md").read_text()
    for layers in ("bf16", "bf16, LayerScale of 0", "fp8", "fp8, LayerScale of 0"):
        row = rf"^\| 0.002 \| {layers} \| \d\.\d{{4}}, diverged \| - \|"  # after so few steps
        assert re.search(row, text, re.MULTILINE)
    lost = re.search(r"^\| 0.002 \| ([+-]0\.\d{4}) \| ([+-]0\.\d{4}) \|$", text, re.MULTILINE)
    assert lost and all(abs(float(one)) < 0.1 for one in lost.groups())
    assert (tmp_path / "deep_layers.png").stat().st_size > 10_000
