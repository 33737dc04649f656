"""Gradients that are staged on their way from a GPU, by a stand-in for one: host memory, and copies that arrive when the test
says. What only a GPU can show: tests/bench/gpu_trainer.py."""

from __future__ import annotations

import ctypes
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ballast
from ballast import binding, gradient_staging
from ballast.gradient_staging import GradientStaging
from ballast.weight_copies import WeightCopies
from models import layered, same_bits, weights_of

AdamW = Callable[..., ballast.AdamW]


class Started:
    def __init__(self, source: Tensor, target: Tensor, shared: bool):
        self.source, self.target, self.shared = source, target, shared
        self.arrived = False

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        if not self.arrived:
            self.target.copy_(self.source)
            self.arrived = True


class StandIn:
    """Copies that arrive when arrive() says so, or somebody waits."""

    def __init__(self) -> None:
        self.used = True
        self.started: list[Started] = []
        self.rings: list[Tensor] = []

    def pinned(self, nbytes: int) -> Tensor:
        self.rings.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self.rings[-1]

    def start(self, source: Tensor, target: Tensor, shared: bool) -> Started:
        self.started.append(Started(source, target, shared))
        return self.started[-1]

    def arrive(self, count: int) -> None:
        for copy in [copy for copy in self.started if not copy.arrived][:count]:
            copy.synchronize()


class Pushed:
    """What was pushed, as numbers."""

    def __init__(self) -> None:
        self.all: list[tuple[int, Tensor]] = []

    def __call__(self, index: int, address: int, nbytes: int) -> None:
        values = torch.frombuffer(bytearray(ctypes.string_at(address, nbytes)), dtype=torch.float32)
        self.all.append((index, values))

    @property
    def indices(self) -> list[int]:
        return [index for index, _ in self.all]


def numbered(index: int, count: int = 100) -> Tensor:
    return torch.full((count,), float(index))


def test_what_has_arrived_is_pushed_by_the_next_in_the_order_put() -> None:
    copies, pushed = StandIn(), Pushed()
    staging = GradientStaging(pushed, copies)
    for index in range(3):
        staging.put(index, numbered(index))
    assert pushed.indices == []
    copies.arrive(2)
    assert pushed.indices == []
    staging.put(3, numbered(3))
    assert pushed.indices == [0, 1]
    staging.flush()
    assert pushed.indices == [0, 1, 2, 3]
    for index, values in pushed.all:
        assert torch.equal(values, numbered(index))


def test_one_that_has_not_arrived_holds_up_those_behind_it() -> None:
    copies, pushed = StandIn(), Pushed()
    staging = GradientStaging(pushed, copies)
    for index in range(3):
        staging.put(index, numbered(index))
    copies.started[1].synchronize()
    staging.put(3, numbered(3))
    assert pushed.indices == []


@pytest.mark.parametrize("seed", range(20))
def test_the_ring_holds_no_more_than_it_is_said_to_and_overwrites_nothing(seed: int) -> None:
    draw = random.Random(seed)
    copies, pushed = StandIn(), Pushed()
    staging = GradientStaging(pushed, copies, nbytes=16 << 10)
    sent = []
    for index in range(300):
        sent.append(numbered(index, draw.randint(1, 1500)))
        staging.put(index, sent[-1])
        if draw.random() < 0.3:
            copies.arrive(draw.randint(1, 4))
        waiting = [copy for copy in copies.started if not copy.arrived]
        assert sum(copy.source.nbytes for copy in waiting) <= 16 << 10
    staging.flush()
    assert len(copies.rings) == 1
    assert pushed.indices == list(range(300))
    for (_, values), gradient in zip(pushed.all, sent, strict=True):
        assert torch.equal(values, gradient)


def test_a_gradient_larger_than_the_ring_gets_a_larger_one_after_all_before_it() -> None:
    copies, pushed = StandIn(), Pushed()
    staging = GradientStaging(pushed, copies, nbytes=1024)
    staging.put(0, numbered(0))
    staging.put(1, numbered(1, 5000))
    assert pushed.indices == [0]
    staging.put(2, numbered(2))
    staging.flush()
    assert pushed.indices == [0, 1, 2]
    assert [len(ring) for ring in copies.rings] == [1024, 20224]


def test_what_is_dropped_is_not_pushed_and_its_memory_not_used_before_it_has_arrived() -> None:
    copies, pushed = StandIn(), Pushed()
    staging = GradientStaging(pushed, copies)
    staging.put(0, numbered(0))
    staging.drop()
    assert copies.started[0].arrived
    staging.put(1, numbered(1))
    staging.flush()
    assert pushed.indices == [1]


