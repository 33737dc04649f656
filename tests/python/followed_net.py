"""A module for readers of a run, and its weights at each step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fake_follow import CHUNK


class Net(nn.Module):
    """With a tensor of several chunks, and one that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, CHUNK)
        self.head = nn.Linear(CHUNK, 3, bias=False)
        self.tied = nn.Linear(3, CHUNK, bias=False)
        self.tied.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.inner(x) + self.tied(x))
        return y


def weights_at(step: int, module: nn.Module | None = None) -> dict[str, Tensor]:
    """By name, another value in all elements at each step."""
    named = (module or Net()).named_parameters()
    return {name: torch.full_like(p, step + index / 8).detach() for index, (name, p) in enumerate(named)}
