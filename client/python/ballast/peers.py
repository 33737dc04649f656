"""The ranks of a run as processes that torch.distributed connects: what they tell each other beside the daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from ballast.errors import Rejected, Unavailable
from ballast.progress import Patience, pauses
from ballast.rank import Rank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Between two looks whether the others have answered; they double.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 5e-3


class Peers:
    """The processes of a process group, which are the ranks of a run. Each makes the same calls in the same order; a call
    waits for all of them, so that Ctrl-C is heard. One thread at a time.

    group: None is the one that init_process_group() made. what: which call needs it, for messages.

    Raises Rejected if there is no such group, or it has another number of processes than the run has ranks; the calls raise
    Unavailable if a process is gone, or the group's timeout is over.
    """

    def __init__(self, rank: Rank, group: ProcessGroup | None, what: str):
        _check(rank, group, what)
        self.rank = rank
        self._group = group
        self._what = what
        self._device = _device_of(group)

    def least(self, own: int) -> int:
        """The least of what the ranks say, each from 0 to 255."""
        said = torch.tensor([own], dtype=torch.uint8, device=self._device)
        self._await(lambda: distributed.all_reduce(said, distributed.ReduceOp.MIN, self._group, async_op=True))
        return int(said.item())

    def each(self, *own: int) -> dict[int, tuple[int, ...]]:
        """What each says, as many numbers, by rank."""
        said = torch.tensor([self.rank.number, *own], dtype=torch.int64, device=self._device)
        heard = [torch.zeros_like(said) for _ in range(self.rank.world)]
        self._await(lambda: distributed.all_gather(heard, said, self._group, async_op=True))
        rows: list[list[int]] = [row.tolist() for row in heard]
        return {rank: tuple(numbers) for rank, *numbers in sorted(rows)}

    def _await(self, start: Callable[[], Any]) -> None:
        patience = Patience(
            lambda: f"{self._what} of run '{self.rank.run}': rank {self.rank.number} waits until all {self.rank.world} ranks "
            "ask for their next batch. One that is still in a step keeps them waiting, and so does one that has left the loop "
            "alone, by break or an exception"
        )
        await_all(start, patience, f"{self._what} of run '{self.rank.run}'")


def await_all(start: Callable[[], Any], patience: Patience, what: str) -> None:
    """Until the operation of torch.distributed that `start` begins is done on all ranks. what: needs it, for messages."""
    try:
        work = start()
        for _ in pauses(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S):
            if work.is_completed():
                break
            patience.look()
        work.wait()
    except RuntimeError as error:
        raise Unavailable(
            f"{what}: torch.distributed cannot reach the other ranks, since the process of one has ended, or has waited "
            f"elsewhere for longer than the process group's timeout: {error}"
        ) from error


def _check(rank: Rank, group: ProcessGroup | None, what: str) -> None:
    if not distributed.is_available() or not distributed.is_initialized():
        raise Rejected(
            f"{what} with world={rank.world}: the ranks agree over torch.distributed, which has no process group here. Call "
            "torch.distributed.init_process_group('gloo') before; or give every rank as many batches (drop_last=True of a "
            f"DistributedSampler, even_batches=True of Accelerate), and leave {what} out",
            "FAILED_PRECONDITION",
        )
    if distributed.get_rank(group) < 0:
        raise Rejected(
            f"{what} of run '{rank.run}': this process is not in group=, whose processes are to be the run's ranks"
        )
    size = distributed.get_world_size(group)
    if size != rank.world:
        raise Rejected(
            f"{what}: run '{rank.run}' has world={rank.world}, and the process group has {size} processes: give group= of "
            "the processes that are the run's ranks"
        )


def _device_of(group: ProcessGroup | None) -> torch.device:
    """Where tensors are that the group sends: the CPU if it can, else the device that this process uses."""
    kinds = [pair.partition(":")[0] for pair in distributed.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])
