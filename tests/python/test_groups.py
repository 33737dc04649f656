"""What groups of parameters may be: without any, as a framework makes them, and with options of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from models import layered

AdamW = Callable[..., ballast.AdamW]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_group_without_parameters_is_kept(place: int, adamw: AdamW) -> None:
    """As Trainer's group without decay is, of a model whose biases are frozen. Schedulers change its lr, too."""
    ours, theirs = layered(seed=1), layered(seed=1)

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "lr": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        made.insert(place, {"params": []})
        return made

    exact = {"master": "fp32", "state": "fp32", "rounding": "nearest"}
    optimizers = [adamw(groups(ours), lr=0.01, **exact), torch.optim.AdamW(groups(theirs), lr=0.01)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    for _ in range(3):
        for model, optimizer, scheduler in zip((ours, theirs), optimizers, schedulers):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            scheduler.step()
    for one, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    states = [optimizer.state_dict()["param_groups"] for optimizer in optimizers]
    assert [group["params"] for group in states[0]] == [group["params"] for group in states[1]]
    assert [group["lr"] for group in states[0]] == [group["lr"] for group in states[1]]


def test_a_group_without_parameters_is_added_in_the_middle(adamw: AdamW) -> None:
    w = nn.Parameter(torch.zeros(3))
    optimizer = adamw([w])
    for step in (1, 2):
        w.sum().backward()
        optimizer.step()
        assert optimizer.last_result is not None and optimizer.last_result.step == step
        optimizer.add_param_group({"params": []})
    assert len(optimizer.param_groups) == 3


def test_an_optimizer_of_nothing_is_refused(adamw: AdamW) -> None:
    optimizer = adamw([{"params": []}])
    with pytest.raises(ballast.Rejected, match="every parameter is frozen"):
        optimizer.connect()


def test_a_generator_that_was_read_before_is_told(adamw: AdamW) -> None:
    generator = layered(seed=1).parameters()
    list(generator)
    with pytest.raises(ballast.Rejected, match="gave nothing, as one that was read before: give a list"):
        adamw([{"params": generator}])


@pytest.mark.parametrize(
    "option, value", [("max_grad_norm", 0.1), ("nonfinite", "stop"), ("gradient_accumulation_steps", 2)]
)
def test_an_option_of_the_run_is_refused_in_a_group(option: str, value: Any, adamw: AdamW) -> None:
    with pytest.raises(
        ballast.Rejected, match=f"^{option}={value!r} of a param_group: it is an option of the whole run"
    ):
        adamw([{"params": [nn.Parameter(torch.zeros(1))], option: value}])
    w = nn.Parameter(torch.zeros(1))
    optimizer = adamw([w])
    optimizer.param_groups[0][option] = value
    with pytest.raises(ballast.Rejected, match=f"^{option}="):
        w.sum().backward()


def test_what_other_libraries_write_into_a_group_means_nothing(adamw: AdamW) -> None:
    w = nn.Parameter(torch.zeros(1))
    optimizer = adamw([{"params": [w], "rank": 128, "proj_type": "std", "scale": 0.25}])
    w.sum().backward()
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied


def test_a_rule_is_refused_in_a_group_of_an_optimizer_of_one(adamw: AdamW) -> None:
    with pytest.raises(
        ballast.Rejected, match="^rule='lion' of a param_group: all groups of this optimizer.*ballast.Muon"
    ):
        adamw([{"params": [nn.Parameter(torch.zeros(1))], "rule": "lion"}])
