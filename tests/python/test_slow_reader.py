"""A rank that reads 10 KB/s: its peers and other runs do not feel it, and it ends with their bits. What the daemon holds for
one that reads nothing is tests/server/rpc/slow_rank_rpc_test.cc's."""

from __future__ import annotations

import threading

import torch

import ballast
from daemon import Daemon
from proxy import Proxy

ELEMENTS = 1 << 20  # 4 MiB of weights: 7 minutes at 10 KB/s


class Rank:
    def __init__(self, server: str, run: str, rank: int = 0, world: int = 1) -> None:
        self.weights = torch.nn.Parameter(torch.zeros(ELEMENTS))
        options = {"rank": rank, "world": world, "transport": "grpc", "reconnect_timeout": 60}
        self.opt = ballast.SGD([("w", self.weights)], lr=0.5, master="fp32", server=server, run=run, **options)

    def step(self) -> None:
        self.weights.backward(torch.ones(ELEMENTS))
        self.opt.step()


def step_together(fast: Rank, slow: Rank) -> threading.Thread:
    """The thread in which the slow one still steps, when the fast one has done so."""
    follower = threading.Thread(target=slow.step)
    follower.start()
    fast.step()
    return follower


def test_a_rank_that_reads_slowly_costs_nobody_anything() -> None:
    with Daemon(lease_s=10) as daemon, Proxy(daemon.server) as link:
        teams: list[Rank] = []
        joins = threading.Thread(target=lambda: teams.append(Rank(link.server, "team", rank=1, world=2)))
        joins.start()
        fast, beside = Rank(daemon.server, "team", rank=0, world=2), Rank(daemon.server, "beside")
        joins.join()
        slow = teams[0]
        step_together(fast, slow).join()
        beside.step()
        answered = link.downstream_bytes

        link.slow_down(10_000)
        follower = step_together(fast, slow)  # the fast one is done
        for _ in range(20):
            beside.step()
        follower.join(3)
        assert follower.is_alive() and link.downstream_bytes - answered < ELEMENTS

        link.slow_down(None)
        follower.join(60)
        assert not follower.is_alive() and torch.equal(fast.weights, slow.weights)
        step_together(fast, slow).join()
        assert torch.equal(fast.weights, torch.full((ELEMENTS,), -1.5)) and torch.equal(fast.weights, slow.weights)
        for rank in (fast, slow, beside):
            rank.opt.close()
