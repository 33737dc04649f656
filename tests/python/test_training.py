"""It trains as torch's AdamW does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import ballast
from models import distances, losses_of, perceptron, spirals

AdamW = Callable[..., ballast.AdamW]


def expect_the_same_step(
    ours: torch.nn.Module, one: torch.optim.Optimizer, theirs: torch.nn.Module, other: torch.optim.Optimizer
) -> None:
    points, labels = spirals(seed=1)
    for model, optimizer in ((ours, one), (theirs, other)):
        F.cross_entropy(model(points), labels).backward()
        optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_with_exact_formats_it_is_torchs_adamw(adamw: AdamW) -> None:
    """The same recorded gradients into both: 20 steps apart by fp32's rounding of a few operations a step."""
    ours, theirs = perceptron(seed=1), perceptron(seed=1)
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    one = adamw(ours.named_parameters(), **options, state_dtype="fp32", master_weight_bits=32)
    other = torch.optim.AdamW(theirs.parameters(), **options)
    for name, error in distances(ours, one, theirs, other, steps=20).items():
        assert error < 1e-6, f"{name}: {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_the_default_recipe_the_loss_goes_down(dtype: torch.dtype, adamw: AdamW) -> None:
    model = perceptron(seed=1).to(dtype)
    optimizer = adamw(model.named_parameters(), lr=1e-2)
    losses = losses_of(model, optimizer, steps=60)
    assert losses[0] > 0.6
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.dtype == dtype for p in model.parameters())


def test_groups_have_their_own_hyperparameters(adamw: AdamW) -> None:
    ours, theirs = perceptron(seed=1), perceptron(seed=1)

    def groups(model: torch.nn.Module) -> list[dict[str, object]]:
        parameters = list(model.parameters())
        return [{"params": parameters[:2], "lr": 0.1, "weight_decay": 0.5}, {"params": parameters[2:]}]

    one = adamw(groups(ours), state_dtype="fp32", master_weight_bits=32)
    other = torch.optim.AdamW(groups(theirs))
    expect_the_same_step(ours, one, theirs, other)


def test_scales_multiply_a_groups_values(adamw: AdamW) -> None:
    ours, theirs = perceptron(seed=1), perceptron(seed=1)
    one = adamw(
        [{"params": ours.parameters(), "lr_scale": 0.5, "wd_scale": 0.25}],
        lr=0.2,
        weight_decay=0.4,
        state_dtype="fp32",
        master_weight_bits=32,
    )
    other = torch.optim.AdamW(theirs.parameters(), lr=0.1, weight_decay=0.1)
    expect_the_same_step(ours, one, theirs, other)
