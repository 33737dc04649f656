"""Gradients that a trainer drops after backward(): its step comes to nothing, and the next is as torch's."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from daemon import Daemon
from models import assert_close, layered, same_bits, weights_of
from test_clipping import CLIPS

AdamW = Callable[..., ballast.AdamW]
EXACT: dict[str, Any] = {"state_dtype": "fp32", "master_weight_bits": 32, "commit": "staged"}


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def set_to_none(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "module": lambda model, optimizer: model.zero_grad(),
    "by hand": set_to_none,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_next_step_has_its_own_gradients_alone(way: str, adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer, theirs = adamw(model.named_parameters(), **EXACT), torch.optim.AdamW(twin.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            for one, opt in ((model, optimizer), (twin, theirs)):
                one(batch(number)).square().mean().backward()
                WAYS[way](one, opt)
                one(batch(10 + number)).square().mean().backward()
                opt.step()
                opt.zero_grad()
    assert_close(model, twin)
    status = optimizer.run_status()
    assert (status.steps_applied, status.steps_skipped) == (3, 3)


@pytest.mark.parametrize("way", WAYS)
def test_the_first_step_of_a_run_that_rounds_weights(way: str, adamw: AdamW, run: str) -> None:
    """It would bring the rounded ones, into the graph of the next backward()."""
    options: dict[str, Any] = {"commit": "staged", "master": "split24", "state": "fp32", "rounding": "nearest"}
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), **options)
    other = adamw(twin.named_parameters(), **options, run=f"{run}-twin")
    model(batch(1)).square().mean().backward()
    WAYS[way](model, optimizer)
    for number in (2, 3):
        for one, opt in ((model, optimizer), (twin, other)):
            one(batch(number)).square().mean().backward()
            opt.step()
    if way != "optimizer":  # it drops the step before the forward, which then reads the rounded weights
        assert same_bits(weights_of(model), weights_of(twin))
    assert_close(model, twin)
    assert optimizer.run_status().steps_applied == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_step_without_its_gradients_is_none(way: str, adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), **EXACT)
    before = weights_of(model)
    model(batch(1)).sum().backward()
    WAYS[way](model, optimizer)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert same_bits(before, weights_of(model))


@pytest.mark.parametrize("way", WAYS)
def test_what_was_dropped_has_no_norm(way: str, adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), **EXACT)
    model(batch(1)).sum().backward()
    WAYS[way](model, optimizer)
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == 0
    optimizer.step()
    assert optimizer.step_was_skipped
    assert optimizer.run_status().step == 1


@pytest.mark.parametrize("way", WAYS)
def test_the_next_gradients_may_be_of_other_parameters(way: str, adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer, theirs = adamw(model.named_parameters(), **EXACT), torch.optim.AdamW(twin.parameters())
    for one, opt in ((model, optimizer), (twin, theirs)):
        one[0](batch(1)).square().mean().backward()
        WAYS[way](one, opt)
        one[2](batch(2)).square().mean().backward()
        opt.step()
    assert_close(model, twin)
    status = optimizer.run_status()
    assert (status.steps_applied, status.steps_skipped) == (1, 1)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        model(batch(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("way", WAYS)
def test_a_rollback_from_the_middle_of_a_step(way: str, adamw: AdamW) -> None:
    """As after Ctrl-C in a backward(): gradients of weights that are gone are dropped after state is loaded."""
    model, twin = layered(seed=1), layered(seed=1)
    optimizer, theirs = adamw(model.named_parameters(), **EXACT), torch.optim.AdamW(twin.parameters())
    for one, opt in ((model, optimizer), (twin, theirs)):
        learn(one, opt, range(3))
        weights, state = copy.deepcopy(one.state_dict()), copy.deepcopy(opt.state_dict())
        learn(one, opt, range(3, 5))
        one(batch(5)).square().mean().backward()
        one.load_state_dict(weights)
        opt.load_state_dict(state)
        WAYS[way](one, opt)
        learn(one, opt, range(3, 6))
    assert_close(model, twin)
    status = optimizer.run_status()
    assert (status.steps_applied, status.steps_skipped) == (8, 1)


def test_no_step_is_made_of_gradients_from_before_a_rollback(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), **EXACT)
    learn(model, optimizer, range(1))
    state = optimizer.state_dict()
    learn(model, optimizer, range(1))
    before = weights_of(model)
    model(batch(2)).sum().backward()
    optimizer.load_state_dict(state)
    for go_on in (optimizer.step, model(batch(3)).sum().backward):
        with pytest.raises(
            ballast.Rejected, match=r"load_state_dict\(\) was called in step 3.* with zero_grad\(\) of the optimizer"
        ):
            go_on()
    assert same_bits(before, weights_of(model))
    model.zero_grad()
    learn(model, optimizer, range(1))
    assert optimizer.last_result is not None and optimizer.last_result.step == 4


def test_loading_the_state_that_the_run_has_leaves_the_open_step_alone(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer, theirs = adamw(model.named_parameters(), **EXACT), torch.optim.AdamW(twin.parameters())
    for one, opt in ((model, optimizer), (twin, theirs)):
        learn(one, opt, range(2))
        one(batch(2)).square().mean().backward()
        opt.load_state_dict(opt.state_dict())
        opt.step()
        opt.zero_grad()
        learn(one, opt, range(3, 5))
    assert_close(model, twin)
    assert optimizer.run_status().generation == 1


def test_a_release_run_loads_no_state_in_the_middle_of_a_step(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    learn(model, optimizer, range(1))
    state = optimizer.state_dict()
    model(batch(2)).sum().backward()
    with pytest.raises(ballast.Rejected, match="step 2 is open"):
        optimizer.load_state_dict(state)
    optimizer.step()


def test_two_networks_that_train_against_each_other(adamw: AdamW) -> None:
    """The generator's backward() leaves gradients in the discriminator, which zero_grad() drops."""
    pairs = []
    for kind in ("ours", "theirs"):
        g, d = layered(seed=1), layered(seed=2)
        if kind == "ours":
            og: Any = adamw(g.named_parameters(), **EXACT)
            od: Any = adamw(d.named_parameters(), **EXACT, run=f"{og.run}-d")
        else:
            og, od = torch.optim.AdamW(g.parameters()), torch.optim.AdamW(d.parameters())
        for number in range(5):
            og.zero_grad()
            (-d(g(batch(number))).square().mean()).backward()
            og.step()
            od.zero_grad()
            (d(batch(number)).square().mean() + d(g(batch(number)).detach()).mean()).backward()
            od.step()
        pairs.append((g, d))
    for ours, theirs in zip(*pairs):
        assert_close(ours, theirs)


