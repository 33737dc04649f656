"""Small models and data of the tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_DRAWING = threading.Lock()  # from torch's one generator, as the layers do


def layered(seed: int, width: int = 8, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Three linear layers, the same for the same seed, whatever other threads draw."""
    with _DRAWING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)).to(dtype)


def perceptron(seed: int) -> nn.Sequential:
    """A two-layer perceptron for `spirals`."""
    with _DRAWING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def spirals(seed: int, count: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of two interleaved spirals, and which of the two each is of."""
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (count,), generator=random)
    radius = torch.rand(count, generator=random)
    angle = 4 * radius + 3.1416 * label
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), label


def assert_close(model: nn.Module, twin: nn.Module) -> None:
    """Their weights, but for rounding."""
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def losses_of(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    """Trains a perceptron on the spirals, in its own dtype; the loss of each step."""
    points, labels = spirals(seed=1)
    dtype = next(model.parameters()).dtype
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(points.to(dtype)).float(), labels)
        loss.backward()
        optimizer.step(loss=loss)
        losses.append(loss.item())
    return losses


def distances(
    ours: nn.Module, one: torch.optim.Optimizer, theirs: nn.Module, other: torch.optim.Optimizer, steps: int
) -> dict[str, float]:
    """How far apart two perceptrons come, by tensor, when `one` and `other` take the same recorded gradients."""
    points, labels = spirals(seed=1)
    for _ in range(steps):
        F.cross_entropy(theirs(points), labels).backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert q.grad is not None
            p.grad = q.grad.clone()
        one.step()
        other.step()
        other.zero_grad()
    pairs = zip(ours.named_parameters(), theirs.parameters(), strict=True)
    return {name: distance(p.detach(), q.detach()) for (name, p), q in pairs}


def distance(ours: Any, theirs: Any) -> float:
    """Of two tensors, or lists of numbers, relative to the second."""
    one, other = torch.as_tensor(ours, dtype=torch.float64), torch.as_tensor(theirs, dtype=torch.float64)
    return ((one - other).norm() / other.norm()).item()


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
