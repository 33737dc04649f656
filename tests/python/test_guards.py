"""torch's tools that work on .grad, where it is not the daemon's, and where they cannot be had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import ballast
from models import layered

AdamW = Callable[..., ballast.AdamW]
originals = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_


def test_clipping_of_other_parameters_works(adamw: AdamW) -> None:
    adamw(layered(seed=1).named_parameters())
    other = layered(seed=2)
    other(torch.ones(2, 8)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_((p for p in other.parameters()), 0.5)
    assert norm > 0.5
    grads = [p.grad for p in other.parameters()]
    assert torch.nn.utils.get_total_norm(grads) == pytest.approx(0.5, rel=1e-3)
    torch.nn.utils.clip_grad_value_(other.parameters(), 1e-3)
    assert max(g.abs().max() for g in grads if g is not None) <= 1e-3


def test_torchs_functions_are_back_after_the_last_optimizer(none_open: None, adamw: AdamW) -> None:
    one, other = adamw(layered(seed=1).parameters()), adamw(layered(seed=1).parameters())
    assert torch.nn.utils.clip_grad_norm_ is not originals[0]
    one.close()
    assert torch.nn.utils.clip_grad_norm_ is not originals[0]
    other.close()
    assert (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_) == originals


def test_a_gradient_set_by_hand_after_the_real_one_left_is_refused(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    model(torch.ones(2, 8)).sum().backward()
    model[0].weight.grad = torch.ones(8, 8)
    with pytest.raises(ballast.Rejected, match="gradient of '0.weight' was taken back.*in step 1"):
        optimizer.step()
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied


def test_unscaling_and_clipping_as_torchs_recipe_does_raises(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 8)).sum()).backward()
    with pytest.raises(ballast.Rejected, match="cannot unscale the gradient of '0.weight'.*ballast.GradScaler"):
        scaler.unscale_(optimizer)
    with pytest.raises(ballast.Rejected, match="cannot unscale the gradient of '"):
        scaler.step(optimizer)


def test_an_enabled_grad_scaler_raises(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 8)).sum()).backward()
    with pytest.raises(ballast.Rejected, match="GradScaler cannot unscale.*bfloat16.*start from a new run"):
        scaler.step(optimizer)


def test_a_disabled_grad_scaler_works(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(model(torch.ones(2, 8)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.last_result is not None and optimizer.last_result.applied
