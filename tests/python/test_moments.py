"""A run that goes on where one of torch's optimizers stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import ballast
from models import layered

EXACT = {"master": "fp32", "state": "fp32"}
RULES = [
    (ballast.AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (ballast.Adam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (ballast.SGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def difference(ours: torch.nn.Module, theirs: torch.nn.Module) -> float:
    return max(
        ((one - other).norm() / other.norm()).item() for one, other in zip(ours.parameters(), theirs.parameters())
    )


@pytest.mark.parametrize(("kind", "peer", "options"), RULES, ids=lambda value: getattr(value, "__name__", ""))
def test_it_goes_on_as_torch_would(make: Callable[..., Any], kind: Any, peer: Any, options: dict[str, Any]) -> None:
    theirs = layered(seed=1)
    torch_optimizer = peer(theirs.parameters(), **options)
    train(theirs, torch_optimizer, range(5))
    ours, cold = copy.deepcopy(theirs), copy.deepcopy(theirs)
    optimizer = make(kind, ours.named_parameters(), **options, **EXACT)
    optimizer.load_state_dict(torch_optimizer.state_dict())
    train(ours, optimizer, range(5, 10))
    train(theirs, torch_optimizer, range(5, 10))
    train(cold, peer(cold.parameters(), **options), range(5, 10))
    assert difference(ours, theirs) < 1e-6 < 1e-3 < difference(cold, theirs), "the moments make the difference"


def test_state_that_another_optimizer_goes_on_with_is_refused_until_a_copy_comes(make: Callable[..., Any]) -> None:
    theirs = layered(seed=1)
    torch_optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    train(theirs, torch_optimizer, range(5))
    ours, saved = copy.deepcopy(theirs), copy.deepcopy(torch_optimizer.state_dict())
    optimizer = make(ballast.AdamW, ours.named_parameters(), lr=0.01, **EXACT)
    optimizer.load_state_dict(torch_optimizer.state_dict())
    train(theirs, torch_optimizer, range(5, 10))
    with pytest.raises(ballast.Rejected, match="has changed since.*Nothing was sent. Load a copy"):
        train(ours, optimizer, range(5, 6))
    ours.zero_grad()
    optimizer.load_state_dict(saved)
    train(ours, optimizer, range(5, 10))
    assert difference(ours, theirs) < 1e-6


def test_the_compressed_default_takes_them_too(make: Callable[..., Any]) -> None:
    theirs = layered(seed=1)
    torch_optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    train(theirs, torch_optimizer, range(5))
    ours, cold = copy.deepcopy(theirs), copy.deepcopy(theirs)
    optimizer = make(ballast.AdamW, ours.named_parameters(), lr=0.01)
    optimizer.load_state_dict(torch_optimizer.state_dict())
    train(ours, optimizer, range(5, 8))
    train(theirs, torch_optimizer, range(5, 8))
    train(cold, torch.optim.AdamW(cold.parameters(), lr=0.01), range(5, 8))
    assert difference(ours, theirs) < 0.2 * difference(cold, theirs)


def test_what_cannot_be_taken_over_is_named(make: Callable[..., Any]) -> None:
    model = layered(seed=1)
    theirs = torch.optim.AdamW(model.parameters())
    train(model, theirs, range(1))
    optimizer = make(ballast.AdamW, model.named_parameters())
    state = theirs.state_dict()
    state["state"][0] = {**state["state"][0], "preconditioner": torch.eye(8)}
    with pytest.raises(ballast.Rejected, match="parameter 0 holds 'preconditioner', which the daemon has no place for"):
        optimizer.load_state_dict(state)
    state = theirs.state_dict()
    state["state"][0] = {**state["state"][0], "exp_avg": torch.zeros(3)}
    with pytest.raises(ballast.Rejected, match="exp_avg of parameter 0 has shape \\(3,\\)"):
        optimizer.load_state_dict(state)


def test_another_number_of_groups_is_refused_as_torch_does(make: Callable[..., Any]) -> None:
    model = layered(seed=1)
    groups = [{"params": model[:2].parameters()}, {"params": model[2].parameters()}]
    state = torch.optim.AdamW(groups).state_dict()
    optimizer = make(ballast.AdamW, model.named_parameters())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(state)


BROKEN: dict[str, tuple[Callable[[Any], object], str]] = {
    "nan": (lambda state: state[5]["exp_avg"].fill_(float("nan")), "exp_avg of parameter 5 holds a NaN"),
    "infinity": (lambda state: state[5]["exp_avg_sq"].fill_(float("inf")), "exp_avg_sq of parameter 5 holds a NaN"),
    "negative": (lambda state: state[5]["exp_avg_sq"].neg_(), "exp_avg_sq of parameter 5 holds .*a negative number"),
    "number": (lambda state: state[5].update(exp_avg=1.0), "exp_avg of parameter 5 is a float, and no tensor"),
    "step": (lambda state: state[5]["step"].fill_(float("nan")), "the step of parameter 5 is nan"),
    "step before the first": (lambda state: state[5]["step"].fill_(-1), "the step of parameter 5 is -1"),
    "stranger": (
        lambda state: state.update({"5": state.pop(5)}),
        "state of parameter '5', which is in none of its param_",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_refused_before_anything_of_the_run_is_replaced(make: Callable[..., Any], what: str) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = make(ballast.AdamW, model.named_parameters(), lr=0.01, **EXACT)
    peer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    for one, by in ((model, optimizer), (twin, peer)):
        train(one, by, range(2))
    state = optimizer.state_dict()
    breaks, said = BROKEN[what]
    breaks(state["state"])
    with pytest.raises(ballast.Rejected, match=said):
        optimizer.load_state_dict(state)
    for one, by in ((model, optimizer), (twin, peer)):
        train(one, by, range(2, 4))
    assert difference(model, twin) < 1e-6
    assert optimizer.run_status().generation == 1


def test_weights_that_are_not_finite_replace_nothing(make: Callable[..., Any]) -> None:
    model = layered(seed=1)
    optimizer = make(ballast.AdamW, model.named_parameters(), changed_weights="upload", **EXACT)
    train(model, optimizer, range(2))
    with torch.no_grad():
        model[1].weight.mul_(2)
        model[2].weight.fill_(float("nan"))
    with pytest.raises(ballast.Rejected, match="weights of '2.weight' hold a NaN.*nothing of it was replaced.*pull"):
        train(model, optimizer, range(2, 3))
    optimizer.pull()
    train(model, optimizer, range(2, 3))
    assert optimizer.last_result is not None and optimizer.last_result.applied
    assert optimizer.run_status().generation == 1


def test_a_run_that_has_moments_goes_on_from_others(make: Callable[..., Any]) -> None:
    """In the middle of it, and by a trainer that comes to it: only one that is to take the daemon's is refused."""
    model = layered(seed=1)
    theirs = torch.optim.AdamW(model.parameters())
    train(model, theirs, range(1))
    given, expected = theirs.state_dict(), copy.deepcopy(model)
    beside = torch.optim.AdamW(expected.parameters())
    beside.load_state_dict(given)
    optimizer = make(ballast.AdamW, model.named_parameters(), **EXACT)
    kept = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(7, 9))
    model.load_state_dict(kept)
    optimizer.load_state_dict(given)
    train(model, optimizer, range(1, 3))
    train(expected, beside, range(1, 3))
    assert difference(model, expected) < 1e-6
    optimizer.close()
    again = make(ballast.AdamW, model.named_parameters(), weights="match", **EXACT)
    again.load_state_dict(given)
    with pytest.raises(ballast.Rejected, match="has weights and moments already"):
        train(model, again, range(3, 4))


def test_a_rank_that_starts_late_may_bring_what_the_first_has_uploaded(make: Callable[..., Any]) -> None:
    """The script is the same for all ranks; of those after the first, moments go nowhere."""
    model = layered(seed=1)
    theirs = torch.optim.AdamW(model.parameters())
    train(model, theirs, range(1))

    def start(rank: int) -> tuple[torch.nn.Module, ballast.AdamW]:
        ours = copy.deepcopy(model)
        optimizer = make(ballast.AdamW, ours.named_parameters(), rank=rank, world=2, rank_timeout=0.5, step_timeout=60)
        optimizer.load_state_dict(theirs.state_dict())
        return ours, optimizer

    one = start(0)
    train(*one, range(1, 2))
    assert one[1].last_result.outcome == "ABORTED"
    other = start(1)
    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(lambda rank: train(*rank, range(2, 4)), (one, other)))
    assert one[1].last_result.outcome == "APPLIED"
    assert all(torch.equal(*pair) for pair in zip(one[0].parameters(), other[0].parameters()))
