"""A daemon that is killed and comes back without its runs: every trainer is told, and none hangs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ballast import _core
from daemon import Daemon
from models import until

TOLD = (
    r"Rejected the daemon at \S+ restarted and no longer holds run '{run}' .*your last checkpoint: start every trainer"
)


@pytest.fixture
def doomed() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon


def test_two_trainers_end_with_what_happened_and_what_to_do(
    run: str, doomed: Daemon, program: Callable[..., Any]
) -> None:
    ranks = [program(name, doomed.server, run) for name in ("rank_0", "rank_1")]
    for rank in ranks:
        assert (rank.hear(), rank.hear()) == ("waits", "trains")
    doomed.kill()
    with Daemon(doomed.port):
        for rank in ranks:
            assert re.match(TOLD.format(run=run), rank.hear())
            assert rank.end() == 0


def test_one_that_waits_for_rank_0_is_told_too(run: str, doomed: Daemon, program: Callable[..., Any]) -> None:
    waits = program("rank_1", doomed.server, run)
    assert waits.hear() == "waits"
    client = _core.Client.connect(doomed.server, 5.0, 5.0)
    # Its stream is open; before, it would be attaching still, which fails in other words.
    until(
        lambda: any(
            s["run_id"] == run and "connected, transport" in "".join(s["ranks"]) for s in client.list_runs()["runs"]
        )
    )
    client.close()
    doomed.kill()
    with Daemon(doomed.port):
        assert re.match(TOLD.format(run=run), waits.hear())
        assert waits.end() == 0
