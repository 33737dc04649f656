"""weights="server" of a run that is on the daemon's disk alone, and of one that is nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ballast
from daemon import Daemon
from durable import RUN, runs_of, train
from models import layered, same_bits, weights_of


def test_a_run_whose_memory_was_freed_is_read_back(tmp_path: Path) -> None:
    with Daemon(storage=tmp_path) as daemon:
        train(daemon.server, 3)
        model, other = (layered(seed=seed, width=33) for seed in (1, 2))
        options = {"lr": 0.01, "server": daemon.server, "run": RUN, "weights": "server"}
        ballast.AdamW(model.parameters(), **options).close()
        ballast.delete_run(RUN, server=daemon.server, keep_checkpoints=True)
        assert runs_of(daemon.server) == []
        with ballast.AdamW(other.parameters(), **options) as optimizer:
            assert same_bits(weights_of(other), weights_of(model))
            other(torch.ones(1, 33)).sum().backward()
            optimizer.step()
            assert optimizer.last_result is not None and optimizer.last_result.step == 4


@pytest.mark.parametrize("stored", [False, True])
def test_of_a_run_that_is_nowhere_it_is_told_what_begins_one(stored: bool, tmp_path: Path) -> None:
    with Daemon(storage=tmp_path if stored else None) as daemon:
        model = layered(seed=1, width=33)
        with pytest.raises(ballast.Rejected, match="leave it out to begin one, or.* call connect") as told:
            ballast.AdamW(model.parameters(), lr=0.01, server=daemon.server, run=RUN, weights="server")
        assert told.value.code == "NOT_FOUND"
        assert runs_of(daemon.server) == []
