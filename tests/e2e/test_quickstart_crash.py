"""The quick start whose daemon and trainer are killed."""

import re
import subprocess
import sys

from daemon import BALLASTD, ROOT, plain_environment

SCRIPT = ROOT / "deploy" / "quickstart_crash.py"


def crash(tmp_path, *flags):
    command = [sys.executable, SCRIPT, f"--daemon={BALLASTD}", f"--results={tmp_path}", *flags]
    environment = {**plain_environment(), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_it_ends_with_the_bits_of_an_undisturbed_training(tmp_path):
    result = crash(tmp_path, "--steps=24")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"after step \d+ of 24; both came back at step [12]0\n", result.stdout), result.stdout
    assert "the same to the bit\n" in result.stdout


def test_too_few_steps_are_refused(tmp_path):
    result = crash(tmp_path, "--steps=3")
    assert result.returncode == 2 and "--steps: at least 20" in result.stderr


def test_a_daemon_that_does_not_start_is_named(tmp_path):
    result = crash(tmp_path, "--daemon=/bin/false")
    assert result.returncode == 1 and "the daemon did not start; its log is" in result.stderr
