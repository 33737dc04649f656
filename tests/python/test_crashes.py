"""A daemon that ends at any place of writing a checkpoint: it comes back at a step that it had promised, or a later one, and
the run goes on to the bit as one that was never stopped."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

import ballast
from ballast import _core
from daemon import ROOT, Daemon
from models import layered

RUN = "crashed"
STEPS = 9
SOURCES = [*(ROOT / "server").rglob("*.cc")]
FAILPOINTS = sorted({name for path in SOURCES for name in re.findall(r'Failpoint\("([^"]+)"\)', path.read_text())})

Weights = list[torch.Tensor]


def go_on(
    daemon: Daemon,
    after_step: Callable[[int, int], None] = lambda step, durable: None,
    durability: Literal["checkpoint", "journal_sync"] = "journal_sync",
) -> Weights:
    """To the last step, from where the run is, with a checkpoint at every other step, and a journal between them.
    `after_step` is told the step and what is durable by then."""
    client = _core.Client.connect(daemon.server, 5.0, 5.0)
    there = client.list_runs()["runs"]
    client.close()
    model = layered(seed=3, width=33)
    optimizer = ballast.AdamW(
        model.parameters(),
        lr=0.01,
        server=daemon.server,
        run=RUN,
        weights="server" if there else None,
        checkpoint_every_steps=2,
        durability=durability,
        reconnect_timeout=1,
    )
    try:
        optimizer.connect()
        for step in range(optimizer.run_status()["step"] + 1, STEPS + 1):
            batch = torch.randn(8, 33, generator=torch.Generator().manual_seed(step))
            model(batch).square().mean().backward()
            optimizer.step()
            # A step of which a checkpoint is due makes none while the one before is being written.
            durable = optimizer.checkpoint() if step % 2 == 0 else 0
            optimizer.wait()
            after_step(step, max(durable, optimizer.last_result.durable_step))
        optimizer.pull()
    finally:
        optimizer.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    with Daemon(storage=tmp_path_factory.mktemp("uncut")) as daemon:
        return go_on(daemon, durability="checkpoint")


def same(ours: Weights, theirs: Weights) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_there_are_failpoints() -> None:
    assert len(FAILPOINTS) >= 10, FAILPOINTS


@pytest.mark.parametrize("visit", [1, 2, 3])
@pytest.mark.parametrize("place", FAILPOINTS)
def test_it_ends_there_and_nothing_that_was_durable_is_lost(
    place: str, visit: int, tmp_path: Path, uncut: Weights
) -> None:
    promised = 0

    def remember(step: int, durable: int) -> None:
        nonlocal promised
        promised = max(promised, durable)

    with Daemon(storage=tmp_path, TEST_FAILPOINT=f"{place}={visit}") as daemon:
        try:
            go_on(daemon, remember)
            daemon.stop()  # the place may be come to while it drains
        except ballast.BallastError:
            pass
        assert daemon.wait() == -9, f"{place} was not come to"
    with Daemon(storage=tmp_path) as daemon:
        client = _core.Client.connect(daemon.server, 5.0, 5.0)
        found = [status["step"] for status in client.list_runs()["runs"]]
        client.close()
        assert found == [] if promised == 0 and not found else found[0] >= promised
        assert same(go_on(daemon), uncut)


@pytest.mark.parametrize("durability", ["checkpoint", "journal_sync"])
def test_it_is_killed_again_and_again(
    durability: Literal["checkpoint", "journal_sync"], tmp_path: Path, uncut: Weights
) -> None:
    draw = random.Random(5)
    for _ in range(8):
        last = draw.randrange(1, STEPS)
        with Daemon(storage=tmp_path) as daemon:

            def kill(step: int, durable: int, last: int = last, daemon: Daemon = daemon) -> None:
                if step == last:
                    daemon.kill()

            try:
                go_on(daemon, kill, durability)
            except ballast.BallastError:
                pass
    with Daemon(storage=tmp_path) as daemon:
        assert same(go_on(daemon, durability=durability), uncut)