def test_a_backward_that_breaks_off(adamw: AdamW) -> None:
    """As out of memory does, in the middle."""
    model, twin = layered(seed=1), layered(seed=1)
    optimizer, theirs = adamw(model.named_parameters(), **EXACT), torch.optim.AdamW(twin.parameters())

    def fail(grad: torch.Tensor) -> None:
        raise MemoryError

    for number in range(4):
        for one, opt in ((model, optimizer), (twin, theirs)):
            opt.zero_grad()
            hidden = one[0](batch(number))
            if number == 2:
                hidden.register_hook(fail)
                with pytest.raises(MemoryError):
                    one[2](one[1](hidden)).square().mean().backward()
                continue
            one[2](one[1](hidden)).square().mean().backward()
            opt.step()
    assert_close(model, twin)


def test_a_gradient_that_is_too_large_may_be_dropped_by_its_norm(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer, theirs = adamw(model.named_parameters(), **EXACT), torch.optim.AdamW(twin.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scheduler_there = torch.optim.lr_scheduler.ExponentialLR(theirs, 0.5)
    for number, factor in enumerate((1.0, 1e6, 1.0)):
        for one, opt, sched in ((model, optimizer, scheduler), (twin, theirs, scheduler_there)):
            (one(batch(number)).square().mean() * factor).backward()
            if torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0) > 1e3:
                opt.zero_grad()
                continue
            opt.step()
            opt.zero_grad()
            sched.step()
    assert_close(model, twin)
    assert optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


def test_between_micro_batches(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer, theirs = adamw(model.named_parameters(), **EXACT), torch.optim.AdamW(twin.parameters())
    for one, opt in ((model, optimizer), (twin, theirs)):
        for number in range(6):
            one(batch(number)).square().mean().backward()
            if number == 2:
                opt.zero_grad()
        opt.step()
    assert_close(model, twin)


@pytest.mark.parametrize("final", [True, False])
def test_within_a_micro_batch_that_is_announced(final: bool, adamw: AdamW) -> None:
    """It drops one step, and none without gradients comes in its place."""
    model, twin = layered(seed=1), layered(seed=1)
    optimizer, theirs = adamw(model.named_parameters(), **EXACT), torch.optim.AdamW(twin.parameters())
    with optimizer.accumulate(final=final):
        model(batch(1)).square().mean().backward()
        optimizer.zero_grad()
    optimizer.step()
    assert optimizer.step_was_skipped
    for number in (2, 3):
        with optimizer.accumulate(final=True):
            model(batch(number)).square().mean().backward()
        optimizer.step()
        twin(batch(number)).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    assert_close(model, twin)
    status = optimizer.run_status()
    assert (status.step, status.steps_applied, status.steps_skipped) == (3, 2, 1)


def test_a_second_backward_after_it_in_the_same_micro_batch(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer, theirs = adamw(model.named_parameters(), **EXACT), torch.optim.AdamW(twin.parameters())
    with optimizer.accumulate(final=True):
        model(batch(1)).square().mean().backward()
        optimizer.zero_grad()
        model(batch(2)).square().mean().backward()
    optimizer.step()
    twin(batch(2)).square().mean().backward()
    theirs.step()
    assert_close(model, twin)


def test_sharpness_aware_minimization(adamw: AdamW) -> None:
    """Two backward() for a step, the first only to find where the second is made: its weights are changed and put back."""
    model, twin = layered(seed=1), layered(seed=1)
    optimizer, theirs = adamw(model.named_parameters(), **EXACT), torch.optim.AdamW(twin.parameters())
    for one, opt in ((model, optimizer), (twin, theirs)):
        for number in range(3):
            probe = torch.autograd.grad(one(batch(number)).square().mean(), list(one.parameters()))
            old = weights_of(one)
            with torch.no_grad():
                for parameter, step in zip(one.parameters(), probe, strict=True):
                    parameter.add_(step, alpha=0.05)
            moved = one(batch(number)).square().mean()
            grads = torch.autograd.grad(moved, list(one.parameters()))
            with torch.no_grad():
                for parameter, weight, grad in zip(one.parameters(), old, grads, strict=True):
                    parameter.copy_(weight)
                    parameter.grad = grad
            opt.step()
            opt.zero_grad()
    assert_close(model, twin)


def test_one_parameter_alone_is_refused(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), **EXACT)
    model(batch(1)).sum().backward()
    model[1].weight.grad = None
    with pytest.raises(ballast.Rejected, match="'1.weight' was taken back.*'.*' was not"):
        optimizer.step()
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied


def test_one_rank_drops_the_step_of_all(daemon: Daemon, run: str) -> None:
    models = [layered(seed=1) for _ in range(2)]

    def trainer(rank: int) -> tuple[list[torch.Tensor], int, str]:
        model = models[rank]
        with ballast.AdamW(
            model.named_parameters(), server=daemon.server, run=run, rank=rank, world=2, **EXACT
        ) as optimizer:
            for number in range(3):
                model(batch(number)).square().mean().backward()
                if number == 1 and rank == 1:
                    optimizer.zero_grad()
                else:
                    optimizer.step()
                if number == 1:
                    assert optimizer.last_result is not None
                    told = optimizer.last_result.reason
            assert optimizer.last_result is not None
            return weights_of(model), optimizer.last_result.step, told

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 0 is told that its step came to nothing
        with ThreadPoolExecutor(2) as pool:
            one, two = (done.result(timeout=120) for done in [pool.submit(trainer, r) for r in range(2)])
    assert same_bits(one[0], two[0])
    assert one[1:] == two[1:] == (3, "discarded")
    twin = layered(seed=1)
    theirs = torch.optim.AdamW(twin.parameters())
    for number in (0, 2):
        twin(batch(number)).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    for ours, expected in zip(one[0], twin.parameters(), strict=True):
        torch.testing.assert_close(ours, expected.detach())


@pytest.mark.parametrize("how", CLIPS)
def test_a_rank_that_clips_what_another_drops(how: str, daemon: Daemon, run: str) -> None:
    """Its norm is NaN, in however many calls it asks, and its step is SKIPPED."""
    models = [layered(seed=1) for _ in range(2)]

    def trainer(rank: int) -> tuple[float, str]:
        model = models[rank]
        with ballast.AdamW(
            model.named_parameters(), server=daemon.server, run=run, rank=rank, world=2, **EXACT
        ) as optimizer:
            model(batch(1)).square().mean().backward()
            norm = math.nan
            if rank == 0:
                norm = float(CLIPS[how](model.parameters(), 0.5))
                optimizer.step()
            else:
                optimizer.zero_grad()
            assert optimizer.last_result is not None
            return norm, optimizer.last_result.reason

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 0 is told that its step came to nothing
        with ThreadPoolExecutor(2) as pool:
            one, two = (done.result(timeout=120) for done in [pool.submit(trainer, r) for r in range(2)])
    assert math.isnan(one[0]) and one[1] == two[1] == "discarded"
