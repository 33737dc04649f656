"""What .grad is after backward: there, and of no use but by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import ballast
from ballast.sent_gradient import SentGradient
from models import assert_close, layered, same_bits, weights_of

AdamW = Callable[..., ballast.AdamW]

USES: dict[str, Callable[[Any], object]] = {
    "norm": lambda grad: grad.norm(),
    "data": lambda grad: grad.data.norm(),
    "detach": lambda grad: grad.detach(),
    "isfinite": lambda grad: torch.isfinite(grad).all(),
    "isnan": lambda grad: grad.isnan().any(),
    "mul_": lambda grad: grad.mul_(0.5),
    "clamp_": lambda grad: grad.clamp_(-1, 1),
    "div": lambda grad: grad / 2,
    "stack": lambda grad: torch.stack([torch.zeros(8, 8), grad]),
    "foreach": lambda grad: torch._foreach_norm([grad, grad]),
    "add into": lambda grad: torch.zeros(8, 8).add_(grad),
    "item": lambda grad: grad[0, 0].item(),
    "to": lambda grad: grad.to(torch.float64),
    "clone": lambda grad: grad.clone(),
    "zero_": lambda grad: grad.zero_(),
    "add_": lambda grad: grad.add_(torch.ones(8, 8)),
    "add_ of a share": lambda grad: grad.add_(torch.ones(8, 8), alpha=0.1),
    "add_ of a number": lambda grad: grad.add_(1.0),
    "add": lambda grad: grad + torch.ones(8, 8),
    "add from the left": lambda grad: torch.ones(8, 8) + grad,
    "add of itself": lambda grad: grad + grad,
    "to numpy by DLPack": numpy.from_dlpack,
    "to numpy": lambda grad: grad.cpu().numpy(),
    "asarray": numpy.asarray,
    "tolist": lambda grad: grad.tolist(),
    "apply_": lambda grad: grad.apply_(abs),
    "map_": lambda grad: grad.map_(grad, max),
    "map2_": lambda grad: grad.map2_(grad, grad, max),
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("commit", ["release", "staged"])
@pytest.mark.parametrize("use", USES)
def test_its_values_are_refused_by_name(use: str, commit: str, adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit=commit)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ballast.Rejected, match="gradient of '0.weight' has left.*clip_grad_norm_.*register_hook"):
        USES[use](model[0].weight.grad)
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied


def test_it_is_like_its_parameter_and_takes_no_memory(adamw: AdamW) -> None:
    model = layered(seed=1, dtype=torch.bfloat16)
    optimizer = adamw(model.named_parameters())
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        assert (grad.shape, grad.dtype, grad.device) == (parameter.shape, parameter.dtype, parameter.device)
        assert repr(grad) == f"SentGradient('{name}', shape={tuple(parameter.shape)}, dtype=torch.bfloat16)"
        assert grad.share_memory_() is grad  # a module asks it of each `.grad`
        for memory in (grad.numpy, grad.tolist):
            with pytest.raises(RuntimeError):
                memory()
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_on_top_of_it_is_that_gradient(create_graph: bool, adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(
        model.named_parameters(), gradient_accumulation_steps=2, state_dtype="fp32", master_weight_bits=32
    )
    theirs = torch.optim.AdamW(twin.parameters())
    for step in range(3):
        for one in (model, twin):
            for micro in range(2):
                x = torch.full((2, 8), float(step + micro + 1))
                one(x).square().sum().backward(create_graph=create_graph and one is model)
        optimizer.step()
        theirs.step()
        theirs.zero_grad()
    assert_close(model, twin)


@pytest.mark.parametrize("use", ["add_", "add"])
def test_what_a_hook_adds_after_it_has_left_is_refused(use: str, adamw: AdamW) -> None:
    """Within a backward(), as autograd's own additions are."""
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit="staged")

    def add(parameter: torch.Tensor) -> None:
        USES[use](parameter.grad)

    for layer in (model[0], model[2]):
        layer.weight.register_post_accumulate_grad_hook(add)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(
        ballast.Rejected, match="gradient of '[02].weight' was added to after it had left.*register_hook"
    ):
        optimizer.step()
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied


