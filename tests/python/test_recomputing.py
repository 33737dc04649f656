"""Activation checkpointing computes forwards again in backward, where weights of a release run return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ballast
from ballast import checkpointing
from ballast.patch import Patch
from models import assert_close, same_bits, weights_of

AdamW = Callable[..., ballast.AdamW]
EXACT = {"state_dtype": "fp32", "master_weight_bits": 32}


class Detached(nn.Module):
    """Reads a weight of a later layer without a graph."""

    def __init__(self, later: nn.Linear):
        super().__init__()
        self.later = later
        self.own = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.own(x) + F.linear(x, self.later.weight.detach()))


class Early(nn.Module):
    """A checkpoint around what reads a weight that is trained later, and whose gradient is there first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.later = nn.Linear(8, 8)
        self.early = Detached(self.later)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.later(checkpoint(self.early, x, use_reentrant=False))


class Blocks(nn.Module):
    """The usual checkpoint, around each block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x


def test_weights_that_have_changed_meanwhile_are_refused(adamw: AdamW) -> None:
    model = Early()
    optimizer = adamw(model.named_parameters())
    with pytest.raises(ballast.Rejected, match="'later.weight' is read again.*commit='staged'"):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("options", [{"commit": "staged"}, {"commit": "staged", "overlap_forward": True}], ids=str)
def test_staged_gives_torchs_weights(options: dict[str, Any], adamw: AdamW) -> None:
    model, twin = Early(), Early()
    optimizer, theirs = adamw(model.named_parameters(), **EXACT, **options), torch.optim.AdamW(twin.parameters())
    for _ in range(5):
        for one, opt in ((model, optimizer), (twin, theirs)):
            one(torch.ones(2, 8)).square().sum().backward()
            opt.step()
            opt.zero_grad()
    assert_close(model, twin)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, {"overlap_forward": True}, {"gradient_accumulation_steps": 2}], ids=str)
def test_the_usual_checkpoints_work_in_release(options: dict[str, Any], reentrant: bool, adamw: AdamW) -> None:
    model, twin = Blocks(), Blocks()
    released = adamw(model.named_parameters(), commit="release", **options)
    staged = adamw(twin.named_parameters(), commit="staged", run=f"{released.run}-twin")
    for _ in range(3):
        for one, optimizer in ((model, released), (twin, staged)):
            for _ in range(options.get("gradient_accumulation_steps", 1)):
                one(torch.ones(2, 8, requires_grad=True), reentrant).square().sum().backward()
            optimizer.step()
    released.wait()
    assert same_bits(weights_of(model), weights_of(twin))


def test_a_torch_that_does_not_tell_of_checkpoints_is_taken_to_have_made_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one would whose checkpoint() calls other functions of its own."""
    monkeypatch.setattr(checkpointing, "_watchers", Patch((torch.utils.checkpoint, "no_such_function", lambda f: f)))
    used: list[int] = []
    checkpointing._is_told.cache_clear()
    try:
        checkpointing.Checkpointing(lambda: used.append(1)).remove()
    finally:
        checkpointing._is_told.cache_clear()
    assert used == [1]
    monkeypatch.undo()
    assert checkpointing._is_told()
