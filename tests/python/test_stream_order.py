"""Uses and changes of weights on a GPU are in order, whatever streams they are in."""

from __future__ import annotations

import random

from collections.abc import Iterable

import pytest
import torch
from torch import nn

import ballast
from ballast import follower as followers
from ballast.followed_parameters import FollowedParameters
from ballast.stream_order import StreamOrder
from fake_follow import FakeFollow
from followed_net import weights_at
from played_streams import GPU, PlayedStreams

CPU = torch.device("cpu")
LONG_S = 60.0


class Weights:
    """Two halves of a version on a played GPU, which uses read and changes write one after the other."""

    def __init__(self, gpu: PlayedStreams) -> None:
        self._gpu = gpu
        self._halves = [0, 0]
        self._newest = 0
        self.wrong: list[tuple[int, int, int]] = []

    def change(self) -> None:
        self._newest += 1
        for half in (0, 1):
            self._gpu.ask(lambda half=half, version=self._newest: self._halves.__setitem__(half, version))

    def use(self) -> None:
        read: list[int] = []
        for half in (0, 1):
            self._gpu.ask(lambda half=half: read.append(self._halves[half]))
        self._gpu.ask(lambda asked=self._newest: read == [asked, asked] or self.wrong.append((asked, *read)))


def play(seed: int, order: StreamOrder, gpu: PlayedStreams) -> list[tuple[int, int, int]]:
    draw, weights = random.Random(seed), Weights(gpu)
    for _ in range(40):
        gpu.stream = draw.randrange(3)
        if draw.random() < 0.3:
            order.begin_change([GPU])
            weights.change()
            order.end_change([GPU])
        else:
            order.begin_use([CPU, GPU])
            weights.use()
            order.end_use([CPU, GPU])
        gpu.run(draw.randrange(6))
    gpu.run()
    return weights.wrong


def test_each_use_sees_the_whole_of_the_last_change(seeds: range = range(200)) -> None:
    for seed in seeds:
        gpu = PlayedStreams(seed)
        assert not play(seed, StreamOrder(gpu), gpu), seed


@pytest.mark.parametrize("call", ["begin_use", "end_use", "begin_change", "end_change"])
def test_without_any_one_of_the_calls_it_does_not(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamOrder, call, lambda self, devices: None)
    wrong = 0
    for seed in range(50):
        gpu = PlayedStreams(seed)
        wrong += len(play(seed, StreamOrder(gpu), gpu))
    assert wrong > 0


def test_what_is_captured_for_a_graph_has_no_events_in_it() -> None:
    gpu = PlayedStreams()
    order = StreamOrder(gpu)
    order.begin_change([GPU])
    order.end_change([GPU])
    gpu.captures = True
    assert order.capturing([CPU, GPU]) and not order.capturing([CPU])
    gpu.run()
    order.begin_use([GPU])
    order.end_use([GPU])
    gpu.ask(lambda: pytest.fail("an event or a wait was captured"))
    with pytest.raises(pytest.fail.Exception):
        gpu.run(1)


class NoStreams(PlayedStreams):
    def capturing(self) -> bool:
        pytest.fail("a GPU was asked")

    def current(self, device: torch.device) -> int:
        pytest.fail("a GPU was asked")


def test_host_memory_asks_no_gpu() -> None:
    order = StreamOrder(NoStreams())
    assert not order.capturing([CPU])
    for call in (order.begin_change, order.end_change, order.begin_use, order.end_use):
        call([CPU])


# --- what a follower says ------------------------------------------------------------------------------------------------


class Told(StreamOrder):
    """What a follower whose module were on a GPU says of it."""

    def __init__(self) -> None:
        self.gpu = PlayedStreams()
        self.said: list[str] = []
        super().__init__(self.gpu)

    def begin_use(self, devices: Iterable[torch.device]) -> None:
        self.said.append("use")

    def end_use(self, devices: Iterable[torch.device]) -> None:
        self.said.append("used")

    def begin_change(self, devices: Iterable[torch.device]) -> None:
        self.said.append("change")

    def end_change(self, devices: Iterable[torch.device]) -> None:
        self.said.append("changed")

    def taken(self) -> list[str]:
        said, self.said = self.said, []
        return said


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(followers, "StreamOrder", lambda: told)
    monkeypatch.setattr(FollowedParameters, "devices", {GPU})
    monkeypatch.setattr(FollowedParameters, "await_copies", lambda self: None)
    return told


def test_a_follower_says_when_weights_are_used_and_changed(fake: FakeFollow, net: nn.Module, order: Told) -> None:
    with ballast.follow(net, server=fake.server, run="r") as follower:
        fake.whole(weights_at(1), 1)
        assert follower.wait(timeout=LONG_S) and order.taken() == ["change", "changed"]
        net(torch.ones(3))
        with follower.held():
            assert order.taken() == ["use", "used", "use"]
        assert order.taken() == ["used"]
        with pytest.raises(RuntimeError):
            net(torch.ones(7))
        assert order.taken() == ["use", "used"]
        fake.changed(weights_at(2), list(weights_at(2)), 2, base=1)
        assert follower._feed.wait(follower.version, LONG_S)
        net(torch.ones(3))
        assert order.taken() == ["change", "changed", "use", "used"]


def test_while_a_graph_is_captured_weights_stay(fake: FakeFollow, net: nn.Module, order: Told) -> None:
    with ballast.follow(net, server=fake.server, run="r") as follower:
        fake.whole(weights_at(1), 1)
        assert follower.wait(timeout=LONG_S)
        fake.changed(weights_at(2), list(weights_at(2)), 2, base=1)
        assert follower._feed.wait(follower.version, LONG_S)
        order.gpu.captures = True
        net(torch.ones(3))
        with pytest.raises(ballast.Rejected, match="while a CUDA graph is captured: update\\(\\) before"):
            follower.update()
        assert follower.step == 1
        order.gpu.captures = False
        net(torch.ones(3))
        assert follower.step == 2


def test_what_cannot_be_asked_of_a_gpu_keeps_no_weights_from_changing(
    fake: FakeFollow, net: nn.Module, order: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(devices: Iterable[torch.device]) -> None:
        raise RuntimeError("the GPU is lost")

    with ballast.follow(net, server=fake.server, run="r") as follower:
        fake.whole(weights_at(1), 1)
        assert follower.wait(timeout=LONG_S)
        for call in ("begin_use", "end_use"):
            with monkeypatch.context() as patch:
                patch.setattr(order, call, lost)
                with pytest.raises(RuntimeError, match="the GPU is lost"), follower.held():
                    pass
        fake.changed(weights_at(2), list(weights_at(2)), 2, base=1)
        assert follower.wait(step=2, timeout=LONG_S)
