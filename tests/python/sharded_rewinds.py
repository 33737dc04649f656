"""Sharded ranks whose run goes back, or whose daemon or processes are others than before."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import ballast
from daemon import Daemon
from forks import Order
from models import until
from sharded_model import loss_of, made_again, whole
from stateful import Place


def rewound(order: Order, rank: int) -> dict[str, Any]:
    """Trains, and somebody takes the run back before one of its backward(), or kills the daemon and starts it again, or rank 0
    takes it back before a forward; it hears of it where it says."""
    case = order["case"]
    model, optimizer = made_again(order)
    heard, step = [], 0
    later = ExitStack()

    def disturb() -> None:
        if "killed" in case:
            later.enter_context(in_place_of(case["killed"]))
        else:
            optimizer._membership.connected().rewind(order["run"], case["to"], None, "test")

    while step < case["steps"]:
        now = step == case["at"] and not heard
        if "gathered" in case:
            model.unshard(async_op=case["gathered"] == "under way")  # type: ignore[operator]
        if now and case.get("by rank 0"):
            one_by_one(rank, lambda: optimizer.rewind(to=case["to"]))
            if rank == 0:
                heard.append(case["to"])
                step = case["to"]
        try:
            loss = loss_of(model, step, 0, rank)
            if now and not case.get("by rank 0"):
                one_by_one(rank, disturb)
            loss.backward()
            if case.get("clip"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
            optimizer.step()
            step += 1
        except ballast.RunRewound as back:
            heard.append(back.step)
            step = back.step
    weights = whole(model)
    optimizer.close()
    distributed.barrier()
    later.close()
    return {"heard": heard, "weights": weights}


def in_place_of(killed: dict[str, Any]) -> Daemon:
    """A daemon over the folder of this one, which it kills, at its port."""
    os.kill(killed["pid"], signal.SIGKILL)
    process = Path(f"/proc/{killed['pid']}")

    def gone() -> bool:
        """It is no child, and stays a zombie, whose other threads may still have its files open."""
        zombie = (process / "stat").read_text().rpartition(") ")[2].startswith("Z")
        return zombie and len(list((process / "task").iterdir())) == 1

    until(gone)
    return Daemon(killed["port"], storage=Path(killed["storage"]))


def one_by_one(rank: int, work: Callable[[], object]) -> None:
    """Rank 0 does it, while the others wait."""
    distributed.barrier()
    if rank == 0:
        work()
    distributed.barrier()


def resumed(order: Order, rank: int) -> dict[str, Any] | str:
    """Trains, and goes on as another process would; the state of its data is kept by all ranks, or by the first ones. What
    connect() found and the weights at the end, or why the training is refused."""
    case = order["case"]
    for last in (case["at"], case["steps"]):
        model, optimizer = made_again(order)
        place = Place()
        if rank < case["keeping"]:
            optimizer.register_client_state("place", place)
        joined = optimizer.connect()
        try:
            for step in range(joined.step, last):
                loss_of(model, step, 0, rank).backward()
                place.next += 1
                optimizer.step()
        except ballast.Rejected as refused:
            optimizer.close()
            return str(refused)
        weights = whole(model)
        optimizer.close()
        distributed.barrier()
    return {"found": bool(joined), "place": place.next, "weights": weights}
