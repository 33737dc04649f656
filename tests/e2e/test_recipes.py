"""The quick start's model in every recipe: through the formats that the daemon serves, beside its model in fp32."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from daemon import ROOT, Daemon, plain_environment

SCRIPT = ROOT / "client" / "python" / "examples" / "king_james.py"
STEPS = 12
# What the trainer holds of each parameter, in bytes: the embeddings, norms and biases in fp32, the rest in one byte.
BYTES = {"switchback": 1.31, "fp8": 1.31, "unit-scaled": 1.22, "collage": 2.0}


def train(recipe: str, optimizer: str, server: str, folder: Path) -> Any:
    figures = folder / f"{recipe}-{optimizer}.json"
    command = [sys.executable, SCRIPT, "--recipe", recipe, "--optimizer", optimizer, "--steps", STEPS]
    command += ["--server", server, "--json", figures, "--threads", 1]
    subprocess.run(
        [str(word) for word in command], check=True, capture_output=True, env=plain_environment(), timeout=600
    )
    return json.loads(figures.read_text())


@pytest.fixture(scope="module")
def in_fp32(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By recipe."""
    folder = tmp_path_factory.mktemp("torch")
    plain = train("plain", "torch", "none", folder)
    return {name: plain for name in BYTES} | {"unit-scaled": train("unit-scaled", "torch", "none", folder)}


@pytest.mark.parametrize("recipe", BYTES)
def test_a_recipe_ends_near_its_model_in_fp32(recipe: str, in_fp32: dict[str, Any], tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        ours = train(recipe, "ballast", daemon.server, tmp_path)
    theirs = in_fp32[recipe]
    held = {kind: count / ours["parameters"] for kind, count in ours["trainer_bytes"].items()}
    assert held["parameters"] == pytest.approx(BYTES[recipe], abs=0.01)
    assert held["gradients"] == held["state"] == 0
    assert ours["evaluations"][-1]["held_out"] == pytest.approx(theirs["evaluations"][-1]["held_out"], rel=0.02)
    assert ours["evaluations"][-1]["held_out"] < 0.97 * ours["evaluations"][0]["held_out"]


def test_an_unknown_recipe_is_refused_by_name() -> None:
    refused = subprocess.run([sys.executable, SCRIPT, "--recipe", "int4"], capture_output=True, text=True)
    assert refused.returncode == 2 and "invalid choice: 'int4'" in refused.stderr and "switchback" in refused.stderr
