"""Gradients that are staged on their way from a GPU, by a stand-in for one: host memory, and copies that arrive when the test
says. What only a GPU can show: tests/bench/gpu_trainer.py."""

from __future__ import annotations

import ctypes
import os
import random
import sys
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
    def __init__(self, source: Tensor, target: Tensor, shared: bool, queue: Any, number: int):
        self.source, self.target, self.shared, self.queue, self.number = source, target, shared, queue, number
        self.arrived = False

    def query(self) -> bool:
        return self.arrived


class StandIn:
    """Copies that arrive when arrive() says so."""

    def __init__(self) -> None:
        self.started: list[Started] = []
        self.rings: list[Tensor] = []

    def pinned(self, nbytes: int) -> Tensor:
        self.rings.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self.rings[-1]

    def start(self, source: Tensor, target: Tensor, shared: bool, queue: Any, number: int) -> Started:
        self.started.append(Started(source, target, shared, queue, number))
        return self.started[-1]

    def wait(self) -> None:
        self.arrive(len(self.waiting))

    @property
    def waiting(self) -> list[Started]:
        return [copy for copy in self.started if not copy.arrived]

    def arrive(self, count: int) -> None:
        for copy in self.waiting[:count]:
            copy.target.copy_(copy.source)
            copy.arrived = True
            copy.queue.arrive(copy.number)


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

    @property
    def indices(self) -> list[int]:
        return [index for index, _ in self.all]

    def push_queue(self) -> Pushes:
        return self

    def put(self, index: int, address: int, nbytes: int) -> int:
        self._put.append((index, address, nbytes))
        return len(self._put) - 1

    def count_put(self) -> int:
        return len(self._put)

    def cancel(self, number: int) -> None:
        if number < len(self._put):
            self._dropped.add(number)
            self.arrive(number)

    def arrive(self, number: int) -> None:
        self._arrived.add(number)
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


def interrupt_at(line: int, act: Callable[[], object]) -> bool:
    """Calls it, and raises KeyboardInterrupt before the line of gradient_staging that comes so many lines into it. Whether
    there was one."""
    left = line

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith("gradient_staging.py"):
            return trace
        if event == "line" and frame.f_code.co_name not in ("wait", "arrive"):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    kept = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(kept)
    return False


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

    def start(*_: Any) -> Started:
        raise RuntimeError("the driver has no memory")

    with monkeypatch.context() as patched:
        patched.setattr(copies, "start", start)
        with pytest.raises(RuntimeError, match="no memory"):
            staging.put(0, numbered(0))
    staging.put(1, numbered(1))
    staging.flush()
    assert pushed.indices == [1]


@pytest.mark.parametrize("line", range(40))
def test_an_interrupt_anywhere_in_put_loses_that_gradient_at_most(line: int) -> None:
    staging, copies, pushed = staging_of(16 << 10)
    for index in range(30):
        staging.put(index, numbered(index))
    interrupted = interrupt_at(line, lambda: staging.put(30, numbered(30)))
    for index in range(31, 60):
        staging.put(index, numbered(index))
    staging.flush()
    assert set(range(60)) - set(pushed.indices) <= ({30} if interrupted else set())
    assert sorted(pushed.indices) == pushed.indices
    for index, values in pushed.all:
        assert torch.equal(values, numbered(index))


@pytest.mark.parametrize("line", range(30))
def test_an_interrupted_flush_can_be_made_again(line: int) -> None:
    staging, copies, pushed = staging_of()
    for index in range(5):
        staging.put(index, numbered(index))
    interrupt_at(line, staging.flush)
    staging.flush()
    assert pushed.indices == list(range(5))
    staging.put(5, numbered(5))
    staging.flush()
    assert pushed.indices == list(range(6))


