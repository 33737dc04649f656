"""A connection that is lost at any moment, from the run's creation to the last pull: the bits are those of one that was not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ballast
from ballast import _core
from daemon import Daemon
from models import same_bits, weights_of
from proxy import Proxy

CUTS = 10  # each way


def train(server: str, run: str) -> list[torch.Tensor]:
    """Uploads, makes two steps of two micro-batches, and pulls; then another trainer takes the weights."""
    torch.manual_seed(1)
    model, other = (nn.Sequential(nn.Linear(8, 600), nn.Linear(600, 8)) for _ in range(2))
    options = {
        "server": server,
        "run": run,
        "transport": "grpc",
        "gradient_accumulation_steps": 2,
        "reconnect_timeout": 60,
    }
    with ballast.AdamW(model.named_parameters(), **options) as optimizer:
        for _ in range(2):
            for micro in range(2):
                model(torch.full((2, 8), 1.0 + micro)).square().mean().backward()
            optimizer.step()
            assert optimizer.last_result is not None and optimizer.last_result.applied
        optimizer.pull()
    with ballast.AdamW(other.named_parameters(), **options, weights="server") as follower:
        assert follower.last_result is not None and follower.last_result.step == 2
    assert same_bits(weights_of(model), weights_of(other))
    return weights_of(model)


@pytest.mark.parametrize("way", ["requests", "answers"])
def test_a_cut_at_any_moment_changes_no_bit(way: str, daemon: Daemon, run: str, admin: _core.Client) -> None:
    with Proxy(daemon.server) as whole:
        expected = train(whole.server, run)
        nbytes = whole.upstream_bytes if way == "requests" else whole.downstream_bytes
    for i in range(CUTS):
        name, where = f"{run}-{i}", nbytes * (2 * i + 1) // (2 * CUTS + 2)  # the same bytes take a little more or less
        with Proxy(daemon.server) as proxy:
            cut: Callable[[int], None] = proxy.cut_after if way == "requests" else proxy.cut_after_answers
            cut(where)
            assert same_bits(train(proxy.server, name), expected), f"cut after {where} of {nbytes} bytes of {way}"
            assert proxy.was_cut.is_set()
        admin.delete_run(name, force=True)


@pytest.mark.parametrize("way", ["requests", "answers"])
@pytest.mark.parametrize("where", range(50, 1500, 250))
def test_a_cut_in_the_first_messages_changes_no_bit(way: str, where: int, daemon: Daemon, run: str) -> None:
    with Proxy(daemon.server) as proxy:
        (proxy.cut_after if way == "requests" else proxy.cut_after_answers)(where)
        cut = train(proxy.server, run)
        assert proxy.was_cut.is_set()
    assert same_bits(cut, train(daemon.server, f"{run}-uncut"))
