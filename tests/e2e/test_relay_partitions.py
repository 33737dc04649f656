"""A tree of relays, of which one loses its network, and readers of all of them."""

import subprocess
import sys

import pytest
from daemon import ROOT, plain_environment
from partitions import lacking


@pytest.mark.skipif(bool(lacking()), reason=f"network namespaces: {lacking()}")
@pytest.mark.parametrize("kind", ["cut", "deaf", "mute", "slow"])
def test_readers_end_with_the_trainers_bits_and_nobody_else_is_harmed(kind):
    command = [sys.executable, ROOT / "tests" / "e2e" / "relay_partitions.py", kind]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=plain_environment())
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{kind}: " in result.stdout and "each the trainer's to the bit" in result.stdout
