"""optimizer.in_step(): the loops of ranks with different numbers of batches end together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ballast
from conftest import Program, kept
from loopers import LR, loss_of
from models import layered

Answers = list[dict[str, Any]]
Loop = Callable[..., Answers]


loopers = kept("looping")


@pytest.fixture
def loop(loopers: Program, run: str, tmp_path: Path) -> Loop:
    """What each rank did: loop(world, lengths of the loaders by epoch and rank, ...)."""

    def make(world: int, lengths: list[list[int]], **case: Any) -> Answers:
        order = {"world": world, "run": run, "store": str(tmp_path / "store"), "case": {"lengths": lengths, **case}}
        answers: Answers = loopers.ask(order)
        return answers

    return make


def trained_by_torch(world: int, epochs: list[int]) -> list[list[float]]:
    """On the mean over the ranks of each step: so many steps by epoch."""
    model = layered(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for epoch, steps in enumerate(epochs):
        for number in range(steps):
            optimizer.zero_grad()
            torch.stack([loss_of(model, epoch, number, rank) for rank in range(world)]).mean().backward()
            optimizer.step()
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def check(answers: Answers, epochs: list[int]) -> None:
    assert [answer["error"] for answer in answers] == [""] * len(answers)
    theirs = trained_by_torch(len(answers), epochs)
    for answer in answers:
        assert answer["seen"] == [number for steps in epochs for number in range(steps)]
        assert answer["weights"] == answers[0]["weights"]
        for ours, reference in zip(answer["weights"], theirs, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(reference), rtol=1e-5, atol=1e-6)


def told(answers: Answers) -> list[str]:
    """What was said of loops that ended early, by any rank."""
    lines = [line for answer in answers for line in answer["said"].splitlines()]
    return [line.partition(": ")[2] for line in lines if "ended the loops" in line]


@pytest.mark.parametrize("ddp", [False, True])
def test_two_ranks_end_with_the_shorter_loader(ddp: bool, loop: Loop, run: str) -> None:
    answers = loop(2, [[5, 8]], ddp=ddp)
    check(answers, [5])
    assert told(answers) == [
        f"in_step() of run '{run}' ended the loops of all ranks after 5 batches, which is all that rank 0 had; "
        "dropped: 3 of rank 1"
    ]


@pytest.mark.parametrize("ddp", [False, True])
def test_four_ranks_end_with_the_shortest_loader(ddp: bool, loop: Loop) -> None:
    answers = loop(4, [[4, 2, 7, 2]], ddp=ddp, loader="torch")
    check(answers, [2])
    (line,) = told(answers)
    assert line.endswith("after 2 batches, which is all that ranks 1, 3 had; dropped: 2 of rank 0, 5 of rank 2")


def test_each_epoch_ends_so_and_what_is_dropped_is_said_again_when_it_changes(loop: Loop) -> None:
    answers = loop(2, [[3, 2], [3, 2], [2, 2], [0, 4], [1, 1]])
    check(answers, [2, 2, 2, 0, 1])
    assert [line.partition("; ")[2] for line in told(answers)] == ["dropped: 1 of rank 0", "dropped: 4 of rank 1"]


def test_nothing_is_said_where_nothing_is_left_over(loop: Loop) -> None:
    answers = loop(2, [[4, 4]])
    check(answers, [4])
    assert told(answers) == []


def test_of_a_loader_without_a_length_it_is_known_that_a_batch_is_left_over(loop: Loop) -> None:
    answers = loop(2, [[6, 3]], loader="stream")
    check(answers, [3])
    (line,) = told(answers)
    assert line.endswith("which is all that rank 1 had; dropped: at least 1 of rank 0")


@pytest.mark.parametrize(
    ("loader", "steps", "error"),
    [("raises", 2, "ValueError: the shard is corrupt"), ("unopened", 0, "FileNotFoundError: no such shard")],
)
def test_a_loader_that_raises_ends_the_others_loops_by_name(
    loader: str, steps: int, error: str, loop: Loop, run: str
) -> None:
    answers = loop(3, [[5, 2, 5]], loader=loader, bad=1)
    assert [answer["seen"] for answer in answers] == [list(range(steps))] * 3
    assert answers[1]["error"] == error
    for answer in (answers[0], answers[2]):
        assert answer["error"].startswith(
            f"BallastError: in_step() of run '{run}': the loader of rank 1 raised an exception, and the loops of all ranks "
            f"end after {steps} batches"
        )


def test_a_process_that_ends_is_no_hang_of_the_others(loop: Loop, run: str) -> None:
    gone, other = loop(2, [[2, 5]], loader="exits", bad=0)
    assert gone == "gone"
    assert other["seen"] == [0, 1]
    assert other["error"].startswith(
        f"Unavailable: in_step() of run '{run}': torch.distributed cannot reach the other ranks"
    )


def test_a_group_of_other_processes_is_refused(loop: Loop, run: str) -> None:
    inside, outside = loop(2, [[2, 2]], group=True)
    assert inside["error"].startswith(
        f"Rejected: in_step(): run '{run}' has world=2, and the process group has 1 processes"
    )
    assert outside["error"].startswith(f"Rejected: in_step() of run '{run}': this process is not in group=")


def test_several_ranks_without_a_process_group_are_refused(make: Callable[..., Any]) -> None:
    optimizer = make(ballast.SGD, layered(seed=1).named_parameters(), 0.1, rank=0, world=2)
    with pytest.raises(ballast.Rejected, match=r"init_process_group\('gloo'\).*drop_last=True.*even_batches=True"):
        optimizer.in_step([1, 2])


def test_one_rank_needs_nothing_of_it(make: Callable[..., Any]) -> None:
    optimizer = make(ballast.SGD, layered(seed=1).named_parameters(), 0.1)
    batches = [1, 2]
    assert type(optimizer.in_step(batches)) is type(iter(batches)) and list(optimizer.in_step(batches)) == batches
