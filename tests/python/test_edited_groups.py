"""param_groups that are edited by hand: what the run would not hear of is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from models import layered, same_bits, weights_of

AdamW = Callable[..., ballast.AdamW]
Edit = Callable[[Any, nn.Sequential], object]


def grouped(model: nn.Sequential) -> list[dict[str, Any]]:
    return [
        {"params": list(model[0].named_parameters("first")), "lr": 1e-3},
        {"params": list(model[1].named_parameters("second")), "lr": 1e-1},
    ]


def replace(optimizer: Any, model: nn.Sequential) -> None:
    model[1].weight = optimizer.param_groups[1]["params"][0] = nn.Parameter(torch.ones(8, 8))


def move(optimizer: Any, _: nn.Sequential) -> None:
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop(0))


def put_in(optimizer: Any, model: nn.Sequential) -> None:
    optimizer.param_groups[0]["params"].append(model[2].weight)


EDITS: dict[str, tuple[Edit, str]] = {
    "replaced": (replace, "^parameter 'second.weight' was taken out of param_groups.1"),
    "moved": (move, "^parameter 'second.weight' was moved from param_groups.1. to param_groups.0"),
    "put in": (put_in, r"^a parameter of shape \(8, 8\) was put into param_groups.0"),
    "removed": (lambda o, _: o.param_groups[0]["params"].clear(), "^parameter 'first.weight' was taken out of"),
    "one removed": (lambda o, _: o.param_groups[1]["params"].pop(), "^parameter 'second.bias' was taken out of"),
    "reversed": (lambda o, _: o.param_groups.reverse(), "^parameter 'first.weight' was moved from"),
    "a group deleted": (lambda o, _: o.param_groups.pop(), "^parameter 'second.weight' was taken out of"),
    "another order": (lambda o, _: o.param_groups[0]["params"].reverse(), "^the parameters.*another order"),
}


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("edit", EDITS)
def test_it_is_refused_by_name_before_anything_is_sent(edit: str, before: int, adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(grouped(model))
    for _ in range(before):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    change, words = EDITS[edit]
    optimizer.connect()
    change(optimizer, model)
    was = weights_of(model)
    with pytest.raises(ballast.Rejected, match=words + ".*freeze.*add_param_group.*state_dict"):
        model(torch.ones(1, 8)).sum().backward()
    assert same_bits(was, weights_of(model)) and optimizer.run_status()["step"] == before


def test_it_is_refused_where_no_hook_is_left_to_see_it(adamw: AdamW) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = adamw([("w", weight)])
    weight.sum().backward()
    optimizer.step()
    made = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(3))
    made.sum().backward()
    with pytest.raises(ballast.Rejected, match="^parameter 'w' was taken out"):
        optimizer.step()


def test_put_back_it_trains_on(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(grouped(model))
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    taken = optimizer.param_groups.pop()
    with pytest.raises(ballast.Rejected):
        model(torch.ones(1, 8)).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    optimizer.param_groups.append(taken)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.step == 2


def test_a_group_that_was_refused_leaves_nothing_behind(adamw: AdamW) -> None:
    ours, theirs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = adamw([("w", ours)])
    other = adamw([("v", theirs)], run=f"{optimizer.run}-other")
    with pytest.raises(ballast.Rejected, match="trained by another ballast optimizer"):
        optimizer.add_param_group({"params": [("v", theirs)]})
    ours.sum().backward()
    optimizer.step()
    theirs.sum().backward()
    other.step()
    assert len(optimizer.param_groups) == 1 and not optimizer.owns(theirs)
    assert optimizer.last_result.step == 1 and other.last_result.step == 1
