"""How much of a step's gradients a trainer keeps which the daemon cannot take yet."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from daemon import Daemon
from models import layered, until
from side_by_side import side_by_side

MIB = 1 << 20
ELEMENTS = 8 * MIB  # 32 MiB in fp32
CREDIT = 4  # MiB that a rank may send of them before the daemon answers, which may be late


def made(rank: int, daemon: Daemon, run: str) -> ballast.StepResult:
    """A step of two ranks. Rank 1 makes its gradient when rank 0's is on its way, as far as that goes."""
    weight = nn.Parameter(torch.ones(ELEMENTS))
    options: dict[str, Any] = {"rank": rank, "world": 2, "gradient_buffer_bytes": MIB, "gradient_dtype": "fp32"}
    with ballast.SGD([("weight", weight)], 0.1, server=daemon.server, run=run, **options) as optimizer:
        optimizer.connect()
        if rank == 1:
            until(lambda: optimizer.run_status().received_bytes > 0)
        weight.sum().backward()
        optimizer.step()
        torch.testing.assert_close(weight, torch.full_like(weight, 0.9))
        assert optimizer.last_result is not None
        return optimizer.last_result


def test_a_rank_that_is_ahead_keeps_no_more_than_it_may(daemon: Daemon, run: str) -> None:
    for result in side_by_side(2, lambda rank: made(rank, daemon, run)):
        assert result.timing.pushed_bytes == 4 * ELEMENTS
        assert result.timing.buffered_bytes_most <= (1 + CREDIT + 1) * MIB  # what it may, what was sent, and a chunk


@pytest.mark.parametrize("wrong", [-1, 0.5, "1 GiB", True])
def test_what_is_no_number_of_bytes_is_refused(wrong: Any) -> None:
    with pytest.raises(ballast.Rejected, match="gradient_buffer_bytes=.*whole number of at least 0"):
        ballast.SGD(layered(seed=1).parameters(), 0.1, run="r", gradient_buffer_bytes=wrong)


def test_ctrl_c_ends_the_wait_for_room_and_the_step_goes_on(run: str, program: Callable[..., Any]) -> None:
    with Daemon() as daemon:
        trainer = program("full", daemon.server)
        assert trainer.hear() == "connected"
        daemon.freeze()
        trainer.go_on()
        assert trainer.hear() == "backward"
        trainer.send(signal.SIGINT)
        assert trainer.hear() == "interrupted"
        daemon.thaw()
        trainer.go_on()
        assert trainer.hear() == "step 1 APPLIED"
        assert trainer.end() == 0
