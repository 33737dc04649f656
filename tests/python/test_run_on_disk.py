"""Runs that lie on the daemon's disk: weights="server" of one that is there alone, and checkpoints that are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ballast
from daemon import Daemon
from durable import RUN, checkpoints, runs_of, train, trained
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


def damage(checkpoint: Path) -> None:
    [file] = checkpoint.glob("model-*.safetensors")
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_takes_no_whole_ones_place(tmp_path: Path) -> None:
    """Two are kept, so that one is there whatever becomes of the other."""
    damage(trained(tmp_path, 2, 4)[-1])
    assert [path.name[-6:] for path in trained(tmp_path, 6)] == ["step-2", "step-4", "step-6"]
    damage(checkpoints(tmp_path)[-1])
    with Daemon(storage=tmp_path) as daemon:
        assert [status["step"] for status in runs_of(daemon.server)] == [2]
        train(daemon.server, 3)
        daemon.drain()
    assert [path.name[-6:] for path in trained(tmp_path, 5)] == ["step-3", "step-5"]
