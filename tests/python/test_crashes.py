"""A daemon that ends at any place of writing a checkpoint: it comes back at a step that it had promised, or a later one, and
the run goes on to the bit as one that was never stopped."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

import ballast
from crashing import FAILPOINTS, SMALL, Promises, come_back, finish, go_on
from daemon import Daemon


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> str:
    return finish(tmp_path_factory.mktemp("uncut"), replace(SMALL, durability="checkpoint"))


def test_there_are_failpoints() -> None:
    assert len(FAILPOINTS) >= 13, FAILPOINTS


@pytest.mark.parametrize("visit", [1, 2, 3])
@pytest.mark.parametrize("place", FAILPOINTS)
def test_it_ends_there_and_nothing_that_was_durable_is_lost(place: str, visit: int, tmp_path: Path, uncut: str) -> None:
    promises = Promises()
    with Daemon(storage=tmp_path, TEST_FAILPOINT=f"{place}={visit}") as daemon:
        try:
            go_on(daemon, SMALL, promises)
            daemon.stop()  # the place may be come to while it drains
        except ballast.BallastError:
            pass
        assert daemon.wait() == -9, f"{place} was not come to"
    come_back(tmp_path, promises.durable)
    assert finish(tmp_path, SMALL) == uncut


@pytest.mark.parametrize("durability", ["checkpoint", "journal", "journal_sync"])
def test_it_is_killed_again_and_again(
    durability: Literal["checkpoint", "journal", "journal_sync"], tmp_path: Path, uncut: str
) -> None:
    draw = random.Random(5)
    training = replace(SMALL, durability=durability)
    for _ in range(8):
        last = draw.randrange(1, SMALL.last)
        with Daemon(storage=tmp_path) as daemon:

            def kill(step: int, promises: int, last: int = last, daemon: Daemon = daemon) -> None:
                if step == last:
                    daemon.kill()

            try:
                go_on(daemon, training, Promises(kill))
            except ballast.BallastError:
                pass
    assert finish(tmp_path, training) == uncut
