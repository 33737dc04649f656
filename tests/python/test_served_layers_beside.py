"""Layers that compute in served codes beside what else a training does: checkpointing, accumulation, compile, ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ballast
from ballast import nn as bnn
from coded import KINDS, batch, codes_of, is_coded, loss_of, model_of, same, train
from daemon import Daemon
from side_by_side import side_by_side

AdamW = Callable[..., ballast.AdamW]


@pytest.fixture(params=KINDS)
def format(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool, format: str, adamw: AdamW, run: str) -> None:
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of(format)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant)
            return y

    one, two = Recomputing(), model_of(format)
    ours = adamw(one.named_parameters(), lr=1e-2, formats=bnn.served_formats(one))
    theirs = adamw(two.named_parameters(), lr=1e-2, formats=bnn.served_formats(two), run=f"{run}-twin")
    for step in range(6):
        losses = train(one, ours, range(step, step + 1)), train(two, theirs, range(step, step + 1))
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # names, and so random bits, are others
    assert is_coded(one)


def test_accumulation_and_clipping(format: str, adamw: AdamW) -> None:
    model = model_of(format)
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model), **options)
    for step in range(4):
        for micro in range(2):
            (loss_of(model, batch(2 * step + micro)) / 2).backward()
        optimizer.step()
        assert optimizer.last_result and optimizer.last_result.grad_norm > 0 and is_coded(model)


def test_gradients_in_fp8_with_a_scaler(adamw: AdamW) -> None:
    model = model_of("int8-row")
    optimizer = adamw(
        model.named_parameters(),
        lr=1e-2,
        formats=bnn.served_formats(model),
        gradient_dtype="fp8-e5m2",
        nonfinite="skip_step",
    )
    scaler = ballast.GradScaler(optimizer, init_scale=2.0**10)
    losses = []
    for step in range(30):
        loss = loss_of(model, batch(step))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5]) and is_coded(model)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_graph_from_before_a_step_is_refused(steps: int, format: str, adamw: AdamW) -> None:
    """As torch refuses one of nn.Linear: its weights are others by now."""
    model = model_of(format)
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, optimizer, range(steps - 1))
    loss = loss_of(model, batch(0))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_compiled_graph_from_before_a_step_is_refused(format: str, adamw: AdamW) -> None:
    torch.compiler.reset()
    model = model_of(format)
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, optimizer, range(2))
    compiled = torch.compile(model, backend="aot_eager")
    stale, used = loss_of(compiled, batch(0)), loss_of(compiled, batch(1))
    used.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_a_frozen_layer_of_a_run_before_is_unfrozen(format: str, adamw: AdamW, run: str) -> None:
    model = model_of(format)
    first = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, first, range(2))
    formats = bnn.served_formats(model)
    first.close()
    model[0].weight.requires_grad_(False)
    second = adamw(model.named_parameters(), lr=1e-2, formats=formats, run=f"{run}-second")
    train(model, second, range(2))
    model[0].weight.requires_grad_(True)
    train(model, second, range(2, 4))
    assert is_coded(model)


def test_compiled(format: str, adamw: AdamW, run: str) -> None:
    one, two = model_of(format), model_of(format)
    ours = adamw(one.named_parameters(), lr=1e-2, formats=bnn.served_formats(one))
    theirs = adamw(two.named_parameters(), lr=1e-2, formats=bnn.served_formats(two), run=f"{run}-twin")
    compiled = torch.compile(one, backend="aot_eager")
    for step in range(4):
        losses = train(compiled, ours, range(step, step + 1)), train(two, theirs, range(step, step + 1))
        assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert is_coded(one)


def test_evaluation_and_frozen_layers(format: str, adamw: AdamW) -> None:
    model = model_of(format)
    model[0].weight.requires_grad_(False)
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, optimizer, range(2))
    assert model[0].weight.stride() != (0, 0) and model[2].weight.stride() == (0, 0)
    with torch.inference_mode():
        assert model(batch(1)).isfinite().all()
    model[0].weight.requires_grad_(True)
    amended = {**bnn.served_formats(model)}
    assert amended.keys() == {"0.weight", "2.weight"}
    train(model, optimizer, range(2, 4))
    assert model[2].weight.stride() == (0, 0)


def test_eight_ranks_have_the_same_codes(format: str, daemon: Daemon, run: str) -> None:
    models = [model_of(format) for _ in range(8)]
    begin = threading.Barrier(8)

    def work(rank: int) -> dict[str, Tensor]:
        model = models[rank]
        options: dict[str, Any] = {"server": daemon.server, "run": run, "rank": rank, "world": 8}
        optimizer = ballast.AdamW(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model), **options)
        begin.wait()
        train(model, optimizer, range(5), rank)
        assert is_coded(model)
        codes = codes_of(model)
        optimizer.close()
        return codes

    codes = side_by_side(8, work)
    assert all(same(codes[0], one) for one in codes)
