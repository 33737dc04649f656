"""Several backward() make one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ballast
from ballast.sent_gradient import SentGradient
from models import assert_close, layered, same_bits, weights_of

AdamW = Callable[..., ballast.AdamW]
EXACT = {"state_dtype": "fp32", "master_weight_bits": 32}


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def torchs(steps: list[list[int]], **options: Any) -> list[torch.Tensor]:
    """Weights after torch's AdamW made steps of these micro-batches."""
    model = layered(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for micros in steps:
        optimizer.zero_grad()
        for number in micros:
            (model(batch(number)).square().mean() / len(micros)).backward()
        optimizer.step()
    return weights_of(model)


def test_backward_after_backward_makes_one_step_of_n(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), gradient_accumulation_steps=3, **EXACT)
    before = weights_of(model)
    for micro in range(6):
        (model(batch(micro)).square().mean() / 3).backward()
        assert all(isinstance(p.grad, SentGradient) for p in model.parameters())
        if micro < 2:
            assert same_bits(before, weights_of(model))
        if micro % 3 == 2:
            optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.step == 2
    for ours, theirs in zip(model.parameters(), torchs([[0, 1, 2], [3, 4, 5]]), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_announced_micro_batches_may_be_fewer(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), gradient_accumulation_steps=3, **EXACT)
    steps = [[0, 1, 2], [3], [4, 5]]
    for micros in steps:
        for number in micros:
            with optimizer.accumulate(final=number == micros[-1]) as micro:
                loss = model(batch(number)).square().mean() / len(micros)
                loss.backward()
                micro.report(loss)
        optimizer.step()
        assert optimizer.last_result is not None and optimizer.last_result.applied
    for ours, theirs in zip(model.parameters(), torchs(steps), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_both_ways_give_the_same_bits(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    implicit = adamw(model.named_parameters(), gradient_accumulation_steps=2)
    announced = adamw(twin.named_parameters(), gradient_accumulation_steps=2, run=f"{implicit.run}-twin")
    for number in range(4):
        model(batch(number)).sum().backward()
        with announced.accumulate(final=number % 2 == 1):
            twin(batch(number)).sum().backward()
        if number % 2 == 1:
            implicit.step()
            announced.step()
    assert same_bits(weights_of(model), weights_of(twin))


def test_the_steps_loss_is_the_mean_of_those_reported(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), gradient_accumulation_steps=2)
    for loss, final in ((3.0, False), (torch.tensor([5.0]), True)):
        with optimizer.accumulate(final) as micro:
            model(batch(0)).sum().backward()
            micro.report(loss)
    optimizer.step()
    assert optimizer.run_status().loss == 4.0
    for loss in (1.0, torch.tensor(2.0)):
        model(batch(0)).sum().backward()
        optimizer.report_loss(loss)
    optimizer.step()
    assert optimizer.run_status().loss == 1.5
    for _ in range(2):
        model(batch(0)).sum().backward()
    optimizer.step(loss=7.0)
    assert optimizer.run_status().loss == 7.0


def test_two_losses_of_one_graph_are_two_micro_batches(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), gradient_accumulation_steps=2, **EXACT)
    theirs = torch.optim.AdamW(twin.parameters())
    for step in range(2):
        ours = model(batch(step))
        with optimizer.accumulate():
            ours.sum().backward(retain_graph=True)
        with optimizer.accumulate(final=True):
            ours.square().sum().backward()
        optimizer.step()
        theirs.zero_grad()
        out = twin(batch(step))
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
        theirs.step()
    assert_close(model, twin)


def test_two_losses_in_one_micro_batch_are_refused(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), gradient_accumulation_steps=2)
    out = model(batch(0))
    with optimizer.accumulate():
        out.sum().backward(retain_graph=True)
        with pytest.raises(ballast.Rejected, match="second gradient in micro-batch 1 of step 1.*for each accumulate"):
            out.square().sum().backward()


def test_a_missing_micro_batch_is_refused_and_may_follow(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), gradient_accumulation_steps=2)
    model(batch(0)).sum().backward()
    with pytest.raises(ballast.Rejected, match="step\\(\\) after 1 of 2 micro-batches of step 1"):
        optimizer.step()
    model(batch(1)).sum().backward()
    with pytest.raises(ballast.Rejected, match="second gradient in micro-batch 2.*call step\\(\\).*use_reentrant"):
        model(batch(2)).sum().backward()
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied


