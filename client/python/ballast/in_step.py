"""Loops over batches that end together on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeVar

from ballast.errors import BallastError
from ballast.frameworks import PreparedLoader
from ballast.peers import Peers
from ballast.progress import say

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ballast.settings import RunSettings

Batch = TypeVar("Batch")

# What a rank says of its next batch; the least of them holds for all. It has none since its loader raised; it has none; it
# has one and knows that no other follows; it has one.
_FAILED, _OVER, _LAST, _NEXT = range(4)
# What it says in the end, in place of how many batches are left over: that its loader raised; that none is.
_RAISED, _NONE = (-1, 1), (0, 1)


class InStep:
    """An optimizer whose ranks can loop in step."""

    _settings: RunSettings
    _told: Mapping[int, tuple[int, ...]] = {}  # what was said of the last loop that left batches over

    def in_step(self, batches: Iterable[Batch], group: ProcessGroup | None = None) -> Iterator[Batch]:
        """The batches of this rank's loader, as many as every rank has: the loops of all ranks end together, before the first
        batch that one of them lacks. What others have left over is dropped, as drop_last does, and said on stderr.

            for batch in optimizer.in_step(loader):
                model(batch).backward()
                optimizer.step()

        batches: this rank's, of any length; the loaders of torch, HF and Accelerate among them.
        group: of torch.distributed, over which the ranks agree before each batch: its processes are the run's ranks. Default:
            the one that init_process_group() made. With one rank there is nothing to agree on, and no group is needed.

        Every rank is to leave the loop at the same batch. One that leaves it alone, by `break` or an exception, keeps the
        others waiting, until its process ends or the group's timeout is over.

        Raises:
            Rejected: there are several ranks, and no process group of as many processes.
            BallastError: another rank's loader raised; the message names the rank. There, the loader's own exception.
            Unavailable: another rank's process is gone.
        """
        rank = self._settings.rank
        if rank.world == 1:
            return iter(batches)
        return self._agreed(batches, Peers(rank, group, "in_step()"))

    def _agreed(self, batches: Iterable[Batch], peers: Peers) -> Iterator[Batch]:
        loader = PreparedLoader(batches)
        source = chain.from_iterable([batches])  # which asks for the loader's iterator with the first batch
        made, agreed = 0, _NEXT
        while agreed == _NEXT:
            try:
                batch = list(islice(source, 1))
            except Exception:
                peers.least(_FAILED)
                peers.each(*_RAISED)
                raise
            own = _OVER if not batch else _LAST if loader.at_last else _NEXT
            agreed = peers.least(own)
            if agreed in (_LAST, _NEXT):
                if agreed < own:
                    loader.make_last()
                made += 1
                yield batch.pop()
        if own == _LAST:
            next(source, None)  # it finds that it is over
        elif own == _NEXT:
            loader.leave()
        self._end(peers, made, peers.each(*_left(batches, made, own, len(batch))))

    def _end(self, peers: Peers, made: int, left: Mapping[int, tuple[int, ...]]) -> None:
        """left: as _left() of each rank, or _RAISED."""
        where = f"in_step() of run '{peers.rank.run}'"
        failed = [rank for rank, row in left.items() if row == _RAISED]
        if failed:
            raise BallastError(
                f"{where}: the loader of {_names(failed)} raised an exception, and the loops of all ranks end after {made} "
                "batches; the error of that process says why",
                "ABORTED",
            )
        dropped = [f"{'' if known else 'at least '}{n} of rank {rank}" for rank, (n, known) in left.items() if n > 0]
        if dropped and left != self._told and peers.rank.number == min(left):
            ended = _names([rank for rank, row in left.items() if row == _NONE])
            say(
                f"{where} ended the loops of all ranks after {made} batches, which is all that {ended} had; dropped: "
                f"{', '.join(dropped)}"
            )
        self._told = left


def _left(batches: object, made: int, own: int, fetched: int) -> tuple[int, int]:
    """How many batches a rank has left over, and 1 if it knows of no more. fetched: how many it has taken from its loader and
    not made a step of."""
    if own in (_OVER, _LAST) and not fetched:
        return _NONE
    try:
        return (max(fetched, len(batches) - made), 1) if isinstance(batches, Sized) else (fetched, 0)
    except (TypeError, NotImplementedError):  # of a dataset that cannot tell
        return fetched, 0


def _names(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
