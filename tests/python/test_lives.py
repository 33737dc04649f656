"""A daemon that is killed or drained at random moments: lives.py, in short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("what", ["kills", "drains"])
def test_the_training_goes_on_as_if_nothing_had_been(what: str) -> None:
    command = [sys.executable, Path(__file__).with_name("lives.py"), what, "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith(f"4 {what}, ")
