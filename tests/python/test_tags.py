"""Weights of a run that have names, kept by a real daemon, and modules that go back to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ballast
from daemon import Daemon, Daemons
from models import perceptron, same_bits, spirals, weights_of
from test_follow_daemon import optimizer_of, train

LONG_S = 60.0
TAGGED = ballast.Follow(tags=2)


@pytest.fixture(scope="module", params=[1, 3], ids=["one daemon", "three daemons"])
def some(request: pytest.FixtureRequest) -> Iterator[Daemons]:
    """What has a run, whatever --daemons says."""
    with Daemons(request.param) as started:
        yield started


@pytest.mark.parametrize("overlap", [False, True])
def test_a_module_goes_back_to_a_name_and_on(some: Daemons, overlap: bool) -> None:
    trained, module = perceptron(1), perceptron(2)
    run = f"tags-{int(overlap)}"
    with optimizer_of(trained, some, run, follow=TAGGED, overlap_forward=overlap) as optimizer:
        train(trained, optimizer, 3)
        assert optimizer.tag("good") == 3
        good = weights_of(trained)
        assert optimizer.tag("good") == 3
        with ballast.follow(module, server=some.server, run=run) as follower:
            train(trained, optimizer, 2)
            assert follower.wait(step=5, timeout=LONG_S)
            assert follower.rollback("good", timeout=LONG_S)
            assert follower.step == 3 and follower.version is not None and follower.version.tag == "good"
            assert same_bits(weights_of(module), good)
            train(trained, optimizer, 1)
            assert not follower.update() and follower.step == 3
            with pytest.raises(ballast.Rejected, match="names: 'good'"):
                follower.rollback("bad")
            follower.resume()
            assert follower.wait(step=6, timeout=LONG_S)
            assert follower.version is not None and follower.version.tag is None
            assert same_bits(weights_of(module), weights_of(trained))
        with ballast.follow(perceptron(3), server=some.server, run=run, at="good") as other:
            assert other.wait(timeout=LONG_S) and other.step == 3
            assert same_bits(weights_of(other._module), good)
        with pytest.raises(ballast.Rejected, match="no version of the name 'bad'"):
            ballast.follow(perceptron(3), server=some.server, run=run, at="bad")


@pytest.mark.parametrize("count", [1, 2])
def test_names_from_before_the_run_grew_are_not_listed(count: int, tmp_path: Path) -> None:
    trained, added = perceptron(1), torch.nn.Parameter(torch.zeros(3))
    with Daemons(count, storage=tmp_path) as some, optimizer_of(trained, some, "grown", follow=TAGGED) as optimizer:
        train(trained, optimizer, 1)
        optimizer.tag("before")
        optimizer.add_param_group({"params": [("added", added)]})
        added.sum().backward()
        train(trained, optimizer, 1)
        optimizer.tag("since", replace=True)
        assert optimizer.tags() == {"since": 2}


def test_names_are_listed_replaced_and_let_go(some: Daemons) -> None:
    trained = perceptron(1)
    with optimizer_of(trained, some, "tags-listed", follow=TAGGED) as optimizer:
        train(trained, optimizer, 1)
        assert optimizer.tags() == {}
        optimizer.tag("best")
        train(trained, optimizer, 1)
        with pytest.raises(ballast.Rejected, match="with replace") as refused:
            optimizer.tag("best")
        assert refused.value.code == "ALREADY_EXISTS"
        assert optimizer.tag("best", replace=True) == 2
        optimizer.tag("last")
        assert optimizer.tags() == {"best": 2, "last": 2}
        with pytest.raises(ballast.Rejected, match=r"allows 2 \(follow.tags\)"):
            optimizer.tag("third")
        with pytest.raises(ballast.Rejected, match="wanted 1 to 64 of a-z"):
            optimizer.tag("Best")
        optimizer.untag("best")
        with pytest.raises(ballast.Rejected, match="names: 'last'"):
            optimizer.untag("best")
        for version in ballast.Subscriber(some.server, "tags-listed", at="last"):
            assert version.tag == "last" and version.step == 2
            assert same_bits(list(version.tensors.values()), weights_of(trained))
            break
        train(trained, optimizer, 1)
        with ballast.Subscriber(some.server, "tags-listed") as reader:
            versions = iter(reader)
            assert next(versions).step == 3
            reader.rollback("last")
            back = next(versions)
            assert (back.step, back.tag) == (2, "last") and reader.next(0.1) is None
            reader.resume()
            newest = next(versions)
            assert newest.step == 3 and newest.tag is None
            assert same_bits(list(newest.tensors.values()), weights_of(trained))


def test_a_run_that_keeps_none_and_a_step_that_is_open_say_so(some: Daemons) -> None:
    trained = perceptron(1)
    with optimizer_of(trained, some, "tags-none", follow=True) as optimizer:
        train(trained, optimizer, 1)
        with pytest.raises(ballast.Rejected, match="has no follow.tags"):
            optimizer.tag("good")
        inputs, labels = spirals(1)
        nn.functional.cross_entropy(trained(inputs), labels).backward()
        with pytest.raises(ballast.Rejected, match=r"is open: call step\(\) first, then tag\(\)"):
            optimizer.tag("good")
        optimizer.step()
    with pytest.raises(ballast.Rejected, match="tags=257"):
        ballast.Follow(tags=257)


@pytest.mark.parametrize("serving", [None, "int8-row"])
def test_a_file_outlives_the_daemon_and_any_tool_reads_it(serving: str | None, tmp_path: Path) -> None:
    trained, module = perceptron(1), perceptron(2)
    with Daemon(storage=tmp_path) as first:
        with optimizer_of(trained, first, "stored", follow=TAGGED, serving=serving) as optimizer:
            train(trained, optimizer, 2)
            optimizer.tag("good")
            good = weights_of(trained)
            train(trained, optimizer, 1)
        first.stop()
        first.wait()
    files = list((tmp_path / "runs" / "stored" / "tags").iterdir())
    assert [file.name for file in files] == ["good.1.safetensors"]
    read = load_file(files[0])
    for (name, _), tensor in zip(trained.named_parameters(), good, strict=True):
        codes = read[name]
        assert codes.shape == tensor.shape
        if serving:
            scales = read[f"{name}.scales"]
            assert codes.dtype == torch.int8 and scales.numel() == codes.numel() // codes.shape[-1]
        else:
            assert torch.equal(codes, tensor)
    with Daemon(storage=tmp_path) as second, ballast.follow(
        module, server=second.server, run="stored", at="good"
    ) as follower:
        assert follower.wait(timeout=LONG_S) and follower.step == 2
        assert same_bits(weights_of(module), good)
