"""Eight trainers of one run with the options as they are."""

import subprocess
import sys

import pytest
from daemon import ROOT, plain_environment


@pytest.mark.parametrize("transport, durability", [("grpc", None), ("auto", None), ("auto", "journal_sync")])
def test_eight_ranks_end_with_the_bits_of_one(transport, durability):
    command = [sys.executable, ROOT / "tests" / "e2e" / "many_ranks.py", "8", transport]
    if durability:
        command.append(durability)
    environment = {**plain_environment(), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith(f"8 ranks, transport {transport}, 20 steps")
