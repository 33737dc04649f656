"""Runs that were begun without the option `follow`, or with another, and whose trainer is started again with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from ballast.membership import Membership
from daemon import Daemon
from models import perceptron, same_bits, spirals, weights_of
from side_by_side import side_by_side

LONG_S = 60.0


@pytest.fixture(scope="module")
def one() -> Iterator[Daemon]:
    """One that has all of a run, whatever --daemons says."""
    with Daemon() as started:
        yield started


def optimizer_of(module: nn.Module, one: Daemon, run: str, **options: Any) -> ballast.AdamW:
    return ballast.AdamW(module.named_parameters(), lr=1e-2, server=one.server, run=run, **options)


def train(module: nn.Module, optimizer: ballast.AdamW, steps: int, rank: int = 0) -> None:
    inputs, labels = spirals(1 + rank)
    for _ in range(steps):
        nn.functional.cross_entropy(module(inputs), labels).backward()
        optimizer.step()


def assert_followed(one: Daemon, run: str, module: nn.Module, step: int, **options: Any) -> None:
    with ballast.Subscriber(one.server, run, **options) as reader:
        version = reader.next(LONG_S)
        assert version is not None and version.step == step
        for name, weights in module.named_parameters():
            assert torch.equal(version.tensors[name], weights.detach().to(version.tensors[name].dtype)), name


def test_a_run_that_was_begun_without_it_is_followed(one: Daemon) -> None:
    module, straight = perceptron(1), perceptron(1)
    with optimizer_of(module, one, "later") as optimizer:
        train(module, optimizer, 3)
    with optimizer_of(module, one, "later", follow=True) as optimizer:
        train(module, optimizer, 3)
        assert_followed(one, "later", module, step=6)
        train(module, optimizer, 1)
        assert_followed(one, "later", module, step=7)
    with optimizer_of(module, one, "later", follow=True) as optimizer:  # as it is by now
        train(module, optimizer, 1)
    with optimizer_of(straight, one, "later-straight") as optimizer:
        train(straight, optimizer, 8)
    assert same_bits(weights_of(module), weights_of(straight))


def test_another_one_takes_its_place(one: Daemon) -> None:
    module, exact = perceptron(1), {"master": "fp32"}  # in bf16 to nearest
    with optimizer_of(module, one, "other", follow=ballast.Follow(readers=1), **exact) as optimizer:
        train(module, optimizer, 1)
        with pytest.raises(ballast.Rejected, match="keeps no versions by name"):
            optimizer.tag("good")
    with optimizer_of(module, one, "other", follow=ballast.Follow(tags=2, formats="bf16"), **exact) as optimizer:
        train(module, optimizer, 1)
        assert optimizer.tag("good") == 2
        assert_followed(one, "other", module, step=2, format="bf16")


def test_what_else_differs_is_refused_and_all_is_as_before(one: Daemon) -> None:
    module = perceptron(1)
    with optimizer_of(module, one, "differs") as optimizer:
        train(module, optimizer, 1)
    with (
        optimizer_of(module, one, "differs", follow=True, seed=7) as optimizer,
        pytest.raises(ballast.Rejected, match="seed is 0, asked for is 7"),
    ):
        optimizer.connect()
    with pytest.raises(ballast.Rejected, match="was begun without follow=True"):
        ballast.Subscriber(one.server, "differs")
    with optimizer_of(module, one, "differs") as optimizer:
        train(module, optimizer, 1)


def test_a_run_that_is_followed_is_not_joined_without(one: Daemon) -> None:
    module = perceptron(1)
    with optimizer_of(module, one, "stays", follow=True) as optimizer:
        train(module, optimizer, 1)
    with optimizer_of(module, one, "stays") as optimizer, pytest.raises(ballast.Rejected, match="follow"):
        optimizer.connect()
    assert_followed(one, "stays", module, step=1)


def test_an_amendment_that_is_refused_leaves_the_run(one: Daemon) -> None:
    module = perceptron(1)
    with optimizer_of(module, one, "full") as optimizer:
        train(module, optimizer, 1)
    with optimizer_of(module, one, "full", follow=ballast.Follow(readers=1024)) as optimizer:
        for _ in range(2):
            with pytest.raises(ballast.Rejected, match="bytes"):
                optimizer.connect()
    with optimizer_of(module, one, "full") as optimizer:
        train(module, optimizer, 1)
        assert optimizer.last_result is not None and optimizer.last_result.step == 2


@pytest.mark.parametrize("commit", ["release", "staged"])
def test_all_ranks_let_readers_follow(one: Daemon, commit: str) -> None:
    def rank(number: int, run: str, steps: int, module: nn.Module, **options: Any) -> nn.Module:
        with optimizer_of(module, one, run, rank=number, world=2, commit=commit, **options) as optimizer:
            train(module, optimizer, steps, rank=number)
        return module

    run, modules = f"later-ranks-{commit}", [perceptron(1), perceptron(1)]
    side_by_side(2, lambda number: rank(number, run, 2, modules[number]))
    side_by_side(2, lambda number: rank(number, run, 2, modules[number], follow=True))
    assert_followed(one, run, modules[0], step=4)
    straight = side_by_side(2, lambda number: rank(number, f"{run}-straight", 4, perceptron(1)))
    for module, other in zip(modules, straight):
        assert same_bits(weights_of(module), weights_of(other))


def test_a_rank_joins_a_run_that_gets_it_just_then(one: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the daemon's refusal and the rank's look at what it has, rank 0 amends the run."""

    modules = [perceptron(1), perceptron(1)]

    def rank(number: int, **options: Any) -> ballast.AdamW:
        return optimizer_of(modules[number], one, "just-then", rank=number, world=2, **options)

    def begin(number: int) -> None:
        with rank(number) as optimizer:
            train(modules[number], optimizer, 1, rank=number)

    side_by_side(2, begin)
    look = Membership.spec_there
    with rank(0, follow=True) as first, rank(1, follow=True) as second:

        def amended_first(membership: Membership, refusal: ballast.Rejected) -> dict[str, Any] | None:
            monkeypatch.undo()
            first.connect()
            return look(membership, refusal)

        monkeypatch.setattr(Membership, "spec_there", amended_first)
        assert second.connect().step == 1


def test_a_run_on_the_disk_keeps_it(tmp_path: Path) -> None:
    module = perceptron(1)
    with Daemon(storage=tmp_path) as daemon:
        with optimizer_of(module, daemon, "kept") as optimizer:
            train(module, optimizer, 2)
        with optimizer_of(module, daemon, "kept", follow=True) as optimizer:
            train(module, optimizer, 1)
            optimizer.checkpoint()
    with Daemon(storage=tmp_path) as daemon:
        assert_followed(daemon, "kept", module, step=3)
