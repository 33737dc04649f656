"""Ranks that loop over loaders of different lengths, in one process a rank, over gloo."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # by DDP, and slowly: once for all forks
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import ballast
import forks
from forks import Order, join_group
from models import layered

PATIENCE_S = 90.0
LR = 0.05
EXACT: dict[str, Any] = {"master": "fp32", "gradient_dtype": "fp32"}


def loss_of(model: nn.Module, epoch: int, number: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(10_000 * epoch + 100 * number + rank)
    x, y = torch.randn(4, 8, generator=random), torch.randn(4, 8, generator=random)
    return nn.functional.mse_loss(model(x), y)


class Numbers(Dataset[int]):
    """0, 1, 2, ... so many."""

    def __init__(self, length: int):
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def stream(length: int, end: str) -> Iterator[int]:
    """The same without a length. Its end is an end, or else one that a loader should not have."""
    yield from range(length)
    if end == "raises":
        raise ValueError("the shard is corrupt")
    if end == "exits":
        os._exit(1)


class Unopened:
    def __iter__(self) -> Iterator[int]:
        raise FileNotFoundError("no such shard")


def loader_of(kind: str, length: int, bad: bool) -> Iterable[Any]:
    if kind == "torch":
        return DataLoader(Numbers(length), batch_size=None)
    if kind == "list":
        return list(range(length))
    if kind == "unopened" and bad:
        return Unopened()
    return stream(length, kind if bad else "ends")


def looped(server: str, order: Order, rank: int) -> dict[str, Any]:
    case, seen, error = order["case"], [], ""
    model = layered(seed=1)
    module = DistributedDataParallel(model) if case.get("ddp") else model
    group = distributed.new_group([0]) if case.get("group") else None
    optimizer = ballast.SGD(model.named_parameters(), LR, server=server, run=order["run"], rank_timeout=1.0, **EXACT)
    try:
        for epoch, lengths in enumerate(case["lengths"]):
            loader = loader_of(case.get("loader", "list"), lengths[rank], case.get("bad") == rank)
            for number in optimizer.in_step(loader, group):
                seen.append(int(number))
                loss_of(module, epoch, int(number), rank).backward()
                optimizer.step()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        optimizer.close()
    return {"seen": seen, "error": error, "weights": [p.detach().flatten().tolist() for p in model.parameters()]}


def rank_of(pipe: Connection, server: str, order: Order, rank: int) -> None:
    join_group(order, rank, PATIENCE_S)
    with redirect_stderr(io.StringIO()) as said:
        done = looped(server, order, rank)
    pipe.send({**done, "said": said.getvalue()})
    pipe.close()
    os._exit(0)  # without a word to the others, of which some may have ended


def conduct(server: str) -> None:
    """Orders: {"world", "run", "store": a file, "case"}; answers: what each rank did."""
    forks.conduct(lambda pipe, order, rank: rank_of(pipe, server, order, rank), PATIENCE_S)