@pytest.mark.parametrize("most", [2, 3])
def test_a_micro_batch_that_was_broken_off_is_told_how_to_go_on(most: int, adamw: AdamW) -> None:
    """By Ctrl-C within backward(), say, where no accumulate() says that there are several."""
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), gradient_accumulation_steps=most)
    hidden = model[1](model[0](batch(0)))
    hidden.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model[2](hidden).sum().backward()
    for left in range(most - 1, 0, -1):
        way = rf"run {left} more backward\(\), then call step\(\)"
        for ask in (optimizer.zero_grad, optimizer.step, lambda: announced(optimizer), lambda: taken_back(model)):
            with pytest.raises(ballast.Rejected, match=way) as refused:
                ask()
            assert "final=True" not in str(refused.value)
        model(batch(left)).sum().backward()
    with pytest.raises(ballast.Rejected, match=r"first call step\(\)"):
        optimizer.zero_grad()
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied


def interrupt(_: torch.Tensor) -> None:
    raise KeyboardInterrupt


def announced(optimizer: ballast.AdamW) -> None:
    with optimizer.accumulate(final=True):
        pass


def taken_back(model: nn.Module) -> None:
    model.zero_grad()
    model(batch(0)).sum().backward()


def test_zero_grad_of_announced_micro_batches_tells_how_to_go_on(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), gradient_accumulation_steps=2)
    with optimizer.accumulate():
        model(batch(0)).sum().backward()
    with pytest.raises(ballast.Rejected, match=r"the last with accumulate\(final=True\), then call step\(\)"):
        optimizer.zero_grad()


def test_accumulate_out_of_order_is_refused(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), gradient_accumulation_steps=2)
    with optimizer.accumulate():
        model(batch(0)).sum().backward()
        with pytest.raises(ballast.Rejected, match="within accumulate"):
            optimizer.step()
    with pytest.raises(ballast.Rejected, match="none of them final"):
        optimizer.step()
    with pytest.raises(ballast.Rejected, match="outside of accumulate"):
        model(batch(0)).sum().backward()
    with pytest.raises(ballast.Rejected, match="must be final=True.*give a larger one"):
        with optimizer.accumulate():
            pass
    with optimizer.accumulate(final=True):
        model(batch(1)).sum().backward()
    with pytest.raises(ballast.Rejected, match="call step\\(\\) first"):
        with optimizer.accumulate(final=True):
            pass
    optimizer.step()
    model(batch(0)).sum().backward()
    with pytest.raises(ballast.Rejected, match="for every micro-batch of a step, or for none"):
        with optimizer.accumulate():
            pass


def test_a_micro_batch_broken_off_before_its_gradients_may_be_entered_again(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), gradient_accumulation_steps=2)
    reference = adamw(twin.named_parameters(), gradient_accumulation_steps=2, run=f"{optimizer.run}-twin")
    for final in (False, True):
        with pytest.raises(MemoryError):
            with optimizer.accumulate(final):
                raise MemoryError
        for net, one in ((model, optimizer), (twin, reference)):
            with one.accumulate(final):
                net(batch(0)).sum().backward()
    optimizer.step()
    reference.step()
    assert same_bits(weights_of(model), weights_of(twin))


def test_a_micro_batch_without_gradients_counts(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), gradient_accumulation_steps=3)
    reference = adamw(twin.named_parameters(), run=f"{optimizer.run}-twin")
    with optimizer.accumulate():
        pass
    with optimizer.accumulate():
        model(batch(0)).sum().backward()
    with optimizer.accumulate(final=True):
        pass
    optimizer.step()
    twin(batch(0)).sum().backward()
    reference.step()
    assert same_bits(weights_of(model), weights_of(twin))


class Tied(nn.Module):
    """One weight in two places, each recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        hidden = checkpoint(lambda h: torch.tanh(self.one(h)), x, use_reentrant=reentrant)
        return checkpoint(lambda h: torch.tanh(self.other(h)), hidden, use_reentrant=reentrant)


def test_tied_weights_under_activation_checkpointing(adamw: AdamW) -> None:
    model, twin = Tied(), Tied()
    optimizer = adamw(model.named_parameters(), gradient_accumulation_steps=2, **EXACT)
    theirs = torch.optim.AdamW(twin.parameters())
    for step in range(2):
        theirs.zero_grad()
        for micro in range(2):
            for one in (model, twin):
                one(batch(2 * step + micro), reentrant=False).square().sum().backward()
        optimizer.step()
        theirs.step()
    assert_close(model, twin)


def test_tied_weights_under_reentrant_checkpointing_are_refused_with_the_fix(adamw: AdamW) -> None:
    model = Tied()
    optimizer = adamw(model.named_parameters(), gradient_accumulation_steps=2)
    with pytest.raises(ballast.Rejected, match="'one.weight' is read again.*use_reentrant=False"):
        with optimizer.accumulate(final=True):
            model(batch(0).requires_grad_(), reentrant=True).sum().backward()


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_a_strange_number_of_micro_batches_is_refused(bad: Any, adamw: AdamW) -> None:
    with pytest.raises(ballast.Rejected, match="gradient_accumulation_steps=.*whole number of at least 1"):
        adamw(layered(seed=1).named_parameters(), gradient_accumulation_steps=bad)