def test_a_drop_that_was_interrupted_is_to_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    staging, copies, pushed = staging_of()
    staging.put(0, numbered(0))

    def interrupt(count: int, timeout_s: float) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pushed, "await_pushed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            staging.drop()
    for act in (staging.flush, lambda: staging.put(1, numbered(1))):
        with pytest.raises(ballast.Rejected, match=r"call zero_grad\(\) again"):
            act()
    staging.drop()
    staging.put(2, numbered(2))
    staging.flush()
    assert pushed.indices == [2]


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
        self._done: SimpleQueue[Started] = SimpleQueue()
        self._asked: SimpleQueue[tuple[Started, Event]] = SimpleQueue()
        Thread(target=self._run, daemon=True).start()

    def start(self, source: Tensor, target: Tensor, shared: bool, queue: Any, number: int) -> Started:
        started, done = super().start(source, target, shared, queue, number), Event()
        self._asked.put((started, done))
        if shared:
            done.wait()
        return started

    def wait(self) -> None:
        while self.waiting:
            self._done.get()

    def _run(self) -> None:
        while True:
            copy, done = self._asked.get()
            self.holds.wait()
            copy.target.copy_(copy.source)
            copy.arrived = True
            copy.queue.arrive(copy.number)
            done.set()
            self._done.put(copy)


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
    copies.wait()


# --- the queue alone ----------------------------------------------------------------------------------------------------


@pytest.fixture
def client(daemon: Daemon) -> _core.Client:
    """Of no run, so that its pushes fail."""
    return _core.Client.connect(daemon.server, 10, 10)


def put(queue: _core.PushQueue, count: int) -> Tensor:
    """Returns what keeps their memory."""
    gradient = numbered(0)
    for index in range(count):
        queue.put(index, gradient.data_ptr(), gradient.nbytes)
    return gradient


def until_raised(queue: _core.PushQueue, count: int) -> None:
    while not queue.await_pushed(count, 10):
        pass


def test_what_a_push_failed_with_is_raised_once_and_what_was_put_before_that_is_not_pushed(
    client: _core.Client,
) -> None:
    queue = client.push_queue()
    kept = put(queue, 3)
    for number in (1, 0):
        queue.arrive(number)
    with pytest.raises(ballast.Rejected, match="Attach"):
        until_raised(queue, 2)
    queue.arrive(2)
    assert queue.await_pushed(3, 10)
    assert (queue.count_put(), queue.count_pushed()) == (3, 3)
    del kept


def test_what_is_dropped_is_counted_when_it_has_arrived(client: _core.Client) -> None:
    queue = client.push_queue()
    kept = put(queue, 1)
    queue.drop()
    assert not queue.await_pushed(1, 0)
    queue.arrive(0)
    assert queue.await_pushed(1, 10)
    del kept


def test_what_is_cancelled_is_counted_and_may_arrive_nevertheless(client: _core.Client) -> None:
    queue = client.push_queue()
    kept = put(queue, 1)
    queue.cancel(0)
    assert queue.await_pushed(1, 10)
    queue.arrive(0)
    queue.cancel(7)  # there is none
    assert queue.count_pushed() == 1
    del kept


def test_a_queue_of_a_closed_client_says_so(client: _core.Client) -> None:
    queue = client.push_queue()
    kept = put(queue, 1)
    client.close()
    queue.arrive(0)
    with pytest.raises(ballast.Rejected, match="the connection is closed"):
        until_raised(queue, 1)
    del kept


def test_a_queue_does_not_work_in_a_fork(client: _core.Client) -> None:
    queue = client.push_queue()
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            queue.await_pushed(1, 0)
        except ballast.Rejected as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        assert "does not work in its fork" in said.read()
    os.wait()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA driver")
def test_without_a_driver_nothing_is_announced(client: _core.Client) -> None:
    queue = client.push_queue()
    kept = put(queue, 1)
    with pytest.raises(ballast.BallastError, match="there is no CUDA driver"):
        queue.announce(0, 0)
    queue.cancel(0)
    del kept


def test_nothing_is_written_to_weights_once_an_optimizer_is_closed(run: str, daemon: Daemon, copies: Stream) -> None:
    for number in range(5):
        model = torch.nn.Linear(1024, 1024)
        optimizer = ballast.AdamW(model.named_parameters(), server=daemon.server, run=f"{run}-{number}")
        model(torch.ones(2, 1024)).sum().backward()
        optimizer.close()
        copies.wait()
        model.weight.data.fill_(3)
        assert torch.equal(model.weight, torch.full((1024, 1024), 3.0))


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
