"""Gradients that are staged on their way from a GPU, by a stand-in for one: host memory, and copies that arrive when the test
says. What only a GPU can show: tests/bench/gpu_trainer.py."""

from __future__ import annotations

import ctypes
import random
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

import ballast
from ballast import _core, binding, gradient_staging
from ballast.gradient_staging import GradientStaging
from ballast.weight_copies import WeightCopies
from daemon import Daemon
from models import layered, same_bits, weights_of

AdamW = Callable[..., ballast.AdamW]


class Started:
    def __init__(self, source: Tensor, target: Tensor, shared: bool, arrival: int):
        self.source, self.target, self.shared, self.arrival = source, target, shared, arrival
        self.arrived = False

    def query(self) -> bool:
        return self.arrived


class StandIn:
    """Copies that arrive when arrive() says so; tell() is called with the arrival."""

    def __init__(self) -> None:
        self.started: list[Started] = []
        self.rings: list[Tensor] = []
        self.tell: Callable[[int], None] = lambda arrival: None

    def pinned(self, nbytes: int) -> Tensor:
        self.rings.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self.rings[-1]

    def start(self, source: Tensor, target: Tensor, shared: bool, arrival: int) -> Started:
        self.started.append(Started(source, target, shared, arrival))
        return self.started[-1]

    @property
    def waiting(self) -> list[Started]:
        return [copy for copy in self.started if not copy.arrived]

    def arrive(self, count: int) -> None:
        for copy in self.waiting[:count]:
            copy.target.copy_(copy.source)
            copy.arrived = True
            self.tell(copy.arrival)


class Pushes:
    """A client whose queue pushes what has arrived at once. A wait for it makes one copy arrive."""

    def __init__(self, copies: StandIn) -> None:
        self.all: list[tuple[int, Tensor]] = []
        self.error: Exception | None = None
        self._copies = copies
        self._put: list[tuple[int, int, int]] = []
        self._arrived: set[int] = set()
        self._dropped: set[int] = set()
        self._counted = 0
        copies.tell = self._tell

    @property
    def indices(self) -> list[int]:
        return [index for index, _ in self.all]

    def push_queue(self) -> Pushes:
        return self

    def put(self, index: int, address: int, nbytes: int) -> int:
        self._put.append((index, address, nbytes))
        return len(self._put) - 1

    def take_back(self, arrival: int) -> None:
        assert arrival == len(self._put) - 1
        self._put.pop()

    def _tell(self, arrival: int) -> None:
        self._arrived.add(arrival)
        while self._counted in self._arrived:
            if self._counted not in self._dropped and self.error is None:
                index, address, nbytes = self._put[self._counted]
                values = torch.frombuffer(bytearray(ctypes.string_at(address, nbytes)), dtype=torch.float32)
                self.all.append((index, values))
            self._counted += 1

    def count_pushed(self) -> int:
        return self._counted

    def await_pushed(self, count: int, timeout_s: float) -> bool:
        if self._counted < count:
            self._copies.arrive(1)
        if self.error is not None and self._put:
            error, self.error = self.error, None
            raise error
        return self._counted >= count

    def drop(self) -> None:
        self._dropped.update(range(self._counted, len(self._put)))


def staging_of(nbytes: int = 1 << 20) -> tuple[GradientStaging, StandIn, Any]:
    copies = StandIn()
    client: Any = Pushes(copies)
    return GradientStaging(client, nbytes, copies), copies, client


def numbered(index: int, count: int = 100) -> Tensor:
    return torch.full((count,), float(index))


def test_what_has_arrived_is_pushed_in_the_order_put() -> None:
    staging, copies, pushed = staging_of()
    for index in range(3):
        staging.put(index, numbered(index))
    assert pushed.indices == []
    copies.arrive(2)
    assert pushed.indices == [0, 1]
    staging.put(3, numbered(3))
    staging.flush()
    assert pushed.indices == [0, 1, 2, 3]
    for index, values in pushed.all:
        assert torch.equal(values, numbered(index))


@pytest.mark.parametrize("seed", range(20))
def test_the_ring_holds_no_more_than_it_is_said_to_and_overwrites_nothing(seed: int) -> None:
    draw = random.Random(seed)
    staging, copies, pushed = staging_of(16 << 10)
    sent = []
    for index in range(300):
        sent.append(numbered(index, draw.randint(1, 1500)))
        staging.put(index, sent[-1])
        if draw.random() < 0.3:
            copies.arrive(draw.randint(1, 4))
        assert sum(copy.source.nbytes for copy in copies.waiting) <= 16 << 10
    staging.flush()
    assert len(copies.rings) == 1
    assert pushed.indices == list(range(300))
    for (_, values), gradient in zip(pushed.all, sent, strict=True):
        assert torch.equal(values, gradient)


