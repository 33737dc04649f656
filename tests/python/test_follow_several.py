"""Readers of a run on several daemons: modules and subscribers that follow it, also while a daemon is killed and started again."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ballast
from daemon import Daemons
from following import SYNC, Training
from models import perceptron, same_bits, weights_of
from test_follow_daemon import train

RUN = "parts"
COUNT = 3
LONG_S = 60.0


@pytest.fixture(scope="module")
def several() -> Iterator[Daemons]:
    with Daemons(COUNT) as started:
        yield started


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Daemons]:
    with Daemons(COUNT, storage=tmp_path / "storage") as started:
        yield started


def training_on(server: str, **options: Any) -> Training:
    torch.manual_seed(7)
    adamw = partial(ballast.AdamW, server=server, run=RUN, reconnect_timeout=60, follow=True, on_torn="rewind")
    return Training(adamw, **(SYNC | options))


def assert_follows(module: torch.nn.Module, trained: torch.nn.Module) -> None:
    assert same_bits(weights_of(module), weights_of(trained))


@pytest.mark.parametrize("serving", [None, "int8-row"])
def test_a_module_follows_to_the_bit(several: Daemons, serving: str | None) -> None:
    run = f"follow-{serving or 'fp32'}"
    trained, module = perceptron(1), perceptron(2)
    with ballast.AdamW(
        trained.named_parameters(), lr=1e-2, server=several.server, run=run, follow=True, serving=serving
    ) as optimizer:
        train(trained, optimizer, 1)
        with ballast.follow(module, server=several.server, run=run) as follower:
            for step in range(2, 9):
                train(trained, optimizer, 1)
                assert follower.wait(step=step, timeout=LONG_S)
                assert follower.step == step
                assert_follows(module, trained)
            assert follower.staleness_s is not None and follower.staleness_s < LONG_S


def test_an_average_is_followed_to_the_bit(several: Daemons) -> None:
    trained, module = perceptron(1), perceptron(2)
    follow = ballast.Follow(averages=True)
    with ballast.AdamW(
        trained.named_parameters(), lr=1e-2, server=several.server, run="follow-ema", follow=follow, ema=[0.9]
    ) as optimizer:
        train(trained, optimizer, 1)
        with ballast.follow(module, server=several.server, run="follow-ema", average=0.9) as follower:
            for step in range(2, 6):
                train(trained, optimizer, 1)
                assert follower.wait(step=step, timeout=LONG_S)
                assert same_bits(weights_of(module), list(optimizer.averaged(0.9).values()))
                assert not same_bits(weights_of(module), weights_of(trained))


def test_a_run_that_nobody_has_begun_is_waited_for(several: Daemons) -> None:
    trained, module = perceptron(1), perceptron(2)
    with ThreadPoolExecutor() as pool:
        early = pool.submit(ballast.follow, module, server=several.server, run="later", wait_for_run=LONG_S)
        with ballast.AdamW(
            trained.named_parameters(), lr=1e-2, server=several.server, run="later", follow=True
        ) as optimizer:
            train(trained, optimizer, 1)
            with early.result(LONG_S) as follower:
                assert follower.wait(step=1, timeout=LONG_S)
                assert_follows(module, trained)


def test_patches_of_every_other_step_keep_a_copy_up_to_date(several: Daemons) -> None:
    trained, copy = perceptron(1), {}
    with ballast.AdamW(
        trained.named_parameters(), lr=1e-2, server=several.server, run="follow-patches", follow=True
    ) as optimizer:
        train(trained, optimizer, 2)
        with ballast.Subscriber(several.server, "follow-patches", every=2, patches=True) as reader:
            for step in range(2, 12, 2):
                version = reader.next(LONG_S)
                assert version is not None and version.step == step
                for name, shape, _, values, indices in reader.patches():
                    if indices is None:
                        copy[name] = values.reshape(shape)
                    else:
                        copy[name].view(-1).index_copy_(0, indices, values)
                for name, weights in trained.named_parameters():
                    assert torch.equal(copy[name], weights), name
                train(trained, optimizer, 2)


@pytest.mark.parametrize("killed", range(COUNT))
def test_a_daemon_that_comes_back_is_followed_again(stored: Daemons, killed: int) -> None:
    training = training_on(stored.server)
    module = torch.nn.Sequential(perceptron(seed=2))
    training.steps(1)
    with ballast.follow(module, server=stored.server, run=RUN, reconnect_timeout=LONG_S) as follower:
        training.steps(3)
        assert follower.wait(step=4, timeout=LONG_S)
        assert training.optimizer.checkpoint() == 4
        generation = follower.generation
        stored.restart(killed)
        assert_follows(module, training.model)
        training.steps(5)  # the first of which raises, and goes back
        assert training.rewound == [4]
        assert follower.wait(step=8, timeout=LONG_S)
        assert follower.step == 8 and follower.generation != generation
        assert_follows(module, training.model)
    training.optimizer.close()


def test_a_daemon_that_stays_away_is_named(stored: Daemons) -> None:
    training = training_on(stored.server)
    training.steps(2)
    with ballast.Subscriber(stored.server, RUN, reconnect_timeout=0.5) as reader:
        assert reader.next(LONG_S) is not None
        stored.each[1].kill()
        with pytest.raises(ballast.Unavailable, match=stored.each[1].server):
            reader.next(LONG_S)
        assert reader.readable
    training.optimizer.close()


def test_what_cannot_be_followed_is_refused_by_name(several: Daemons) -> None:
    trained = perceptron(1)
    with ballast.AdamW(trained.named_parameters(), server=several.server, run="whole", follow=True) as optimizer:
        optimizer.connect()
        with pytest.raises(ballast.Rejected, match="has part 1 of 3 of run 'whole' alone: name all daemons"):
            ballast.Subscriber(several.each[1].server, "whole")
        with pytest.raises(ballast.Rejected, match="there is no version of the name 'best'; names: none"):
            ballast.follow(perceptron(2), server=several.server, run="whole", at="best")
        with pytest.raises(ballast.Rejected, match="run 'whole' at .* cannot be followed in format 'bf16'"):
            ballast.Subscriber(several.server, "whole", format="bf16")