def test_a_push_that_fails_is_not_tried_again() -> None:
    def push(index: int, address: int, nbytes: int) -> None:
        raise RuntimeError("the step is over")

    staging = GradientStaging(push, StandIn())
    staging.put(0, numbered(0))
    with pytest.raises(RuntimeError, match="the step is over"):
        staging.flush()
    staging.flush()


def test_a_gradients_memory_is_held_until_it_was_pushed() -> None:
    copies, pushed = StandIn(), Pushed()
    staging = GradientStaging(pushed, copies)
    gradient = numbered(0)
    held = weakref.ref(gradient)
    staging.put(0, gradient)
    del gradient
    copies.started.clear()
    assert held() is not None
    staging.flush()
    assert held() is None


# --- a trainer whose gradients are staged -------------------------------------------------------------------------------


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Every gradient is staged, by this, while it is used."""
    stand_in = StandIn()
    for module in (gradient_staging, binding):
        monkeypatch.setattr(module, "is_staged", lambda gradient: stand_in.used)
    monkeypatch.setattr(gradient_staging, "CudaCopies", lambda: stand_in)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return stand_in


def batch(number: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def train(optimizer: ballast.AdamW, model: torch.nn.Module, micro_batches: int, clipped: bool) -> None:
    """Three steps."""
    for number in range(3 * micro_batches):
        model(batch(number)).square().mean().backward()
        if number % micro_batches == micro_batches - 1:
            if clipped:
                optimizer.clip_grad_norm_(0.1)
            optimizer.step()
    optimizer.wait()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_forward": True},
        {"commit": "staged"},
        {"gradient_accumulation_steps": 3},
        {"gradient_accumulation_steps": 3, "commit": "staged"},
        {"gradient_dtype": "bf16"},
    ],
    ids=str,
)
def test_a_trainer_makes_the_same_steps(adamw: AdamW, run: str, copies: StandIn, options: dict[str, Any]) -> None:
    micro_batches, clipped = options.get("gradient_accumulation_steps", 1), options.get("commit") == "staged"
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), **options)
    train(optimizer, model, micro_batches, clipped)
    ours = weights_of(model)
    assert len(copies.started) == 3 * micro_batches * len(ours)
    assert all(copy.arrived for copy in copies.started)
    copies.used = False
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), run=f"{run}-pushed", **options)
    train(optimizer, model, micro_batches, clipped)
    assert same_bits(ours, weights_of(model))


def test_a_step_that_is_dropped_pushes_none_of_what_is_staged(adamw: AdamW, copies: StandIn) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit="staged", master_weight_bits=32)
    before = weights_of(model)
    model(batch(0)).square().mean().backward()
    optimizer.zero_grad()
    assert same_bits(before, weights_of(model))
    model(batch(1)).square().mean().backward()
    optimizer.step()
    assert not same_bits(before, weights_of(model))
    result = optimizer.last_result
    assert result is not None and result.step == 2


class FromStaticMemory(torch.autograd.Function):
    """Its gradient is always in the same memory, as that of torch.cuda.make_graphed_callables is."""

    memory = torch.ones(8, 8)

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return FromStaticMemory.memory.detach()


def test_what_others_may_write_to_is_waited_for_by_the_device(adamw: AdamW, copies: StandIn) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), gradient_accumulation_steps=2)
    model(batch(0)).square().mean().backward()
    assert copies.started and not any(copy.shared for copy in copies.started)
    model(batch(1)).square().mean().backward()
    optimizer.step()
    copies.started.clear()
    for _ in range(2):
        FromStaticMemory.apply(model[0].weight).backward()  # type: ignore[no-untyped-call]
    assert [copy.shared for copy in copies.started] == [True, True]
    optimizer.step()


def test_what_was_set_by_hand_is_waited_for_by_the_device(adamw: AdamW, copies: StandIn) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    model[1].weight.grad = torch.ones(8, 8)
    optimizer.step()
    assert [copy.shared for copy in copies.started] == [True]


def test_a_gradient_within_a_captured_graph_is_refused_before_anything_is_sent(
    adamw: AdamW, copies: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ballast.Rejected, match="a CUDA graph is being captured"):
            model(batch(0)).square().mean().backward()
    assert not copies.started
    model.zero_grad()
    model(batch(0)).square().mean().backward()
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.step == 1


def test_the_ring_is_in_host_memory_whatever_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: asked.append(options))
    gradient_staging.CudaCopies().pinned(16)
    assert asked == [{"dtype": torch.uint8, "device": "cpu", "pin_memory": True}]


def test_nothing_lands_where_a_gpu_may_still_be_copying_from(adamw: AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    waits: list[int] = []
    monkeypatch.setattr(WeightCopies, "wait", lambda self: waits.append(1))
    model(batch(0)).square().mean().backward()
    assert len(waits) == 1  # before the step is begun
    optimizer.step()
    optimizer.pull()
    assert len(waits) == 2
