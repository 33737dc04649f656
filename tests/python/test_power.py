"""The power is cut while a daemon writes, on real file systems: power.py, in short. Needs root."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from power import missing


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_no_power_cut_takes_what_was_durable(kind: str) -> None:
    if lacking := missing([kind]):
        pytest.skip(f"NO POWER WAS CUT on {kind}, for lack of {', '.join(lacking)}")
    # What is mounted is seen by that process and its children alone, and goes with them.
    own_mounts = ["unshare", "--mount", "--propagation", "private"]
    command = [*own_mounts, sys.executable, Path(__file__).with_name("power.py"), "--short", "--fs", kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{kind}: 10 cuts, nothing lost; left-out syncs that were noticed: all" in result.stdout
