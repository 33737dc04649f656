"""The rank of a run that this process is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed

from ballast.errors import Rejected

_RUN_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Rank:
    """Which of a run's trainers this process is, how many there are, and how it gets to the daemon.

    world_given: by an option or by torch.distributed; otherwise 1 is the default. most: how many the run may come to have.
    """

    run: str
    number: int = 0
    world: int = 1
    takeover: bool = False
    transport: str = "auto"
    join_timeout: float = 3600.0
    gradient_buffer_bytes: int = 1 << 30
    world_given: bool = True
    start_over: bool = False
    most: int = 1


def run_id(run: str | None) -> str:
    """The run's name as given, else $BALLAST_RUN. Rejected if there is none, or it cannot be one."""
    run = run or os.environ.get("BALLAST_RUN")
    if not run:
        raise Rejected("no run is named: give run='my-run' (or set BALLAST_RUN); the same name goes on with that run")
    if not isinstance(run, str) or not _RUN_ID.fullmatch(run):
        raise Rejected(f"run={run!r}: at most 63 of a-z, 0-9 and '-', with a letter or digit at both ends")
    return run


def launched() -> int:
    """How many processes a launcher such as torchrun has started."""
    world = os.environ.get("WORLD_SIZE", "")
    return int(world) if world.isdecimal() else 1


def rank_of(options: Mapping[str, Any]) -> Rank:
    """From the options run, rank, world or world_size, max_world, takeover, transport, join_timeout, gradient_buffer_bytes and
    start_over. Rank and world that are not given are those of torch.distributed where it is initialized, else 0 and 1. Rejected
    where there are several ranks, and nothing says which this is."""
    world, alias = options.get("world"), options.get("world_size")
    if world is not None and alias is not None and world != alias:
        raise Rejected(f"world={world} and world_size={alias}: they are one and the same; give one of them")
    world = alias if world is None else world
    rank = options.get("rank")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank() if rank is None else rank
        world = torch.distributed.get_world_size() if world is None else world
    elif rank is None and world is None:
        _refuse_too_early()
    number, count = _count("rank", rank, 0, 0), _count("world", world, 1, 1)
    if count > 1 and rank is None:
        raise Rejected(
            f"world={count} and no rank: give each process its own, from rank=0 to rank={count - 1}, or initialize "
            "torch.distributed before the optimizer is made"
        )
    return Rank(
        run_id(options.get("run")),
        number,
        count,
        _switch("takeover", options.get("takeover", False)),
        _transport(options.get("transport", "auto")),
        seconds("join_timeout", options.get("join_timeout", Rank.join_timeout)),
        _count("gradient_buffer_bytes", options.get("gradient_buffer_bytes"), Rank.gradient_buffer_bytes, 0),
        world is not None,
        _start_over(options, world),
        _most(options, count),
    )


# What an optimizer wants that was made before torch.distributed was initialized.
MAKE_IT_LATER = (
    "make it after init_process_group() of torch.distributed (HF Trainer and TRL: after TrainingArguments(...); Accelerate: after "
    "Accelerator()), or give rank= and world="
)


def _refuse_too_early() -> None:
    """Rejected if a launcher has started several processes, and torch.distributed does not know of them yet."""
    if torch.distributed.is_available() and launched() > 1:
        raise Rejected(
            f"{launched()} processes (WORLD_SIZE) were launched, and torch.distributed is not initialized, so that the optimizer, "
            f"which decides when it is made, would be rank 0 of 1 in each of them: {MAKE_IT_LATER}; "
            "world=1 and a run= of its own where each process trains alone",
            "FAILED_PRECONDITION",
        )


def _most(options: Mapping[str, Any], world: int) -> int:
    most = _count("max_world", options.get("max_world"), world, 1)
    if most < world:
        raise Rejected(f"max_world={most} and world={world}: it must be at least the world that the run begins with")
    return most


def _start_over(options: Mapping[str, Any], world: Any) -> bool:
    given = _switch("start_over", options.get("start_over", False))
    if given and isinstance(world, int) and world > 1:
        raise Rejected(
            f"start_over=True and world={world}: a rank would delete the run that another has just joined. Delete it "
            "before the ranks are started, with ballast.delete_run(run) or `ballastctl delete RUN`"
        )
    if given and (weights := options.get("weights")) in ("server", "match"):
        raise Rejected(
            f"start_over=True and weights={weights!r}: the run begins with this trainer's weights; leave one of the two out"
        )
    return given


def _transport(given: Any) -> str:
    if given not in ("auto", "grpc", "shm", "gpu", "nccl"):
        raise Rejected(f"transport={given!r}: it must be 'auto', 'grpc', 'shm', 'gpu' or 'nccl'")
    return str(given)


def seconds(option: str, given: Any) -> float:
    """How long something may take. Rejected if it is no number from 0 to a million."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given <= 1e6:
        raise Rejected(f"{option}={given!r}: it must be from 0 to 1e6 seconds")
    return float(given)


def _switch(option: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise Rejected(f"{option}={given!r}: it must be True or False")
    return given


def _count(option: str, given: Any, default: int, least: int) -> int:
    value = default if given is None else given
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise Rejected(f"{option}={given!r}: it must be a whole number of at least {least}")
    return value
