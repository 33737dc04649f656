"""Ranks whose model is sharded by fully_shard, over gloo on CPUs, in one process each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # DTensors import it when they are first used: once here, not in every rank
import torch.distributed.checkpoint as files
from torch import distributed, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import ballast
import forks
from ballast import progress
from forks import Order, answer, join_group
from sharded_averages import averaged
from sharded_model import ADAMW, EXACT, Blocks, full, loss_of, made_again, shard, whole
from sharded_rewinds import resumed, rewound

PATIENCE_S = 120.0
# --- beside torch's AdamW --------------------------------------------------------------------------------------------


def made(case: dict[str, Any], make: Any) -> tuple[nn.Module, Any]:
    """A sharded model and its optimizer, which is made after it or before."""
    model = Blocks(case)
    order = case.get("optimizer", "after")
    if order == "after":
        shard(model, case)
        return model, make(list(model.named_parameters()))
    optimizer = make(list(model.named_parameters()))
    if order == "before":
        shard(model, case)
        return model, optimizer
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.to("meta")  # as Accelerate does, which then puts the new parameters into param_groups
    shard(model, case)
    model.to_empty(device="cpu")
    dcp.set_model_state_dict(model, weights, options=dcp.StateDictOptions(full_state_dict=True, strict=False))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return model, optimizer


def step_once(model: nn.Module, optimizer: Any, case: dict[str, Any], step: int, rank: int) -> dict[str, Any]:
    told: dict[str, Any] = {"loss": 0.0}
    micros = case.get("micros", 1)
    if case.get("evaluated"):
        with torch.no_grad():
            loss_of(model, step, 0, rank)
    if "gathered" in case:
        model.unshard(async_op=case["gathered"] == "under way")  # type: ignore[operator]
    for micro in range(micros):
        if case.get("no_sync"):
            model.set_requires_gradient_sync(micro + 1 == micros)  # type: ignore[operator]
        loss = loss_of(model, step, micro, rank) / micros
        (loss * case["scale"] if "scale" in case and isinstance(optimizer, ballast.Optimizer) else loss).backward()
        told["loss"] += loss.item()
    if case.get("clip"):
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
        told["norm"] = float(full(norm))
    optimizer.step()
    optimizer.zero_grad()
    return told


def trained(case: dict[str, Any], rank: int, make: Any) -> dict[str, Any]:
    model, optimizer = made(case, make)
    steps, pushed, pulled = [], [], []
    for step in range(case["steps"]):
        steps.append(step_once(model, optimizer, case, step, rank))
        if isinstance(optimizer, ballast.Optimizer):
            result = optimizer.last_result
            assert result is not None and result.applied and result.step == step + 1 and result.timing is not None
            pushed.append(result.timing.pushed_bytes)
            pulled.append(result.timing.pulled_bytes)
    weights = whole(model)
    if isinstance(optimizer, ballast.Optimizer):
        optimizer.close()
    return {"steps": steps, "weights": weights, "pushed": pushed, "pulled": pulled}


def both(order: Order, rank: int) -> list[dict[str, Any]]:
    """What a model has come to in the end, trained by Ballast and by torch."""
    case = order["case"]
    options = {**ADAMW, **EXACT, "server": order["server"], "run": order["run"], **case.get("options", {})}
    ours = trained(case, rank, lambda named: ballast.AdamW(named, **options))
    theirs = trained(
        {**case, "optimizer": "after"}, rank, lambda named: torch.optim.AdamW([p for _, p in named], **ADAMW)
    )
    return [ours, theirs]


# --- the same gradients, however many ranks ---------------------------------------------------------------------------


def nudge(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    """Steps with gradients that are the same to the bit for every number of ranks."""
    for step in steps:
        for number, parameter in enumerate(model.parameters()):
            random = torch.Generator().manual_seed(1000 * step + number)
            gradient = torch.randn(parameter.shape, generator=random)
            assert isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        optimizer.step()
        assert optimizer.last_result.applied


def state_of(model: nn.Module, optimizer: ballast.Optimizer) -> dict[str, Any]:
    """Weights, and moments, put together by torch.distributed.checkpoint."""
    options = dcp.StateDictOptions(full_state_dict=True)
    state = dcp.get_optimizer_state_dict(model, optimizer, options=options)["state"]
    moments: Any = {name: {key: value.tolist() for key, value in one.items()} for name, one in state.items()}
    return {"weights": whole(model), "moments": moments}


def nudged(order: Order, rank: int) -> dict[str, Any]:
    """Loads what is in a folder, if one is named; takes steps; saves to a folder; takes more."""
    case = order["case"]
    model, optimizer = made_again(order)
    if "load" in case:
        form = {
            "model": dcp.get_model_state_dict(model),
            "optimizer": dcp.get_optimizer_state_dict(model, optimizer),
        }
        files.load(form, checkpoint_id=case["load"])
        dcp.set_state_dict(model, optimizer, model_state_dict=form["model"], optim_state_dict=form["optimizer"])
    nudge(model, optimizer, case.get("before", []))
    if "save" in case:
        state = {
            "model": dcp.get_model_state_dict(model),
            "optimizer": dcp.get_optimizer_state_dict(model, optimizer),
        }
        files.save(state, checkpoint_id=case["save"])
    nudge(model, optimizer, case.get("after", []))
    if case.get("back"):
        back_and_again(model, optimizer, case)
    answer = state_of(model, optimizer)
    optimizer.close()
    return answer


def back_and_again(model: nn.Module, optimizer: ballast.Optimizer, case: dict[str, Any]) -> None:
    """In the middle of the run to what was saved, and the steps after that once more."""
    form = {"model": dcp.get_model_state_dict(model), "optimizer": dcp.get_optimizer_state_dict(model, optimizer)}
    files.load(form, checkpoint_id=case["save"])
    dcp.set_state_dict(model, optimizer, model_state_dict=form["model"], optim_state_dict=form["optimizer"])
    nudge(model, optimizer, case["after"])


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(order: Order, rank: int) -> str:
    """The message with which this rank's training is refused."""
    case = order["case"]
    model = Blocks(case)
    options = {"server": order["server"], "run": order["run"], **case.get("options", {})}
    try:
        if case["what"] == "half a mesh":
            half = distributed.get_world_size() // 2
            meshes = init_device_mesh("cpu", (2, half), mesh_dim_names=("half", "shard"))
            fully_shard(model, mesh=meshes["shard"])
        else:
            shard(model, case)
        optimizer = ballast.AdamW(model.named_parameters(), **options)
        if case["what"] == "unequal copies":
            with torch.no_grad():
                next(model.parameters()).to_local().add_(rank)  # type: ignore[attr-defined]
        if case["what"] == "unequal state" or (case["what"] == "state of one rank" and rank == 0):
            parameters = optimizer.param_groups[0]["params"]
            names = ["exp_avg", "exp_avg_sq", "master"][: 2 + rank]
            state = {0: {name: torch.ones(parameters[0].shape) for name in names}}
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        loss_of(model, 0, 0, rank).backward()
        if case["what"] == "changed weights":
            optimizer.step()
            with torch.no_grad():
                next(model.parameters()).mul_(2)
            loss_of(model, 1, 0, rank).backward()
        return "nothing was refused"
    except ballast.Rejected as error:
        return str(error)


