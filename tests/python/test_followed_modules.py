"""Modules that follow a run, and are converted, copied, written to or forked meanwhile."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ballast
from fake_follow import FakeFollow
from followed_net import Net, weights_at

LONG_S = 60.0
INPUT = torch.ones(3)


def follow(fake: FakeFollow, module: nn.Module) -> ballast.Follower:
    """With the weights of step 1."""
    follower = ballast.follow(module, server=fake.server, run="r")
    fake.whole(weights_at(1), 1)
    assert follower.wait(timeout=LONG_S)
    return follower


def one_changes(fake: FakeFollow) -> dict[str, Tensor]:
    """In step 2; the weights then."""
    weights = weights_at(1) | {"head.weight": weights_at(2)["head.weight"]}
    fake.changed(weights, ["head.weight"], 2, base=1)
    return weights


def assert_has(module: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, tensor in weights.items():
        assert torch.equal(module.get_parameter(name), tensor), name


def load(net: Net) -> None:
    net.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in net.state_dict().items()})


def load_others(net: Net) -> None:
    net.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in net.state_dict().items()}, assign=True)


def put_another(net: Net) -> None:
    net.inner.weight = net.tied.weight = nn.Parameter(torch.zeros_like(net.inner.weight))


def move(net: Net) -> None:
    net.inner.bias.data = torch.zeros_like(net.inner.bias)


@pytest.mark.parametrize("write", [load, load_others, put_another, move])
def test_what_others_have_written_goes_with_the_next_version(
    fake: FakeFollow, net: Net, write: Callable[[Net], None]
) -> None:
    with follow(fake, net) as follower:
        write(net)
        if write is load_others:
            net.tied.weight = net.inner.weight
        weights = one_changes(fake)
        assert follower.wait(step=2, timeout=LONG_S)
        assert_has(net, weights)


def test_a_module_that_was_converted_is_refused_until_it_fits(tmp_path: Path, net: Net) -> None:
    halves = {name: tensor.bfloat16() for name, tensor in weights_at(1).items()}
    net.bfloat16()
    with FakeFollow(tmp_path, halves) as fake, ballast.follow(net, server=fake.server, run="r") as follower:
        fake.whole(halves, 1)
        assert follower.wait(timeout=LONG_S)
        net.half()
        fake.changed(halves, ["head.weight"], 2, base=1)
        for _ in range(2):
            with pytest.raises(ballast.Rejected, match="'inner.weight' is torch.float16 here and torch.bfloat16 in"):
                follower.wait(step=2, timeout=LONG_S)
        with pytest.raises(ballast.Rejected, match="convert the module"):
            net(INPUT.half())
        net.bfloat16()
        net(INPUT.bfloat16())
        assert follower.step == 2
        assert_has(net, halves)


def test_a_module_follows_once(fake: FakeFollow, net: Net) -> None:
    holder = nn.ModuleDict({"net": net})
    with follow(fake, net):
        for module, names in ((net, None), (holder, lambda name: f"net.{name}")):
            with pytest.raises(
                ballast.Rejected, match="'inner.weight'.* follow run 'r' already: close.. that follower"
            ):
                ballast.follow(module, server=fake.server, run="r", names=names)
        ballast.follow(Net(), server=fake.server, run="r").close()
    ballast.follow(net, server=fake.server, run="r").close()


def test_copies_keep_the_weights_that_they_have(fake: FakeFollow, net: Net) -> None:
    with follow(fake, net) as follower:
        copies = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
        weights = one_changes(fake)
        seen = follower.version
        while follower.lag == 0:
            assert follower._feed.wait(seen, LONG_S)
        for one in copies:
            one(INPUT)
            assert follower.step == 1
            assert_has(one, weights_at(1))
        net(INPUT)
        assert_has(net, weights)
    for one in copies:
        one(INPUT)


def test_a_fork_is_told_that_no_versions_come_there(program: Callable[..., Any]) -> None:
    trainer = program("followed_forks")
    for name in ("forward", "wait"):
        assert trainer.hear().startswith(f"{name}: this process is a fork of the one that follows run 'test-")
        assert trainer.hear() == f"{name}: 0"
    assert [trainer.hear() for _ in range(3)] == ["close: module is called", "close: 0", "follows: True"]
    assert trainer.end() == 0
