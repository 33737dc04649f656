"""A daemon of three whose network fails in the middle of a step."""

import subprocess
import sys

import pytest
from daemon import ROOT, plain_environment
from partitions import lacking


@pytest.mark.skipif(bool(lacking()), reason=f"network namespaces: {lacking()}")
def test_a_daemon_that_hears_nothing_for_a_while_changes_no_bit():
    command = [sys.executable, ROOT / "tests" / "e2e" / "partitions.py", "deaf"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=plain_environment())
    assert result.returncode == 0, result.stdout + result.stderr
    assert "deaf: the bits of one daemon that nothing disturbs" in result.stdout
