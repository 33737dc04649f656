"""Two ranks whose model is sharded by FSDP2, over gloo on CPUs: one saves its optimizer, or loads what was converted.

python sharded.py save FOLDER: trains, and writes FOLDER/dcp by torch.distributed.checkpoint, and FOLDER/full.pt.
python sharded.py load FOLDER: loads FOLDER/converted into a new optimizer, and writes FOLDER/again.pt.
"""

from __future__ import annotations

import multiprocessing
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from checkpoints import make_model, train, two_groups

WORLD = 2
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def sharded(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = make_model(seed)
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(two_groups(model), lr=1e-2 * seed)


def save(folder: Path, rank: int) -> None:
    model, optimizer = sharded(1)
    train(model, optimizer)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / "dcp")
    write(get_optimizer_state_dict(model, optimizer, options=FULL), folder / "full.pt", rank)


def load(folder: Path, rank: int) -> None:
    model, optimizer = sharded(2)
    state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder / "converted")
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    write(get_optimizer_state_dict(model, optimizer, options=FULL), folder / "again.pt", rank)


def write(full: dict[str, Any], path: Path, rank: int) -> None:
    if rank == 0:
        torch.save(full, path)


def run_rank(what: str, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder / what}.meeting"
    distributed.init_process_group("gloo", meeting, timedelta(seconds=90), world_size=WORLD, rank=rank)
    {"save": save, "load": load}[what](folder, rank)
    distributed.destroy_process_group()


if __name__ == "__main__":
    forks = multiprocessing.get_context("fork")
    ranks = [forks.Process(target=run_rank, args=(sys.argv[1], Path(sys.argv[2]), rank)) for rank in range(WORLD)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(max(abs(one.exitcode or 0) for one in ranks))
