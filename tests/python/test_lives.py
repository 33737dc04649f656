"""A daemon that is killed or drained at random moments: lives.py, in short."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from crashing import SMALL, Promises, finish, go_on
from daemon import Daemon


@pytest.mark.parametrize("what", ["kills", "drains"])
def test_the_training_goes_on_as_if_nothing_had_been(what: str) -> None:
    command = [sys.executable, Path(__file__).with_name("lives.py"), what, "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith(f"4 {what}, ")


def test_a_daemon_that_has_drained_is_gone(tmp_path: Path) -> None:
    """gRPC's own end would wait for a thread that polls connections, one time in four for the ten seconds of its poll."""
    training = replace(SMALL, width=1000)  # whose weights are more than a socket takes at once
    finish(tmp_path, training)
    for _ in range(16):
        with Daemon(storage=tmp_path) as daemon:
            go_on(daemon, training, Promises())
            daemon.stop()
            assert daemon.wait(timeout_s=9) == 0
