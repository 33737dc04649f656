"""State of a run that is no longer what a trainer, or a file, takes it for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import ballast
from models import layered, same_bits, until, weights_of
from test_moments import EXACT, train

AdamW = Callable[..., ballast.AdamW]


@pytest.mark.parametrize("saved", ["full", "reference"])
def test_after_an_operators_rewind_it_is_not_of_two_steps(adamw: AdamW, admin: Any, run: str, saved: str) -> None:
    """The model is of step 3 here, and the run's moments are of step 2."""
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), snapshots=1, snapshot_every=2, saved_state=saved)
    train(model, optimizer, range(2))
    kept = weights_of(model)
    train(model, optimizer, range(2, 3))
    admin.rewind(run, 2, None, "operator")
    with pytest.raises(ballast.RunRewound, match="rewound to step 2 "):
        optimizer.state_dict()
    token = optimizer.state_dict()["ballast"]
    assert (token["step"], token["generation"]) == (2, 2)
    assert same_bits(weights_of(model), kept)
    train(model, optimizer, range(2, 3))


def test_while_it_is_read_the_run_may_be_rewound(adamw: AdamW, admin: Any, run: str) -> None:
    """After the last tensor was read."""
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), snapshots=1, snapshot_every=2)
    train(model, optimizer, range(3))
    session = optimizer._membership.session
    assert session is not None
    read = session.weights.state

    def read_then_rewind() -> Any:
        found = read()
        admin.rewind(run, 2, None, "operator")
        return found

    session.weights.state = read_then_rewind  # type: ignore[method-assign]
    with pytest.raises(ballast.RunRewound, match="rewound to step 2 "):
        optimizer.state_dict()
    assert optimizer.state_dict()["ballast"]["step"] == 2


def test_a_trainer_whose_rank_was_taken_has_none(adamw: AdamW) -> None:
    """The other's next step may be under way."""
    model, other = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters())
    train(model, optimizer, range(1))
    adamw(other.named_parameters(), takeover=True, weights="server")
    with pytest.raises(ballast.RunFenced):
        until(lambda: optimizer.state_dict() is None)


@pytest.mark.parametrize("changed_weights", [None, "upload"])
def test_a_run_that_was_begun_anew_under_its_name_is_another(adamw: AdamW, changed_weights: Any) -> None:
    """At the same step, and of the same generation: what was saved of the first is not what the second has."""
    model, other = layered(seed=1), layered(seed=1)
    first = adamw(model.named_parameters(), lr=1e-2, **EXACT)
    train(model, first, range(2))
    kept, state = copy.deepcopy(model.state_dict()), first.state_dict()
    train(model, first, range(2, 4))
    first.close()
    second = adamw(other.named_parameters(), lr=1e-2, start_over=True, changed_weights=changed_weights, **EXACT)
    train(other, second, range(7, 9))
    other.load_state_dict(kept)
    second.load_state_dict(state)
    train(other, second, range(2, 4))
    assert same_bits(weights_of(other), weights_of(model))
