"""The arguments of torch's own optimizers: those that mean nothing here are taken, the others are refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ballast

AdamW = Callable[..., ballast.AdamW]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))


TORCHS = {ballast.AdamW: torch.optim.AdamW, ballast.Adam: torch.optim.Adam, ballast.SGD: torch.optim.SGD}


@pytest.mark.parametrize("ours", TORCHS)
def test_every_argument_of_torch_is_taken_with_its_default(ours: Any, make: Callable[..., Any]) -> None:
    theirs = inspect.signature(TORCHS[ours]).parameters
    values = {name: argument.default for name, argument in theirs.items() if name != "params"}
    optimizer = make(ours, [parameter(1)], **values)
    assert optimizer.defaults.items() >= values.items()
    in_order = [a.name for a in theirs.values() if a.kind is a.POSITIONAL_OR_KEYWORD]
    assert list(inspect.signature(ours).parameters)[: len(in_order)] == in_order


@pytest.mark.parametrize("value", [None, True, False])
@pytest.mark.parametrize("option", ["fused", "foreach", "capturable"])
def test_the_choice_of_an_implementation_means_nothing(option: str, value: Any, make: Callable[..., Any]) -> None:
    w, v = parameter(3), parameter(3)
    optimizer = make(ballast.AdamW, [{"params": [w], option: value}], rounding="nearest", **{option: value})
    optimizer.add_param_group({"params": [v], option: not value})
    (w.sum() + v.sum()).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert optimizer.last_result.applied and torch.equal(w, v)


def test_a_choice_that_torch_would_not_understand_is_refused(adamw: AdamW) -> None:
    with pytest.raises(ballast.Rejected, match="^fused='yes': it must be None, True or False"):
        adamw([parameter(1)], fused="yes")


REFUSED = {
    "amsgrad": "the daemon keeps no maximum of second moments; leave it out",
    "maximize": "the daemon goes down the gradient.*loss times -1",
    "differentiable": "the update is made by the daemon.*autograd does not see it; leave it out",
}


@pytest.mark.parametrize("option", REFUSED)
def test_what_changes_the_result_is_refused_with_the_reason(option: str, adamw: AdamW) -> None:
    message = f"^{option}=True.* is not supported: {REFUSED[option]}"
    with pytest.raises(ballast.Rejected, match=message):
        adamw([parameter(1)], **{option: True})
    with pytest.raises(ballast.Rejected, match=message):
        adamw([{"params": [parameter(1)], option: True}])
    optimizer = adamw([parameter(1)], **{option: False})
    with pytest.raises(ballast.Rejected, match=message):
        optimizer.add_param_group({"params": [parameter(1)], option: True})
    theirs = torch.optim.AdamW([parameter(1)], **{option: True}).state_dict()
    with pytest.raises(ballast.Rejected, match=message):
        optimizer.load_state_dict(theirs)


@pytest.mark.parametrize("ours", TORCHS)
def test_a_state_of_torch_brings_the_choice_of_an_implementation(ours: Any, make: Callable[..., Any]) -> None:
    w = parameter(3)
    optimizer = make(ours, [w])
    optimizer.load_state_dict(TORCHS[ours]([parameter(3)], foreach=True, lr=0.5).state_dict())
    w.sum().backward()
    optimizer.step()
    assert optimizer.last_result.applied and optimizer.param_groups[0]["lr"] == 0.5


def test_adam_with_the_decay_of_adamw_is_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(ballast.Rejected, match="^decoupled_weight_decay=True.*write ballast.AdamW"):
        make(ballast.Adam, [parameter(1)], decoupled_weight_decay=True)
    theirs = torch.optim.Adam([parameter(1)]).state_dict()
    theirs["param_groups"][0]["decoupled_weight_decay"] = True  # as newer torch.optim.AdamW says
    with pytest.raises(ballast.Rejected, match="write ballast.AdamW"):
        make(ballast.Adam, [parameter(1)]).load_state_dict(theirs)


def test_adamw_with_the_decay_of_adam_is_refused(adamw: AdamW) -> None:
    """Where there is any: without, the two are one."""
    with pytest.raises(ballast.Rejected, match="^decoupled_weight_decay=False.*write ballast.Adam in place"):
        adamw([{"params": [parameter(1)], "decoupled_weight_decay": False}])
    w = parameter(1)
    optimizer = adamw([w], weight_decay=0.0)
    optimizer.param_groups[0]["decoupled_weight_decay"] = False
    w.sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(ballast.Rejected, match="write ballast.Adam in place of AdamW"):
        w.sum().backward()


def test_a_rule_that_torch_lacks_has_only_its_own_arguments(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"Lion\(\) got an unexpected keyword argument 'fused'"):
        make(ballast.Lion, [parameter(1)], fused=True)
