"""Sharded ranks whose run averages its weights."""

from __future__ import annotations

from typing import Any

from torch import distributed, nn

import ballast
from forks import Order
from sharded_model import full, loss_of, made_again, whole


def averaged(order: Order, rank: int) -> dict[str, Any]:
    """The weights after each of the steps from case["begins"] on, and the averages in the end."""
    case = order["case"]
    if case.get("followed"):
        case["options"]["follow"] = ballast.Follow(averages=True)
    model, optimizer = made_again(order)
    weights = []
    for step in range(case.get("begins", 0), case["steps"]):
        loss_of(model, step, 0, rank).backward()
        optimizer.step()
        weights.append(whole(model))
    if case.get("checkpoint") and rank == 0:
        optimizer.checkpoint()
    distributed.barrier()
    averages = {decay: of_all(optimizer, decay) for decay in case["options"].get("ema", [])}
    refused = refusal(model, optimizer) if averages else ""
    optimizer.close()
    return {"weights": weights, "averages": averages, "refused": refused}


def of_all(optimizer: ballast.Optimizer, decay: float) -> dict[str, list[float]]:
    """What all ranks have of an average, put together."""
    return {name: full(average).flatten().tolist() for name, average in optimizer.averaged(decay).items()}


def refusal(model: nn.Module, optimizer: ballast.Optimizer) -> str:
    """Of what would put an average into the parameters."""
    before = whole(model)
    try:
        with optimizer.average(optimizer._steps.averages.decays[0]):
            return "nothing was refused"
    except ballast.Rejected as error:
        assert whole(model) == before
        return str(error)