def spared(order: Order, rank: int) -> list[Any]:
    """Rank 1 changes its part of the weights, to a NaN with state that is loaded besides; then all go on with the daemon's. The
    message, and how that ended."""
    model, optimizer = made_again(order)
    nudge(model, optimizer, [0])
    state = optimizer.state_dict()
    loads = order["case"]["loads"]
    if rank == 1:
        with torch.no_grad():
            next(model.parameters()).to_local()[0, 0] = torch.nan if loads else 2.0  # type: ignore[attr-defined]
    if loads:
        state["state"][0]["step"] += 1  # as another run may have it
        optimizer.load_state_dict(state)
    message = ""
    try:
        loss_of(model, 1, 0, rank)
    except ballast.Rejected as error:
        message = str(error)
    optimizer.pull()
    told = step_once(model, optimizer, {}, 1, rank)
    result = optimizer.last_result
    assert result is not None
    optimizer.close()
    return [message, result.outcome, result.step, math.isfinite(told["loss"])]


def left(order: Order, rank: int) -> list[str]:
    """Rank 0 leaves the loop after a step, and ends when the others have said that they wait. What they say, and raise."""
    model, optimizer = made_again(order)
    nudge(model, optimizer, [0])
    step_once(model, optimizer, {}, 1, rank)
    store = distributed.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["said"])
        return []
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        store.set("said", "")

    progress.say = say
    progress._LINE_AFTER_S = 0.0
    try:
        loss_of(model, 2, 0, rank)
    except ballast.Unavailable as error:
        return [said[0], str(error)]
    return said


JOBS = {
    "averaged": averaged,
    "both": both,
    "left": left,
    "spared": spared,
    "nudged": nudged,
    "rewound": rewound,
    "resumed": resumed,
    "refused": refused,
}


def rank_of(pipe: Connection, order: Order, rank: int) -> None:
    join_group(order, rank, PATIENCE_S)
    try:
        answer(pipe, lambda: JOBS[order["job"]](order, rank))
    finally:
        with suppress(RuntimeError):  # where another rank is gone
            distributed.destroy_process_group()


def conduct() -> None:
    """Orders: {"job", "world", "server", "run", "store": a file, "case"}; answers: what each rank has."""
    forks.conduct(rank_of, PATIENCE_S)
