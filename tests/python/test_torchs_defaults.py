"""State and scales are fp32 in host memory, whatever dtype, device and mode torch makes tensors in by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import ballast
from ballast.binding import _host_memory_for
from ballast.convert import convert
from checkpoints import assert_same, loaded, need_safetensors, saved
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
        optimizer.step()  # sees whether the run has that state, and brings it there
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    assert all(entry["step"] == 3 for entry in optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("what", DEFAULTS)
def test_a_scale_is_taken(make: Callable[..., Any], what: str) -> None:
    optimizer = make(ballast.AdamW, layered(seed=1).named_parameters())
    with by_default(what):
        scaler = ballast.GradScaler(optimizer, init_scale=1024.1)
    assert optimizer.loss_scale == torch.tensor(1024.1).item() and scaler.get_scale() == optimizer.loss_scale


@pytest.mark.parametrize("what", DEFAULTS)
@pytest.mark.parametrize("way", ["dcp", "safetensors", "flashoptim", "bitsandbytes"])
def test_a_state_is_converted(way: str, what: str, tmp_path: Path) -> None:
    if way == "safetensors":
        need_safetensors()
    _, _, source = saved(tmp_path / "in")
    names = [tmp_path / "in" / "pytorch_model.bin"]
    for folder in ("alone", "there"):
        with by_default(what) if folder == "there" else nullcontext():
            convert(source, tmp_path / folder, way, names=names)
            convert(tmp_path / folder, tmp_path / f"{folder}.pt", "torch")
    assert_same(loaded(tmp_path / "alone.pt"), loaded(tmp_path / "there.pt"))


def test_memory_that_an_evaluation_made_may_be_written_to_later() -> None:
    with torch.inference_mode():
        made = _host_memory_for(torch.ones(3))
    made.copy_(torch.ones(3))
    assert not made.is_inference()
