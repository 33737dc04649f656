"""Modules that follow a run and are called by several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from ballast import follower as followers
from fake_follow import FakeFollow
from followed_net import weights_at

LONG_S = 60.0
INPUT = torch.ones(3)


class Called:
    """A call in a thread of its own. A forward stays in its middle until end() if `stays`."""

    def __init__(self, call: Callable[[], object], stays: bool = False) -> None:
        self.inside, self._go_on = threading.Event(), threading.Event()
        self.stays = stays
        self.thread = threading.Thread(target=call)
        _calls[self.thread] = self
        self.thread.start()
        if stays:
            assert self.inside.wait(LONG_S)

    def pause(self) -> None:
        self.inside.set()
        if self.stays:
            assert self._go_on.wait(LONG_S)

    def end(self) -> None:
        self._go_on.set()
        self.thread.join(LONG_S)
        assert not self.thread.is_alive()


_calls: dict[threading.Thread, Called] = {}


@pytest.fixture
def followed(fake: FakeFollow, net: nn.Module) -> Iterator[ballast.Follower]:
    """With the weights of step 1."""

    def pause(module: nn.Module, inputs: Any) -> None:
        if threading.current_thread() in _calls:
            _calls[threading.current_thread()].pause()

    net.get_submodule("head").register_forward_pre_hook(pause)
    with ballast.follow(net, server=fake.server, run="r") as follower:
        fake.whole(weights_at(1), 1)
        assert follower.wait(timeout=LONG_S)
        yield follower
    _calls.clear()


def send(fake: FakeFollow, follower: ballast.Follower, step: int) -> None:
    seen = follower._feed.newest
    fake.changed(weights_at(step), list(weights_at(step)), step, base=step - 1)
    assert follower._feed.wait(seen, LONG_S)


def evaluate(net: nn.Module, followed: ballast.Follower) -> None:
    with followed.held():
        net(INPUT)


def await_waiting(follower: ballast.Follower) -> None:
    gate = follower._gate
    with gate._free:
        assert gate._free.wait_for(lambda: gate._waiting > 0, LONG_S)


def test_a_forward_waits_for_others_and_has_the_newer_weights(
    fake: FakeFollow, net: nn.Module, followed: ballast.Follower
) -> None:
    first = Called(lambda: net(INPUT), stays=True)
    send(fake, followed, 2)
    second = Called(lambda: net(INPUT))
    await_waiting(followed)
    assert followed.step == 1 and not second.inside.is_set()
    first.end()
    second.end()
    assert followed.step == 2


def test_threads_that_are_always_in_a_forward_get_each_version(
    fake: FakeFollow, net: nn.Module, followed: ballast.Follower
) -> None:
    def call(wanted: int) -> None:
        while followed.step is not None and followed.step < wanted:
            net(INPUT)

    for step in range(2, 12):
        send(fake, followed, step)
        threads = [threading.Thread(target=call, args=(step,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
            assert not thread.is_alive(), f"no forward has got step {step}"


def test_nobody_waits_while_weights_are_held(fake: FakeFollow, net: nn.Module, followed: ballast.Follower) -> None:
    holder = Called(lambda: evaluate(net, followed), stays=True)
    send(fake, followed, 2)
    net(INPUT)
    assert followed.step == 1
    holder.end()
    net(INPUT)
    assert followed.step == 2


def test_a_forward_waits_so_long_and_once_for_the_same_others(
    fake: FakeFollow, net: nn.Module, followed: ballast.Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Called(lambda: net(INPUT), stays=True)
    for step in (2, 3):
        send(fake, followed, step)
        monkeypatch.setattr(followers, "_PATIENCE_S", 0.01 if step == 2 else 10 * LONG_S)
        Called(lambda: net(INPUT)).end()
        assert followed.step == 1
    first.end()
    net(INPUT)
    assert followed.step == 3


def test_who_did_not_wait_waits_when_weights_are_not_held_any_more(
    fake: FakeFollow, net: nn.Module, followed: ballast.Follower
) -> None:
    holder = Called(lambda: evaluate(net, followed), stays=True)
    send(fake, followed, 2)
    net(INPUT)
    forward = Called(lambda: net(INPUT), stays=True)
    holder.end()
    last = Called(lambda: net(INPUT))
    await_waiting(followed)
    forward.end()
    last.end()
    assert followed.step == 2


def test_a_forward_within_one_does_not_wait(fake: FakeFollow, net: nn.Module, followed: ballast.Follower) -> None:
    def again(module: nn.Module, inputs: Any) -> None:
        if followed.step == 1 and followed.lag == 0:
            send(fake, followed, 2)
            net(INPUT)
            assert followed.step == 1

    net.get_submodule("inner").register_forward_pre_hook(again)
    net(INPUT)
    net(INPUT)
    assert followed.step == 2


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("updated", [False, True])
def test_a_forward_that_was_interrupted_is_over(
    fake: FakeFollow, net: nn.Module, followed: ballast.Follower, held: bool, updated: bool
) -> None:
    """As by control-C in a notebook: torch runs no hook then."""

    def interrupt(module: nn.Module, inputs: Any) -> None:
        raise KeyboardInterrupt

    hook = net.get_submodule("inner").register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        evaluate(net, followed) if held else net(INPUT)
    hook.remove()
    send(fake, followed, 2)
    if updated:
        assert followed.update()
    net(INPUT)
    assert followed.step == 2
    Called(lambda: net(INPUT)).end()
    send(fake, followed, 3)
    Called(lambda: net(INPUT)).end()
    assert followed.step == 3
