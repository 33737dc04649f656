"""A real model, fine-tuned through the daemon, ends where torch's AdamW ends: minilm_study/study.py in short."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from daemon import ROOT, plain_environment

PYTHON = ROOT / "build" / "minilm-venv" / "bin" / "python"
STUDY = ROOT / "tests" / "studies" / "minilm_study" / "study.py"
TORCH = "torch AdamW, fused"


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not PYTHON.exists():
        pytest.skip(f"!! {PYTHON} is missing: NO real model is trained; run deploy/setup.sh minilm")
    out = tmp_path_factory.mktemp("minilm")
    done = subprocess.run(
        [PYTHON, STUDY, out, "--quick"], capture_output=True, text=True, timeout=280, env=plain_environment()
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert TORCH in (out / "minilm_study.md").read_text()
    told: dict[str, Any] = json.loads((out / "seed-1.json").read_text())
    return told


def test_fp32_formats_train_as_torch_does(figures: dict[str, Any]) -> None:
    theirs = figures["arms"][TORCH]
    assert len(theirs["losses"]) == figures["steps"] and theirs["held_out"] < figures["before"]
    for commit in ("release", "staged"):
        ours = figures["arms"][f"Ballast, {commit}, fp32 formats"]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert ours["held_out"] == pytest.approx(theirs["held_out"], rel=1e-5)


def test_compressed_state_trains_almost_as_torch_does(figures: dict[str, Any]) -> None:
    ours, theirs = (figures["arms"][name] for name in ("Ballast, release", TORCH))
    assert abs(ours["held_out"] - theirs["held_out"]) < 0.02 * (figures["before"] - theirs["held_out"])


def test_the_trainer_holds_less_and_the_daemon_no_more_than_its_plan(figures: dict[str, Any]) -> None:
    ours, theirs = (figures["arms"][name] for name in ("Ballast, release", TORCH))
    # Moments, 8 bytes a parameter, and gradients, 4, are not there. What a step has under way is, and takes up to 8 of these
    # 12; with all gradients, or one moment, nothing would be left of the 2 that are asked for.
    assert ours["peak"] < theirs["peak"] - 2 * ours["parameters"]
    assert ours["daemon_peak"] - ours["daemon_idle"] < sum(ours["planned"].values()) + (24 << 20)
    assert ours["planned"]["gradients"] < 2.5 * ours["parameters"]
