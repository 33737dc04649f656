"""The study of loss spikes, in short: what its detectors see in made-up trainings, and that the whole of it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import ROOT, plain_environment

STUDY = ROOT / "tests" / "studies" / "spike_study"
sys.path.insert(0, str(STUDY))

import cells  # noqa: E402
import detectors  # noqa: E402
import frontier  # noqa: E402

STEPS, LAYERS = 600, 3
SPIKES = (300, 420, 540)  # the first steps of made-up ones
LEAD = 4  # steps from the sign to the spike


def made_up(condition: str, task: str, seed: int, foretold: bool) -> dict[str, Any]:
    """A training whose RMS_t jumps before each spike, or only jitters."""
    random = np.random.default_rng(seed)
    rms = 1 + 0.01 * random.random((STEPS, LAYERS))
    spikes = SPIKES if condition != "calm" else ()
    for first in spikes if foretold else ():
        rms[first - LEAD - 1, 1] = 3
    measured = [
        {"layer_rms": list(row), "curvature_ratio": 0.1, "grad_norm": 1 + 0.01 * random.random(), "loss": 1.0}
        for row in rms
    ]
    events = [{"step": first + 4, "kind": "loss", "since": first} for first in spikes]
    cell = {"condition": condition, "task": task}
    return {"cell": cell, "losses": STEPS * [1.0], "events": events, "measured": measured}


def test_a_crossing_counts_once_until_it_is_low_again() -> None:
    series = np.full(300, 0.0)
    series[[119, 120, 130, 135, 200]] = 2  # steps count from 1
    series[121:130] = 1.9  # not low enough to be crossed anew
    assert detectors.crossings(series, 2.0) == [120, 136, 201]
    series[50] = 2  # in the warm-up
    assert detectors.crossings(series, 2.0) == [120, 136, 201]


def test_a_detector_does_not_see_what_comes() -> None:
    """What it says of the first 400 steps does not change with the steps after."""
    whole = detectors.Trace.of(made_up("lr x 10", "text", 1, foretold=True))
    part = detectors.Trace(*(values[:400] for values in vars(whole).values()))
    for (family, variant, seen), (_, _, early) in zip(detectors.detectors(whole), detectors.detectors(part)):
        np.testing.assert_array_equal(seen[:400], early, f"{family}, {variant}")


@pytest.mark.parametrize("foretold", [True, False])
def test_the_frontier_finds_a_sign_where_there_is_one(foretold: bool) -> None:
    runs = [made_up(condition, task, seed, foretold) for seed, (condition, task) in enumerate(
        [(condition, task) for condition in ("calm", "lr x 10") for task in ("text", "caption")])]  # fmt: skip
    rows = frontier.rows(runs)
    column = {name: place for place, name in enumerate(frontier.HEAD)}
    of_rms = [
        row for row in rows if row[column["detector"]] == "log RMS_t" and row[column["chosen for"]] == "precision"
    ]
    assert bool(of_rms) or not foretold
    hindsight = [row for row in rows if row[1].startswith("precision, with hindsight")]
    if foretold:
        assert of_rms[0][4:] == ["1.00", "1.00", "1.00", "1.00", "0.0"], of_rms
    else:  # three spikes in 600 steps: whoever meets one by chance has not met all
        assert all(float(row[7]) < 1 for row in hindsight), hindsight


def test_the_study_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(STUDY / "study.py"), str(tmp_path), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=plain_environment())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    text = (tmp_path / "spike_study.md").read_text()
    assert "## What another detector could have" in text
    made = [json.loads(file.read_text()) for file in (tmp_path / "runs").glob("*.json")]
    assert len(made) == len(cells.all_cells(quick=True))
    plain = [run for run in made if run["cell"]["arm"] == cells.ARMS[0]]
    assert plain and all(len(run["measured"]) == len(run["losses"]) for run in plain)
