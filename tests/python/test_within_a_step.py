"""What a trainer may not do, or may, between a step's first gradient and its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from models import assert_close, layered

AdamW = Callable[..., ballast.AdamW]
Make = Callable[..., Any]
FP32 = {"master": "fp32", "state": "fp32", "rounding": "nearest"}
ONES = torch.ones(1, 8)


@pytest.mark.parametrize("commit", ["release", "staged"])
@pytest.mark.parametrize(
    ("option", "value", "back"), [("eps", 0.1, 1e-8), ("eps", torch.tensor(0.1), 1e-8), ("lr_scale", 2.0, None)]
)
def test_an_option_of_the_runs_description_cannot_change(
    option: str, value: Any, back: Any, commit: str, adamw: AdamW
) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit=commit)
    was = optimizer.param_groups[0][option]
    model(ONES).sum().backward()
    optimizer.param_groups[0][option] = value
    with pytest.raises(
        ballast.Rejected, match=f"^{option} of param_groups.0. changed .* since the first gradient of step 1"
    ):
        optimizer.step()
    optimizer.param_groups[0][option] = was if back is None else back
    optimizer.step()
    assert optimizer.last_result.applied


def test_a_tensor_that_is_an_option_is_seen_to_change_in_place(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    ours = adamw(model.named_parameters(), lr=1e-2, eps=torch.tensor(1e-8), **FP32)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-8)
    for eps in (1e-8, 0.1):
        ours.param_groups[0]["eps"].fill_(eps)
        theirs.param_groups[0]["eps"] = eps
        for net, optimizer in ((model, ours), (twin, theirs)):
            net(ONES).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model, twin)


def test_maximize_that_is_set_then_is_refused(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    model(ONES).sum().backward()
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(ballast.Rejected, match="maximize=True"):
        optimizer.step()


@pytest.mark.parametrize("commit", ["release", "staged"])
def test_the_loss_scale_is_set_between_steps(commit: str, make: Make) -> None:
    model = layered(seed=1)
    optimizer = make(ballast.SGD, model.named_parameters(), lr=0.1, commit=commit, loss_scale=8.0)
    (model(ONES).sum() * optimizer.loss_scale).backward()
    with pytest.raises(
        ballast.Rejected, match="loss_scale was set to 2.0 in step 1, whose gradients are divided by the 8.0"
    ):
        optimizer.loss_scale = 2.0
    optimizer.loss_scale = 8.0
    optimizer.step()
    optimizer.loss_scale = 2.0
    assert optimizer.loss_scale == 2.0


@pytest.mark.parametrize("commit", ["release", "staged"])
def test_the_data_of_a_gradient_that_has_left_is_not_to_be_had_nor_set(commit: str, adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit=commit)
    model(ONES).sum().backward()
    gradient = model[0].weight.grad
    with pytest.raises(ballast.Rejected, match=r"'0.weight' has left .*setting .data cannot"):
        gradient.data = torch.zeros(8, 8)
    with pytest.raises(ballast.Rejected, match=r"'0.weight' has left .*\.data cannot"):
        gradient.data.mul_(2)
    optimizer.step()


def test_a_gradient_of_what_is_frozen_is_refused(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    model[0].weight.requires_grad_(False)
    model[0].weight.grad = torch.ones(8, 8)
    model(ONES).sum().backward()
    with pytest.raises(ballast.Rejected, match="'0.weight' is frozen .* and has a .grad"):
        optimizer.step()
    model[0].weight.grad = None
    optimizer.step()
    assert optimizer.last_result.applied


@pytest.mark.parametrize("kind", ["conjugate", "negative", "zero"])
def test_a_gradient_whose_sign_is_not_in_memory_is_sent_with_it(kind: str, make: Make) -> None:
    ours, theirs = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([2.0]))
    one, other = make(ballast.SGD, [("w", ours)], lr=0.1, **FP32), torch.optim.SGD([theirs], lr=0.1)
    for parameter, optimizer in ((ours, one), (theirs, other)):
        if kind == "conjugate":
            torch.view_as_real(torch.complex(torch.ones(1), parameter).conj().clone()).sum().backward()
        else:
            parameter.grad = torch._neg_view(torch.ones(1)) if kind == "negative" else torch._efficientzerotensor(1)
        optimizer.step()
    assert torch.equal(ours, theirs)


def test_a_parameter_whose_sign_is_not_in_memory_is_refused(make: Make) -> None:
    negative = nn.Parameter(torch.complex(torch.ones(3), torch.ones(3)).conj().imag)
    with pytest.raises(ballast.Rejected, match="'param.0' .*negative bit.*resolve_neg"):
        make(ballast.SGD, [negative], lr=0.1)


def test_a_parameter_that_cannot_be_trained_yet_is_refused_by_name(adamw: AdamW) -> None:
    with pytest.raises(ballast.Rejected, match="'weight' has no shape yet: call the lazy module"):
        adamw(nn.LazyLinear(3).named_parameters())
    with torch.inference_mode():
        model = layered(seed=1)
    with pytest.raises(ballast.Rejected, match="'0.weight' was made in torch.inference_mode"):
        adamw(model.named_parameters())


@pytest.mark.parametrize("options", [{}, {"commit": "staged"}, {"overlap_forward": True}])
def test_gradients_of_zeros_decay_and_move_as_torchs_do(options: dict[str, Any], adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    ours = adamw(model.named_parameters(), lr=1e-2, **FP32, **options)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for step in range(8):
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad(set_to_none=step in (0, 4))
            net[step % 3](ONES + step).sum().backward()
            optimizer.step()
    for optimizer in (ours, theirs):  # a step of zeros alone
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    ours.wait()
    assert_close(model, twin)


def test_gradients_of_zeros_go_before_the_norm_is_asked_for(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    ours = adamw(model.named_parameters(), lr=1e-2, commit="staged", **FP32)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for step in range(4):
        norms = []
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad(set_to_none=False)
            net[step % 2](ONES).sum().backward()
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0))
            optimizer.step()
        torch.testing.assert_close(*norms)
    assert_close(model, twin)


def test_gradients_of_zeros_go_with_the_last_micro_batch(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    ours = adamw(model.named_parameters(), lr=1e-2, gradient_accumulation_steps=2, **FP32)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for step in range(4):
        ours.zero_grad(set_to_none=False)
        theirs.zero_grad(set_to_none=False)
        for final in (False, True):
            with ours.accumulate(final):
                model[step % 2](ONES).sum().backward()
            twin[step % 2](ONES).sum().backward()
        ours.step()
        theirs.step()
    assert_close(model, twin)


@pytest.mark.parametrize("momenta", [(0.0, 0.9), (0.9, 0.0)])
@pytest.mark.parametrize("commit", ["release", "staged"])
def test_a_momentum_that_begins_or_ends_is_refused(momenta: tuple[float, float], commit: str, make: Make) -> None:
    model = layered(seed=1)
    optimizer = make(ballast.SGD, model.named_parameters(), lr=0.1, momentum=momenta[0], commit=commit)
    model(ONES).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = momenta[1]
    with pytest.raises(
        ballast.Rejected, match=f"^momentum of param_groups.0. changed from {momenta[0]} to {momenta[1]}"
    ):
        model(ONES).sum().backward()
    optimizer.param_groups[0]["momentum"] = momenta[0]
    model.zero_grad()
    model(ONES).sum().backward()
    if commit == "staged":
        optimizer.param_groups[0]["momentum"] = momenta[1]
        with pytest.raises(ballast.Rejected, match="^momentum of param_groups.0. changed"):
            optimizer.step()
        optimizer.param_groups[0]["momentum"] = momenta[0]
    optimizer.step()
    assert optimizer.last_result.step == 2 and optimizer.last_result.applied
