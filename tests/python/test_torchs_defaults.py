"""State and scales are fp32 in host memory, whatever dtype and device torch makes tensors of by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import ballast
from models import layered

DEFAULTS = {"bfloat16": torch.bfloat16, "float64": torch.float64, "meta": torch.device("meta")}


@contextmanager
def by_default(what: str) -> Iterator[None]:
    kind = DEFAULTS[what]
    if isinstance(kind, torch.device):
        with kind:
            yield
        return
    torch.set_default_dtype(kind)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def state_of(optimizer: ballast.AdamW) -> list[torch.Tensor]:
    return [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]


@pytest.mark.parametrize("what", DEFAULTS)
def test_state_is_saved_and_loaded(make: Callable[..., Any], what: str) -> None:
    model = layered(seed=1)
    optimizer = make(ballast.AdamW, model.named_parameters(), lr=0.01)
    inputs = torch.ones(2, 8)
    for _ in range(2):
        model(inputs).sum().backward()
        optimizer.step()
    wanted = state_of(optimizer)
    assert any(value.abs().max() > 0 for value in wanted)
    with by_default(what):
        got, saved = state_of(optimizer), optimizer.state_dict()
        assert [(value.dtype, value.device.type) for value in got] == [(torch.float32, "cpu")] * len(wanted)
        optimizer.load_state_dict(saved)
    model(inputs).sum().backward()
    optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    assert all(entry["step"] == 3 for entry in optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("what", DEFAULTS)
def test_a_scale_is_taken(make: Callable[..., Any], what: str) -> None:
    optimizer = make(ballast.AdamW, layered(seed=1).named_parameters())
    with by_default(what):
        scaler = ballast.GradScaler(optimizer, init_scale=1024.1)
    assert optimizer.loss_scale == torch.tensor(1024.1).item() and scaler.get_scale() == optimizer.loss_scale
