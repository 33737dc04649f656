"""Ranks in one process each: forks of one program, which imports once what all of them need."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from torch import distributed

from nursery import settle

Order = dict[str, Any]
FORKS = multiprocessing.get_context("fork")


def conduct(rank_of: Callable[[Connection, Order, int], None], patience_s: float) -> None:
    """Carries out the orders on stdin, JSON, one a line. Forks order["world"] ranks, each of which calls rank_of(pipe, order,
    rank) and sends one answer; prints the answers in rank order. No rank is left when it has."""
    settle()
    for line in sys.stdin:
        order = json.loads(line)
        pipes, ranks = [], []
        for rank in range(order["world"]):
            pipe, end = FORKS.Pipe()
            ranks.append(FORKS.Process(target=rank_of, args=(end, order, rank), daemon=True))
            ranks[-1].start()
            end.close()
            pipes.append(pipe)
        print(json.dumps([_answer_of(pipe, patience_s) for pipe in pipes]), flush=True)
        for one in ranks:
            one.kill()
            one.join()


def join_group(order: Order, rank: int, patience_s: float) -> None:
    """The process group of an order's ranks, over gloo. Returns when it stands on all of them: gloo connects pair by pair, and
    a rank that ends at once would break what others connect still."""
    world, store = order["world"], distributed.FileStore(order["store"], order["world"])
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=patience_s)
    )
    store.set(f"rank {rank} stands", "")
    store.wait([f"rank {other} stands" for other in range(world)])


def answer(pipe: Connection, work: Callable[[], Any]) -> None:
    """Sends what `work` returns, or the words of what it raises, which goes on."""
    try:
        pipe.send(work())
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


def _answer_of(pipe: Connection, patience_s: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(patience_s) else "no answer"
    except EOFError:
        return "gone"
