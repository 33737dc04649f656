"""Ranks of one run in one process, each on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def side_by_side(ranks: int, work: Callable[[int], T]) -> list[T]:
    """What work(rank) returns, by rank. An ExceptionGroup has what each rank raised: one that ends early is why the others
    waited."""
    with ThreadPoolExecutor(ranks) as pool:
        ended = [pool.submit(work, rank) for rank in range(ranks)]
    errors = [(rank, error) for rank, one in enumerate(ended) if (error := one.exception()) is not None]
    for rank, error in errors:
        error.add_note(f"rank {rank} of {ranks}")
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {ranks} ranks failed", [error for _, error in errors])
    return [one.result() for one in ended]
