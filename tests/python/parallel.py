"""Ranks under DistributedDataParallel over gloo: the same training by torch's AdamW and by Ballast's, in one process a rank."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # by DDP, and slowly: once for all forks
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.nn.parallel import DistributedDataParallel

import ballast
import forks
from forks import Order, answer, join_group
from models import layered

WORLD = 2
PATIENCE_S = 90.0
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
EXACT: dict[str, Any] = {"master": "fp32", "state": "fp32", "gradient_dtype": "fp32"}


class Branches(nn.Module):
    """One of its layers is used by rank 0 alone, one by rank 1 alone, one by none."""

    def __init__(self, rank: int):
        super().__init__()
        torch.manual_seed(1)
        self.shared, self.own, self.unused = (
            nn.Linear(8, 8),
            nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]),
            nn.Linear(8, 8),
        )
        self._rank = rank

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.own[self._rank](self.shared(x))
        return y


def model_of(kind: str, rank: int) -> nn.Module:
    if kind == "branches":
        return Branches(rank)
    model = layered(seed=1 + rank)  # the ranks' differ, until DDP sends rank 0's around
    if kind == "int8":
        ballast.nn.switch(model)
    if kind == "norm":
        model[0].bias = None  # whose gradient were zero but for rounding, which AdamW makes large
        model.insert(1, nn.BatchNorm1d(8))
    return model


def wrap(kind: str, model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """The model in DDP: as a whole, in another module, or in parts."""
    if kind == "parts":
        assert isinstance(model, nn.Sequential)
        return nn.Sequential(*(DistributedDataParallel(layer, **options) for layer in model))
    wrapped = DistributedDataParallel(model, **options)
    return nn.Sequential(wrapped) if kind == "inner" else wrapped


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randn(4, 8, generator=random), torch.randn(4, 8, generator=random)


def train(module: nn.Module, optimizer: Any, case: dict[str, Any], rank: int) -> None:
    for step, micros in enumerate(case["steps"]):
        for micro in range(micros):
            held = case.get("no_sync") and micro + 1 < micros
            x, y = batch(step, micro, rank)
            with module.no_sync() if held else nullcontext():  # type: ignore[operator]
                (nn.functional.mse_loss(module(x), y) / micros).backward()
        optimizer.step()
        optimizer.zero_grad()


def roll_back(module: nn.Module, optimizer: Any, case: dict[str, Any], rank: int) -> None:
    """Saves by torch.distributed.checkpoint, rank 0 once more alone; trains on, goes back, and trains on again."""
    options = dcp.StateDictOptions(full_state_dict=case["checkpoint"] == "full")
    model_state, state = copy.deepcopy(dcp.get_state_dict(module, optimizer, options=options))
    if rank == 0:
        dcp.get_optimizer_state_dict(module, optimizer)
    train(module, optimizer, case, rank)
    dcp.set_state_dict(module, optimizer, model_state_dict=model_state, optim_state_dict=state, options=options)
    train(module, optimizer, case, rank)


def trained(case: dict[str, Any], rank: int, make: Any) -> dict[str, list[float]]:
    model = model_of(case.get("model", "layers"), rank)
    optimizer = make(model.named_parameters()) if case.get("optimizer_first") else None
    module = wrap(case.get("wrap", "whole"), model, case.get("ddp", {}))
    if optimizer is None:
        optimizer = make(model.named_parameters())
    train(torch.compile(module, backend="eager") if case.get("compile") else module, optimizer, case, rank)
    if case.get("checkpoint"):
        roll_back(module, optimizer, case, rank)
    if isinstance(optimizer, ballast.Optimizer):
        assert optimizer.last_result is not None and optimizer.last_result.applied
        assert optimizer.last_result.step == len(case["steps"]) * (3 if case.get("checkpoint") else 1)
        optimizer.close()
        if case.get("again"):
            return started_anew(case, rank, make)
    return {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}


def started_anew(case: dict[str, Any], rank: int, make: Any) -> dict[str, list[float]]:
    """As a trainer that takes the run up again: its weights are the daemon's before DDP sends rank 0's around."""
    model = model_of(case.get("model", "layers"), rank + 10)
    optimizer = make(model.named_parameters(), weights="server")
    module = wrap(case.get("wrap", "whole"), model, case.get("ddp", {}))
    train(module, optimizer, case | {"steps": case["again"]}, rank)
    optimizer.close()
    return {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}


def both(server: str, run: str, case: dict[str, Any], rank: int) -> list[dict[str, list[float]]]:
    """What a model has come to in the end, trained by torch and by Ballast."""
    options = {**ADAMW, **EXACT, **case.get("options", {})}
    reference = {**case, **case.get("theirs", {})}
    theirs = trained(reference, rank, lambda named: torch.optim.AdamW([p for _, p in named], **ADAMW))
    ours = trained(case, rank, lambda named, **more: ballast.AdamW(named, server=server, run=run, **options, **more))
    return [ours, theirs]


def rank_of(pipe: Connection, server: str, order: Order, rank: int) -> None:
    join_group(order, rank, PATIENCE_S)
    try:
        answer(pipe, lambda: both(server, order["run"], order["case"], rank))
    finally:
        distributed.destroy_process_group()


def conduct(server: str) -> None:
    """Orders: {"world", "run", "store": a file, "case"}; answers: what each rank has."""
    forks.conduct(lambda pipe, order, rank: rank_of(pipe, server, order, rank), PATIENCE_S)
