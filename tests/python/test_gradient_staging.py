"""The ring through which gradients leave a GPU, by a stand-in for one."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import ballast
from ballast import gradient_staging
from staged import Started, interrupt_at, numbered, staging_of


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


@pytest.mark.parametrize("seed", range(20))
def test_where_a_gpu_is_shared_large_gradients_have_a_ring_there_and_the_order_stays(seed: int) -> None:
    draw = random.Random(seed)
    staging, copies, pushed = staging_of(64 << 10, shares_gpu=True)
    sent = []
    for index in range(200):
        elements = draw.choice([draw.randint(1, 4096), draw.randint(4097, 12000)])  # of 4 bytes: to 16 KiB, and beyond
        sent.append(numbered(index, elements))
        staging.put(index, sent[-1])
        ring = copies.rings_there[-1] if sent[-1].nbytes > 16 << 10 else copies.rings[-1]
        begin, target = ring.data_ptr(), copies.started[-1].target.data_ptr()
        assert begin <= target and target + sent[-1].nbytes <= begin + ring.nbytes
        if draw.random() < 0.3:
            copies.arrive(draw.randint(1, 4))
    staging.flush()
    assert len(copies.rings) == len(copies.rings_there) == 1
    assert pushed.indices == list(range(200))
    for (_, values), gradient in zip(pushed.all, sent, strict=True):
        assert torch.equal(values, gradient)


@pytest.mark.parametrize("transport", ["gpu", "nccl"])
def test_a_model_that_is_not_on_one_gpu_cannot_use_its_memory(
    admin: ballast._core.Client, run: str, transport: str
) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = ballast.AdamW([("w", parameter)], server=admin.server, run=run, transport=transport)
    with pytest.raises(ballast.Rejected, match=f"'{transport}': all parameters must be on one GPU.*are on cpu"):
        optimizer.connect()
    assert run not in [status["run_id"] for status in admin.list_runs()["runs"]]


def test_a_gpu_that_is_not_there_is_named(admin: ballast._core.Client, run: str) -> None:
    with pytest.raises(ballast.Rejected, match=r"cuda:999|libcuda\.so\.1"):
        admin.attach(run, 0, 1, False, 0.0, gpu=999)


@pytest.mark.parametrize("shares_gpu", [False, True])
def test_a_ring_for_which_there_is_no_memory_can_be_asked_for_again(
    shares_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging, copies, pushed = staging_of(32 << 10, shares_gpu)
    staging.put(0, numbered(0, 5000))

    def refuse(*_: Any) -> Tensor:
        raise torch.cuda.OutOfMemoryError("full")

    with monkeypatch.context() as full:
        full.setattr(copies, "there" if shares_gpu else "pinned", refuse)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            staging.put(1, numbered(1, 10000))
    for index in (1, 2):
        staging.put(index, numbered(index, 10000))
    staging.flush()
    assert pushed.indices == [0, 1, 2]
    assert [len(ring) for ring in copies.rings_there + copies.rings] == [32 << 10, 40192]


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


def test_the_ring_is_in_host_memory_whatever_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: asked.append(options))
    gradient_staging.CudaCopies().pinned(16)
    assert asked == [{"dtype": torch.uint8, "device": "cpu", "pin_memory": True}]
