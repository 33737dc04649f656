"""A weight that backward reads after the daemon's new one has landed: where recomputation finds what is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ballast
from models import until

AdamW = Callable[..., ballast.AdamW]


class EarlyDetach:
    """A checkpointed part reads w.detach(), and w itself is trained later in the graph: w's gradient is complete before the
    part is recomputed."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.early = torch.nn.Parameter(torch.randn(8, 8))
        self.w = torch.nn.Parameter(torch.randn(8, 8))
        self.x = torch.randn(2, 8)
        self.recomputed_with: torch.Tensor | None = None
        self.before_recompute: Callable[[], object] = lambda: None
        self.early.register_hook(lambda grad: setattr(self, "gradient", grad.clone()))
        self.gradient: torch.Tensor | None = None

    def part(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() != -1:
            self.before_recompute()
            self.recomputed_with = self.w.detach().clone()
        return F.linear(F.linear(x, self.early).tanh(), self.w.detach()).tanh()

    def backward(self) -> None:
        middle = checkpoint(self.part, self.x, use_reentrant=False)
        F.linear(middle, self.w).square().sum().backward()

    def true_gradient(self) -> torch.Tensor:
        twin = EarlyDetach()
        twin.backward()
        assert twin.gradient is not None
        return twin.gradient


def trained(adamw: AdamW, part: EarlyDetach, **options: Any) -> ballast.AdamW:
    return adamw([("early", part.early), ("w", part.w)], lr=1.0, **options)


def test_staged_recomputes_with_the_weights_of_the_forward(adamw: AdamW) -> None:
    part = EarlyDetach()
    optimizer = trained(adamw, part, commit="staged")
    old = part.w.detach().clone()
    part.backward()
    assert part.recomputed_with is not None and torch.equal(part.recomputed_with, old)
    assert part.gradient is not None and torch.equal(part.gradient, part.true_gradient())
    optimizer.step()


def test_released_weights_that_are_recomputed_with_are_not_found_out(adamw: AdamW) -> None:
    """As the README says: the gradient is another, and nothing tells so. torch recomputes without a look at versions."""
    part = EarlyDetach()
    optimizer = trained(adamw, part)
    old = part.w.detach().clone()
    part.before_recompute = lambda: until(lambda: not torch.allclose(part.w, old, atol=0.1))
    part.backward()
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied
    assert part.gradient is not None and not torch.allclose(part.gradient, part.true_gradient())


def test_without_a_checkpoint_torch_finds_it_out(adamw: AdamW) -> None:
    part = EarlyDetach()
    optimizer = trained(adamw, part)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        F.linear(part.part(part.x), part.w).square().sum().backward()
    optimizer.close()
