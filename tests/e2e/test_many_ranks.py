"""Eight trainers of one run with the options as they are."""

import pytest
import warm_python
from daemon import ROOT, plain_environment


@pytest.mark.parametrize(
    "transport, more",
    [
        ("grpc", []),
        ("auto", []),
        ("auto", ["journal_sync"]),
        ("auto", ["journal_sync", "int8"]),
        ("grpc", ["journal_sync", "tls"]),
        ("auto", ["none", "tls"]),
        ("auto", ["journal_sync", "parts"]),
        ("grpc", ["none", "parts"]),
        ("grpc", ["journal_sync", "tokens"]),
        ("auto", ["none", "tokens"]),
    ],
)
def test_eight_ranks_end_with_the_bits_of_one(transport, more):
    program = ROOT / "tests" / "e2e" / "many_ranks.py"
    result = warm_python.run([program, "8", transport, *more], timeout=300, env=plain_environment())
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith(f"8 ranks, transport {transport}, 20 steps")
