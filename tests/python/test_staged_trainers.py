"""Trainers whose gradients are staged on their way from a GPU, by a stand-in for one. What only a GPU can show:
tests/bench/gpu_trainer.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ballast
from ballast import _core, binding, gradient_staging
from ballast.weight_copies import WeightCopies
from daemon import Daemon
from models import layered, same_bits, weights_of
from staged import Stream

AdamW = Callable[..., ballast.AdamW]


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


def test_nothing_is_written_to_weights_once_an_optimizer_is_closed(run: str, daemon: Daemon, copies: Stream) -> None:
    for number in range(5):
        model = torch.nn.Linear(1024, 1024)
        optimizer = ballast.AdamW(model.named_parameters(), server=daemon.server, run=f"{run}-{number}")
        model(torch.ones(2, 1024)).sum().backward()
        optimizer.close()
        copies.wait()
        model.weight.data.fill_(3)
        assert torch.equal(model.weight, torch.full((1024, 1024), 3.0))


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