def test_a_gradient_larger_than_the_ring_gets_a_larger_one_after_all_before_it() -> None:
    staging, copies, pushed = staging_of(1024)
    staging.put(0, numbered(0))
    staging.put(1, numbered(1, 5000))
    assert pushed.indices == [0]
    staging.put(2, numbered(2))
    staging.flush()
    assert pushed.indices == [0, 1, 2]
    assert [len(ring) for ring in copies.rings] == [1024, 20224]


def test_what_is_dropped_is_not_pushed_and_its_memory_not_used_before_it_has_arrived() -> None:
    staging, copies, pushed = staging_of()
    staging.put(0, numbered(0))
    staging.drop()
    assert copies.started[0].arrived
    staging.put(1, numbered(1))
    staging.flush()
    assert pushed.indices == [1]


def test_a_push_that_fails_is_not_tried_again() -> None:
    staging, copies, pushed = staging_of()
    staging.put(0, numbered(0))
    pushed.error = RuntimeError("the step is over")
    with pytest.raises(RuntimeError, match="the step is over"):
        staging.flush()
    staging.flush()
    staging.put(1, numbered(1))
    pushed.error = RuntimeError("the step is over")
    with pytest.raises(RuntimeError, match="the step is over"):
        staging.put(2, numbered(2))


def test_a_copy_that_cannot_be_started_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    staging, copies, pushed = staging_of()

    def start(source: Tensor, target: Tensor, shared: bool, arrival: int) -> Started:
        raise RuntimeError("the driver has no memory")

    with monkeypatch.context() as patched:
        patched.setattr(copies, "start", start)
        with pytest.raises(RuntimeError, match="no memory"):
            staging.put(0, numbered(0))
    staging.put(1, numbered(1))
    staging.flush()
    assert pushed.indices == [1]


def test_a_gradients_memory_is_held_until_its_copy_is_done() -> None:
    staging, copies, _ = staging_of()
    gradient = numbered(0)
    held = weakref.ref(gradient)
    staging.put(0, gradient)
    del gradient
    staging.put(1, numbered(1))
    copies.started[0].source = numbered(0)
    assert held() is not None
    copies.arrive(1)
    staging.put(2, numbered(2))
    assert held() is None


def test_what_is_in_host_memory_comes_after_what_is_staged() -> None:
    staging, _, pushed = staging_of()
    staging.put(0, numbered(0))
    pushed.push = lambda index, address, nbytes: pushed.all.append((index, numbered(index)))
    staging.send(1, numbered(1))
    assert pushed.indices == [0, 1]


# --- a trainer whose gradients are staged -------------------------------------------------------------------------------


