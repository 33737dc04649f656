"""Readers of a run that ballast.AdamW trains on a real daemon."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import ballast
from daemon import BINARY, Daemon
from models import perceptron, same_bits, spirals, weights_of

LONG_S = 60.0


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One that has all of a run, whatever --daemons says."""
    with Daemon() as started:
        yield started


def optimizer_of(module: nn.Module, one: Daemon | Daemons, run: str, **options: object) -> ballast.AdamW:
    return ballast.AdamW(module.named_parameters(), lr=1e-2, server=one.server, run=run, **options)  # type: ignore[arg-type]


def train(module: nn.Module, optimizer: ballast.AdamW, steps: int) -> None:
    inputs, labels = spirals(1)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(module(inputs), labels)
        loss.backward()
        optimizer.step(loss=loss)


def assert_same(module: nn.Module, other: nn.Module) -> None:
    assert same_bits(weights_of(module), weights_of(other))


@pytest.mark.parametrize("serving", [None, "int8-row", "fp8-e4m3"])
def test_a_module_follows_to_the_bit(one: Daemon, serving: str | None) -> None:
    run = f"follow-{serving or 'fp32'}"
    trained, module = perceptron(1), perceptron(2)
    with optimizer_of(trained, one, run, follow=True, serving=serving) as optimizer:
        train(trained, optimizer, 1)
        with ballast.follow(module, server=one.server, run=run) as follower:
            for step in range(2, 12):
                train(trained, optimizer, 1)
                assert follower.wait(step=step, timeout=LONG_S)
                assert follower.step == step and follower.version is not None
                assert follower.version.base_step is not None or step == 2
                assert_same(module, trained)
            assert follower.unfollowed == []
            assert follower.staleness_s is not None and follower.staleness_s < LONG_S


@pytest.mark.parametrize("serving", [None, "int8-row", "fp8-e4m3"])
def test_patches_of_every_other_step_keep_a_copy_up_to_date(one: Daemon, serving: str | None) -> None:
    run = f"follow-patches-{serving or 'fp32'}"
    trained, copy = perceptron(1), {}
    with optimizer_of(trained, one, run, follow=True, serving=serving) as optimizer:
        train(trained, optimizer, 1)
        with ballast.Subscriber(one.server, run, every=2, patches=True) as reader:
            for step in range(1, 12, 2):
                version = reader.next(LONG_S)
                assert version is not None and version.step == step
                for name, shape, dtype, values, indices in reader.patches():
                    if indices is None:
                        assert version.base_step is None
                        copy[name] = values.reshape(shape)
                    else:
                        copy[name].view(-1).index_copy_(0, indices, values)
                    assert copy[name].dtype == dtype
                for name, weights in trained.named_parameters():
                    assert torch.equal(copy[name], weights), name
                train(trained, optimizer, 2)


def test_it_goes_back_with_the_run(one: Daemon) -> None:
    trained, module = perceptron(1), perceptron(2)
    options = {"snapshots": 2, "snapshot_every": 2, "follow": ballast.Follow(every=1, readers=2)}
    with optimizer_of(trained, one, "follow-rewound", **options) as optimizer:
        train(trained, optimizer, 5)
        with ballast.follow(module, server=one.server, run="follow-rewound") as follower:
            assert follower.wait(step=5, timeout=LONG_S)
            generation = follower.generation
            assert optimizer.rewind(to=4) == 4
            while follower.generation == generation:
                assert follower._feed.wait(follower.version, LONG_S)
                follower.update()
            assert follower.step == 4
            assert_same(module, trained)


def test_a_run_that_was_begun_without_follow_says_so(one: Daemon) -> None:
    trained = perceptron(1)
    with optimizer_of(trained, one, "unfollowed") as optimizer:
        train(trained, optimizer, 1)
    with pytest.raises(ballast.Rejected, match="start its trainer again with follow=True"):
        ballast.Subscriber(one.server, "unfollowed")


def test_a_run_that_nobody_has_begun_is_refused_or_waited_for(one: Daemon) -> None:
    trained, module = perceptron(1), perceptron(2)
    for wait in ({}, {"wait_for_run": 0.1}):
        with pytest.raises(ballast.Rejected, match="'later'") as refused:
            ballast.follow(module, server=one.server, run="later", **wait)
        assert refused.value.code == "NOT_FOUND"
    with ThreadPoolExecutor() as pool:
        early = pool.submit(ballast.follow, module, server=one.server, run="later", wait_for_run=LONG_S)
        with optimizer_of(trained, one, "later", follow=True) as optimizer:
            train(trained, optimizer, 1)
            with early.result(LONG_S) as follower:
                assert follower.wait(step=1, timeout=LONG_S)
                assert_same(module, trained)


def test_a_run_that_is_deleted_is_told(one: Daemon) -> None:
    trained = perceptron(1)
    with optimizer_of(trained, one, "follow-deleted", follow=True) as optimizer:
        train(trained, optimizer, 2)
    with ballast.Subscriber(one.server, "follow-deleted") as reader:
        assert next(reader).step == 2
        ballast.delete_run("follow-deleted", server=one.server)
        with pytest.raises(ballast.Rejected, match="no longer has it"):
            reader.next(LONG_S)


def test_ballastctl_writes_what_the_trainer_has(one: Daemon, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    ballastctl = BINARY.parents[1] / "client" / "cpp" / "ballastctl"
    if not ballastctl.exists():
        pytest.skip("ballastctl is not built")
    trained = perceptron(1)
    with optimizer_of(trained, one, "follow-files", follow=True) as optimizer:
        train(trained, optimizer, 3)
        command = [ballastctl, "--server", one.server, "follow", "follow-files", "--out", tmp_path, "--versions", "1"]
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LONG_S)
        assert "step-3.safetensors" in told.stdout
        loaded = safetensors.load_file(tmp_path / "step-3.safetensors")
        for name, weights in trained.named_parameters():
            assert torch.equal(loaded[name], weights), name
        train(trained, optimizer, 1)
        subprocess.run(command, check=True, timeout=LONG_S, capture_output=True)
    files = [tmp_path / f"step-{step}.safetensors" for step in (3, 4)]
    differ = subprocess.run([ballastctl, "diff", *files], capture_output=True, text=True, timeout=LONG_S)
    assert differ.returncode == 1 and "total" in differ.stdout
    same = subprocess.run([ballastctl, "diff", files[0], files[0]], capture_output=True, text=True, timeout=LONG_S)
    assert (same.returncode, same.stdout) == (0, "")