@pytest.mark.parametrize("commit", ["release", "staged"])
def test_a_buffer_behind_gradients_may_be_kept_and_not_be_written_to(commit: str, adamw: AdamW) -> None:
    """As loops have it that reduce or scale all gradients at once."""
    ours, theirs = layered(seed=1), layered(seed=1)
    sizes = [p.numel() for p in ours.parameters()]
    buffer = torch.zeros(sum(sizes))
    one = adamw(ours.named_parameters(), commit=commit, master="fp32", state="fp32")
    other = torch.optim.AdamW(theirs.parameters())
    for written in (False, True, False):
        buffer.zero_()
        for parameter, part in zip(ours.parameters(), buffer.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        for model in (ours, theirs):
            model(torch.ones(2, 8)).square().sum().backward()
        if written:
            buffer.mul_(0.5)
            with pytest.raises(ballast.Rejected, match="memory of the gradient of '0.*was written to.*register_hook"):
                one.step()
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(ours, theirs)


@pytest.mark.parametrize("between, commit", [("nothing", "release"), ("nothing", "staged"), ("a backward", "staged")])
def test_one_of_an_earlier_step_is_not_put_back(between: str, commit: str, adamw: AdamW) -> None:
    """As tasks' gradients are kept, and put together, by hand."""
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit=commit)
    model(torch.ones(2, 8)).sum().backward()
    kept = [parameter.grad for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), kept):  # in the same step it is where it was
        parameter.grad = None
        parameter.grad = gradient
    optimizer.step()
    if between == "a backward":
        model(torch.ones(2, 8)).sum().backward()
    for parameter, gradient in zip(model.parameters(), kept):
        parameter.grad = gradient
    with pytest.raises(ballast.Rejected, match="stands for a gradient of '0.weight' that left.*in an earlier step"):
        optimizer.step()
    model.zero_grad()
    optimizer.step()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied


def test_a_hook_on_the_parameter_sees_and_changes_gradients(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), state_dtype="fp32", master_weight_bits=32)
    theirs = torch.optim.AdamW(twin.parameters())
    seen: dict[bool, list[float]] = {True: [], False: []}
    for one in (model, twin):
        for parameter in one.parameters():
            parameter.register_hook(lambda grad, ours=one is model: seen[ours].append(float(grad.norm())) or grad * 0.5)
    for one, opt in ((model, optimizer), (twin, theirs)):
        one(torch.ones(2, 8)).square().sum().backward()
        opt.step()
    assert seen[True] == seen[False] and len(seen[True]) == 6
    assert_close(model, twin)


def test_taking_gradients_back_of_a_release_step_is_refused_once(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters())
    reference = adamw(twin.named_parameters(), run=f"{optimizer.run}-twin")
    for one in (model, twin):
        one(torch.ones(2, 8)).sum().backward()
    model.zero_grad()
    with pytest.raises(ballast.Rejected, match="was taken back.*in step 1.*commit='staged'"):
        optimizer.step()
    optimizer.step()
    reference.step()
    assert same_bits(weights_of(model), weights_of(twin))


@pytest.mark.parametrize("ends", ["close", "delete"])
def test_it_ends_with_its_optimizer(ends: str, adamw: AdamW, daemon: Any, run: str) -> None:
    model = layered(seed=1)
    optimizer = ballast.AdamW(model.named_parameters(), server=daemon.server, run=run)
    model(torch.ones(2, 8)).sum().backward()
    assert isinstance(model[0].weight.grad, SentGradient)
    if ends == "close":
        optimizer.close()
    del optimizer
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    assert all(type(parameter.grad) is torch.Tensor for parameter in model.parameters())
