"""torch.compile around a model, its blocks, its backward and the whole step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from models import assert_close, until


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def blocks() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Block(), Block(), Block())


AdamW = Callable[..., ballast.AdamW]
EXACT = {"state_dtype": "fp32", "master_weight_bits": 32}
BACKEND = "aot_eager"


Step = Callable[[torch.Tensor], None]


def stepping(forward: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor) -> None:
        forward(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return stepping(torch.compile(model, backend=BACKEND, fullgraph=True), optimizer)


def compile_blocks(model: nn.Module) -> None:
    for block in model.children():
        block.compile(backend=BACKEND, fullgraph=True)


def in_blocks(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    compile_blocks(model)
    return stepping(model, optimizer)


def with_compiled_autograd(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    compiled = torch.compile(model, backend=BACKEND)

    def step(x: torch.Tensor) -> None:
        loss = compiled(x).square().mean()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=BACKEND)):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return torch.compile(stepping(model, optimizer), backend=BACKEND)


OVERLAP = {"overlap_forward": True}
CASES = [(whole, {}), (in_blocks, {}), (with_compiled_autograd, {}), (whole_step, {})]
CASES += [(whole, OVERLAP), (in_blocks, OVERLAP), (with_compiled_autograd, OVERLAP)]


@pytest.mark.parametrize(("made", "options"), CASES)
def test_it_trains_as_with_torchs_optimizer(made: Any, options: dict[str, Any], adamw: AdamW) -> None:
    model, twin = blocks(), blocks()
    optimizer, theirs = adamw(model.named_parameters(), **EXACT, **options), torch.optim.AdamW(twin.parameters())
    torch._dynamo.reset()
    ours = made(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*global hooks on modules")  # torch's, of overlap_forward
        for number in range(5):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            ours(x)
            twin(x).square().mean().backward()
            theirs.step()
            theirs.zero_grad()
    optimizer.wait()
    assert_close(model, twin)


def test_a_compiled_step_whose_forward_would_have_to_wait_is_refused(adamw: AdamW) -> None:
    model = blocks()
    optimizer = adamw(model.named_parameters(), overlap_forward=True)
    step = whole_step(model, optimizer)
    with pytest.raises(ballast.Rejected, match="no module's forward waited.*leave overlap_forward out"):
        for _ in range(2):
            step(torch.ones(2, 8))


def test_weights_return_while_backward_goes_on_through_compiled_blocks(adamw: AdamW) -> None:
    """Of a model that is compiled as a whole all gradients are made at once, at the end."""
    model = blocks()
    optimizer = adamw(model.named_parameters())
    compile_blocks(model)
    last = model[2].linear.weight
    before = last.detach().clone()
    hidden = model[0](torch.ones(2, 8))
    hidden.register_hook(lambda grad: until(lambda: not torch.equal(last, before)))
    model[2](model[1](hidden)).square().mean().backward()
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied
