"""Small models and data of the tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import nn


def layered(seed: int, width: int = 8, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Three linear layers, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)).to(dtype)


def perceptron(seed: int) -> nn.Sequential:
    """A two-layer perceptron for `spirals`."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def spirals(seed: int, count: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of two interleaved spirals, and which of the two each is of."""
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (count,), generator=random)
    radius = torch.rand(count, generator=random)
    angle = 4 * radius + 3.1416 * label
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), label


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


def until(holds: Callable[[], bool], timeout_s: float = 60) -> None:
    """Waits for a condition that nothing announces."""
    give_up = time.monotonic() + timeout_s
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < give_up, "it never came about"
        pause.wait(0.005)
