"""The example of a reader: an evaluator beside a trainer."""

import re
import shutil
import subprocess
import sys

import pytest

from daemon import ROOT, Daemon, plain_environment

SCRIPT = ROOT / "client" / "python" / "examples" / "follow.py"


def run(*words):
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=plain_environment())


def test_the_evaluator_sees_the_loss_fall(tmp_path):
    if not shutil.which("bible"):
        pytest.skip("the text is missing: package bible-kjv")
    with Daemon(tmp_path) as daemon:
        told = run("--steps", 12, "--every", 4, "--server", daemon.server)
    assert told.returncode == 0, told.stderr
    lines = [
        re.fullmatch(r"step +(\d+)  held-out loss ([\d.]+)  .* MiB  .* s old", line)
        for line in told.stdout.splitlines()
    ]
    assert lines and all(lines), told.stdout
    steps, losses = [int(line[1]) for line in lines], [float(line[2]) for line in lines]
    assert steps == sorted(set(steps)) and steps[-1] == 12
    assert losses[-1] < losses[0]


def test_a_trainer_that_cannot_train_ends_both():
    told = run("--steps", 2, "--server", "127.0.0.1:1")
    assert told.returncode == 1 and "no ballastd answers at 127.0.0.1:1" in told.stderr
    assert "the trainer has ended before its first step" in told.stderr


def test_wrong_words_are_refused():
    refused = run("--every", 0)
    assert refused.returncode == 2 and "at least 1" in refused.stderr
