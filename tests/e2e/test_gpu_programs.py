"""What tests/gpu_check.sh runs of the Python client on a GPU, on a CPU: the programs work, and all that they check holds."""

import json
import subprocess
import sys

import pytest
from daemon import BALLASTD, ROOT, plain_environment


@pytest.fixture
def folder(tmp_path):
    """As `deploy/setup.sh portable` leaves it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ballastd").symlink_to(BALLASTD)
    return tmp_path


@pytest.mark.parametrize(
    "program, timed, least",
    [("gpu_trainer.py", "step_s", 10), ("gpu_follower.py", "ms", 6), ("gpu_layers.py", "ms", 10)],
)
def test_all_checks_hold_on_a_cpu_and_something_is_timed(folder, program, timed, least):
    command = [sys.executable, ROOT / "tests/bench" / program, folder, "--device", "cpu", "--tiny"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, env=plain_environment())
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    checks = [row for row in rows if "check" in row]
    assert len(checks) >= least and all(row["holds"] for row in checks), ran.stdout
    assert any(timed in row for row in rows), ran.stdout


@pytest.mark.parametrize("program", ["gpu_trainer.py", "gpu_follower.py", "gpu_layers.py"])
def test_a_folder_without_a_daemon_is_skipped_loudly(tmp_path, program):
    command = [sys.executable, ROOT / "tests/bench" / program, tmp_path, "--device", "cpu"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=plain_environment())
    assert ran.returncode == 77 and "!! SKIPPED: there is no" in ran.stdout, ran.stdout + ran.stderr