class Stream(StandIn):
    """Copies that a thread of its own makes, later, as a GPU does, and then tells the client's queue."""

    def __init__(self) -> None:
        super().__init__()
        self.used = True
        self.holds = Event()  # cleared: copies wait for it
        self.holds.set()
        self._asked: SimpleQueue[tuple[Started, Event]] = SimpleQueue()
        self._arrived = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_core.arrived)
        Thread(target=self._run, daemon=True).start()

    def start(self, source: Tensor, target: Tensor, shared: bool, arrival: int) -> Started:
        started, done = super().start(source, target, shared, arrival), Event()
        self._asked.put((started, done))
        if shared:
            done.wait()
        return started

    def until_all_arrived(self) -> None:
        last = self.start(torch.zeros(1), torch.zeros(1), shared=True, arrival=0)
        assert last.arrived

    def _run(self) -> None:
        while True:
            copy, done = self._asked.get()
            self.holds.wait()
            copy.target.copy_(copy.source)
            copy.arrived = True
            if copy.arrival:
                self._arrived(copy.arrival)
            done.set()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Every gradient is staged, by this, while it is used."""
    stand_in = Stream()
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
def test_a_trainer_makes_the_same_steps(adamw: AdamW, run: str, copies: Stream, options: dict[str, Any]) -> None:
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


def test_a_step_that_is_dropped_pushes_none_of_what_is_staged(adamw: AdamW, copies: Stream) -> None:
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


def test_a_daemon_that_is_gone_is_told_and_nothing_hangs(run: str, copies: Stream) -> None:
    model = layered(seed=1)
    with Daemon() as doomed:
        optimizer = ballast.AdamW(model.named_parameters(), server=doomed.server, run=run, reconnect_timeout=1)
        train(optimizer, model, 1, clipped=False)
        doomed.kill()
        with pytest.raises(ballast.Unavailable, match=doomed.server):
            train(optimizer, model, 1, clipped=False)
        with pytest.raises(ballast.Unavailable, match=doomed.server):
            train(optimizer, model, 1, clipped=False)
        optimizer.close()


def test_a_rewound_run_is_followed(adamw: AdamW, run: str, admin: _core.Client, copies: Stream) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), snapshots=2, snapshot_every=1)
    train(optimizer, model, 1, clipped=False)
    admin.rewind(run, None, 1, "to see")
    with pytest.raises(ballast.RunRewound):
        train(optimizer, model, 1, clipped=False)
    train(optimizer, model, 1, clipped=False)
    result = optimizer.last_result
    assert result is not None and result.step == 2 + 3


def test_an_optimizer_is_closed_while_gradients_arrive(adamw: AdamW, copies: Stream) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    train(optimizer, model, 1, clipped=False)
    copies.holds.clear()
    model(batch(0)).square().mean().backward()
    copies.holds.set()
    optimizer.close()
    copies.until_all_arrived()


# --- the queue alone ----------------------------------------------------------------------------------------------------


def arrive(arrival: int) -> None:
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_core.arrived)(arrival)


def test_what_a_push_failed_with_is_raised_once_and_what_was_put_before_that_is_not_pushed(daemon: Daemon) -> None:
    client = _core.Client.connect(daemon.server, 10, 10)  # of no run
    queue, gradient = client.push_queue(), numbered(0)
    arrivals = [queue.put(index, gradient.data_ptr(), gradient.nbytes) for index in range(3)]
    for arrival in arrivals[:2]:
        arrive(arrival)
    with pytest.raises(ballast.Rejected, match="Attach"):
        while not queue.await_pushed(2, 10):
            pass
    arrive(arrivals[2])
    assert queue.await_pushed(3, 10)
    assert queue.count_pushed() == 3


def test_what_is_dropped_is_counted_when_it_has_arrived(daemon: Daemon) -> None:
    client = _core.Client.connect(daemon.server, 10, 10)
    queue, gradient = client.push_queue(), numbered(0)
    arrival = queue.put(0, gradient.data_ptr(), gradient.nbytes)
    queue.drop()
    assert not queue.await_pushed(1, 0)
    arrive(arrival)
    assert queue.await_pushed(1, 10)


def test_a_copy_may_arrive_when_its_queue_is_gone(daemon: Daemon) -> None:
    client = _core.Client.connect(daemon.server, 10, 10)
    queue, gradient = client.push_queue(), numbered(0)
    arrival = queue.put(0, gradient.data_ptr(), gradient.nbytes)
    del queue
    arrive(arrival)


def test_a_queue_of_a_closed_client_says_so(daemon: Daemon) -> None:
    client = _core.Client.connect(daemon.server, 10, 10)
    queue, gradient = client.push_queue(), numbered(0)
    arrival = queue.put(0, gradient.data_ptr(), gradient.nbytes)
    client.close()
    arrive(arrival)
    with pytest.raises(ballast.Rejected, match="the connection is closed"):
        while not queue.await_pushed(1, 10):
            pass


# --- what others know ---------------------------------------------------------------------------------------------------


class FromStaticMemory(torch.autograd.Function):
    """Its gradient is always in the same memory, as that of torch.cuda.make_graphed_callables is."""

    memory = torch.ones(8, 8)

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return FromStaticMemory.memory.detach()


def test_what_others_may_write_to_is_waited_for_by_the_device(adamw: AdamW, copies: Stream) -> None:
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


def test_what_was_set_by_hand_is_waited_for_by_the_device(adamw: AdamW, copies: Stream) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    model[1].weight.grad = torch.ones(8, 8)
    optimizer.step()
    assert [copy.shared for copy in copies.started] == [True]


def test_a_gradient_within_a_captured_graph_is_refused_before_anything_is_sent(
    adamw: AdamW, copies: Stream, monkeypatch: pytest.MonkeyPatch
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
