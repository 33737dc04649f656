"""A run that is to grow, and what keeps it from that: what is refused, ranks that disagree, and processes that are lost."""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from ballast import rank_zero
from models import layered, same_bits, until, weights_of
from test_growth import OPTIONS, grow, same_state, settle, stored, team, together
from test_moments import EXACT, difference, train

AdamW = Callable[..., ballast.AdamW]


def test_a_group_is_not_added_while_a_step_is_open(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model[:2].parameters())
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ballast.Rejected, match="step 1 is open: call step\\(\\) before add_param_group"):
        optimizer.add_param_group({"params": model[2].parameters()})
    optimizer.step()
    optimizer.add_param_group({"params": model[2].parameters()})
    train(model, optimizer, range(1))


def test_a_format_that_the_rule_does_not_have_is_refused_and_set_back(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), state="fp32", master="fp32")
    train(model, optimizer, range(1))
    for option, value, why in (
        ("master", "mcf", "rule adamw is not built for master mcf"),
        ("state", "int4", "int4"),
    ):
        kept, optimizer.param_groups[0][option] = optimizer.param_groups[0][option], value
        with pytest.raises(ballast.Rejected, match=why):
            train(model, optimizer, range(1))
        optimizer.param_groups[0][option] = kept
    train(model, optimizer, range(1))
    assert optimizer.last_result is not None and optimizer.last_result.step == 2
    assert optimizer.run_status().generation == 1


def test_what_is_unfrozen_within_a_step_is_named(adamw: AdamW) -> None:
    model = layered(seed=1)
    model[0].requires_grad_(False)
    optimizer = adamw(model.named_parameters(), gradient_accumulation_steps=2)
    model(torch.ones(2, 8)).sum().backward()
    model[0].requires_grad_(True)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ballast.Rejected, match="'0.weight' has a gradient in step 1, and was frozen, or in no group"):
        optimizer.step()


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_switch_that_stands_for_a_peak_does_not_change(adamw: AdamW, decoupled: bool) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), decouple_lr=not decoupled)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["decouple_lr"] = decoupled
    with pytest.raises(
        ballast.Rejected, match=r"decouple_lr of param_groups\[0\] changed.*set it back, and set lr_peak"
    ):
        train(model, optimizer, range(1))


def test_weights_that_are_not_finite_are_not_added(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model[:2].parameters())
    train(model, optimizer, range(1))
    added = nn.Parameter(torch.tensor([1.0, float("nan")]))
    optimizer.add_param_group({"params": added})
    with pytest.raises(ballast.Rejected, match="the weights of 'param.4' hold a NaN.*nothing was sent"):
        train(model, optimizer, range(1))
    assert optimizer.run_status().generation == 1
    added.data.zero_()
    train(model, optimizer, range(1))
    assert optimizer.run_status().steps_applied == 2


def test_before_the_first_step_ranks_do_not_change_the_run(adamw: AdamW) -> None:
    """Some may still compare their weights with those of rank 0."""
    ranks = team(adamw, 2)
    for _, optimizer in ranks:
        optimizer.connect()
        optimizer.param_groups[0]["eps"] = 1e-4
    for model, optimizer in ranks:
        with pytest.raises(
            ballast.Rejected, match="eps of .* after connect.. and before the first step of rank . of 2"
        ):
            train(model, optimizer, range(1))
        optimizer.param_groups[0]["eps"] = 1e-8
        model.zero_grad()
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2)))
    assert ranks[0][1].run_status().generation == 1


def test_the_same_description_in_other_words_ends_no_session(adamw: AdamW) -> None:
    ranks = team(adamw, 2)
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2)))
    for _, optimizer in ranks:
        session = optimizer._membership.session
        assert session is not None
        same = json.dumps({**json.loads(session.description.spec), "accumulation": 1})
        assert same != session.description.spec
        assert session.amend(replace(session.description, spec=same), {}) is session
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2, 3)))
    assert ranks[1][1].run_status().generation == 1


# --- interrupts -----------------------------------------------------------------------------------------------------


class Interrupted:
    """A client. The first call of this name is interrupted, before it or after it."""

    def __init__(self, target: Any, name: str, after: bool, by: BaseException | None = None):
        self._target = target
        self._name = name
        self._after = after
        self._by = by or KeyboardInterrupt()
        self._due = True

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name != self._name or not self._due:
            return found

        def call(*args: Any) -> None:
            self._due = False
            if self._after:
                found(*args)
            raise self._by

        return call


POINTS = [("amend_run", False), ("amend_run", True), ("attach", False), ("load_weights", False), ("load_weights", True)]
POINTS += [("bind_weights", False)]


def interrupt(optimizer: ballast.AdamW, name: str, after: bool) -> None:
    session = optimizer._membership.session
    assert session is not None
    session._client = Interrupted(session._client, name, after)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        settle(optimizer)


@pytest.mark.parametrize(("name", "after"), POINTS)
def test_what_was_interrupted_goes_on_with_the_next_backward(adamw: AdamW, name: str, after: bool) -> None:
    (model, optimizer), theirs = team(adamw, 1)[0], layered(seed=1)
    peer = torch.optim.AdamW(theirs[1:].parameters(), **OPTIONS)
    train(model, optimizer, range(2))
    train(theirs, peer, range(2))
    for grown in (model, theirs):
        grown.zero_grad()  # of the layer that the optimizers have not yet
    grow(model, optimizer)
    grow_as_torch(theirs, peer)
    interrupt(optimizer, name, after)
    try:
        train(model, optimizer, range(2, 3))
    except ballast.RunRewound as rewound:  # the upload has ended the session, and nobody was there to hear of it
        assert (name, after, rewound.step) == ("load_weights", True, 2)
        train(model, optimizer, range(2, 3))
    train(model, optimizer, range(3, 5))
    train(theirs, peer, range(2, 5))
    assert difference(model, theirs) < 1e-6
    assert optimizer.run_status().step == 5


def grow_as_torch(model: nn.Sequential, peer: torch.optim.Optimizer) -> None:
    peer.add_param_group({"params": model[0].parameters(), "lr": 0.02})
    peer.param_groups[0]["eps"] = 1e-4


@pytest.mark.parametrize(("name", "after"), POINTS)
def test_a_checkpoint_after_an_interrupt_is_whole_or_refused(adamw: AdamW, name: str, after: bool) -> None:
    model, optimizer = team(adamw, 1)[0]
    train(model, optimizer, range(2))
    before = stored(optimizer)
    grow(model, optimizer)
    interrupt(optimizer, name, after)
    lacking = "has added 2 tensors, from 'new.weight' on, that have no weights yet"
    refusals = {("amend_run", True): lacking, ("attach", False): lacking, ("load_weights", True): "rewound to step 2 "}
    refusal = refusals.get((name, after))
    if refusal is None:
        assert same_state(stored(optimizer), before)
    else:
        with pytest.raises(ballast.BallastError, match=refusal):
            stored(optimizer)


# --- processes that come back -----------------------------------------------------------------------------------------


def test_a_trainer_that_gives_all_at_once_goes_on(adamw: AdamW) -> None:
    """The run has what was added behind the rest, whatever the order here."""
    model = layered(seed=1)
    model[0].requires_grad_(False)
    first = adamw(model.named_parameters(), **OPTIONS, **EXACT)
    train(model, first, range(2))
    model[0].requires_grad_(True)
    train(model, first, range(2, 4))
    wanted = stored(first)
    first.close()
    second = adamw(model.named_parameters(), weights="match", **OPTIONS, **EXACT)
    second.connect()
    assert same_state(stored(second), wanted)
    train(model, second, range(4, 5))
    assert second.last_result is not None and second.last_result.step == 5


def test_a_trainer_that_is_killed_in_the_middle_of_it_is_replaced_from_a_checkpoint(
    adamw: AdamW, admin: Any, run: str, program: Callable[..., Any], tmp_path: Path
) -> None:
    """The run has the new tensors, and their weights have not come."""
    saved = tmp_path / "checkpoint"
    killed = program("growing")
    killed.go_on(str(saved))
    assert killed.hear() == "saved"
    assert killed.end() == -signal.SIGKILL
    status = admin.get_run(run)["status"]
    assert (status["step"], status["weights_loaded"]) == (3, False)
    model, theirs = layered(seed=2), layered(seed=1)
    weights, state = torch.load(saved, weights_only=True)
    model.load_state_dict(weights)
    groups = [
        {"params": model[1:].named_parameters(), "eps": 1e-4},
        {"params": model[0].named_parameters(prefix="new"), "lr": 0.02},
    ]
    optimizer = adamw(groups, **OPTIONS, **EXACT, takeover=True)
    with pytest.raises(ballast.Rejected, match="It lacks those of what was added: load_state_dict.. of a checkpoint"):
        train(model, optimizer, range(3, 4))
    model.zero_grad()
    options = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({**state, "param_groups": options})
    train(model, optimizer, range(3, 5))
    peer = torch.optim.AdamW(theirs[1:].parameters(), **OPTIONS)
    train(theirs, peer, range(3))
    theirs[0].zero_grad()
    grow_as_torch(theirs, peer)
    train(theirs, peer, range(3, 5))
    assert difference(model, theirs) < 1e-6


def test_a_session_that_ends_before_its_stream_is_there_is_made_again(adamw: AdamW) -> None:
    """Rank 0 has uploaded meanwhile what was added."""
    model, optimizer = team(adamw, 1)[0]
    train(model, optimizer, range(2))
    grow(model, optimizer)
    session = optimizer._membership.session
    assert session is not None
    ended = ballast.RunRewound("rewound to step 2 ", step=2)
    session._client = Interrupted(session._client, "attach", False, ended)  # type: ignore[assignment]
    train(model, optimizer, range(2, 3))
    assert optimizer.last_result is not None and optimizer.last_result.step == 3


def test_options_that_were_kept_before_a_group_was_added_come_back(adamw: AdamW) -> None:
    model = layered(seed=1)
    found: list[int] = []
    first = adamw(model[1:].named_parameters(), **OPTIONS, **EXACT)
    first.register_client_state("count", lambda: 7, found.append)
    first.connect()
    train(model, first, range(1))
    first.param_groups[0]["lr"] = 0.5
    train(model, first, range(1, 2))
    first.param_groups[0]["lr"] = 0.1
    first.add_param_group({"params": model[0].named_parameters(prefix="new"), "lr": 0.02})
    settle(first)
    first.close()
    groups = [{"params": model[1:].named_parameters()}, {"params": model[0].named_parameters(prefix="new"), "lr": 0.02}]
    second = adamw(groups, **OPTIONS, **EXACT, weights="match")
    second.register_client_state("count", lambda: 7, found.append)
    assert second.connect() and found == [7]
    assert [group["lr"] for group in second.param_groups] == [0.5, 0.02]


# --- ranks that disagree ----------------------------------------------------------------------------------------------


def test_a_rank_that_does_not_make_the_change_is_told_and_may_make_it(adamw: AdamW) -> None:
    ranks = team(adamw, 2)
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2)))
    grow(*ranks[0])
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(train, *ranks[0], range(2, 4))
        until(lambda: ranks[1][1].run_status().generation == 3)
        with pytest.raises(
            ballast.Rejected, match="has another description than rank 1 goes by.*Make the same change on every rank"
        ):
            train(*ranks[1], range(2, 3))
        ranks[1][0].zero_grad()
        grow(*ranks[1])
        train(*ranks[1], range(2, 4))
        first.result()
    assert same_bits(weights_of(ranks[0][0]), weights_of(ranks[1][0]))


def test_a_rank_that_makes_another_change_is_told(adamw: AdamW) -> None:
    ranks = team(adamw, 2)
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2)))
    grow(*ranks[0])
    ranks[1][1].param_groups[0]["eps"] = 1e-3
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(settle, ranks[0][1])
        with pytest.raises(ballast.Rejected, match="rank 1 changes run .* otherwise than rank 0.*asked for is"):
            train(*ranks[1], range(2, 3))
        first.result()


def test_a_rank_that_waits_says_for_whom(adamw: AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero, "_TOLD_AFTER_S", 0.0)
    monkeypatch.setattr(rank_zero, "_WAIT_S", 0.5)
    ranks = team(adamw, 2)
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2)))
    grow(*ranks[1])
    with pytest.warns(UserWarning, match="rank 1 of run .* waits until rank 0 has made the same change to the run"):
        with pytest.raises(ballast.Unavailable, match="until rank 0 has made the same change .*make that change"):
            train(*ranks[1], range(2, 3))


def test_a_rank_whose_weights_are_the_runs_no_more_follows_it(adamw: AdamW, admin: Any, run: str) -> None:
    """It waits for what rank 0 adds, and another process takes that rank and brings a checkpoint."""
    ranks = team(adamw, 2)
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2)))
    weights, state = copy.deepcopy(ranks[0][0].state_dict()), ranks[0][1].state_dict()
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2, 4)))
    for model, optimizer in ranks:
        grow(model, optimizer)
    interrupt(ranks[0][1], "load_weights", after=False)
    ranks[0][1].close()
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(train, *ranks[1], range(4, 5))
        until(lambda: any(rank.startswith("rank 1: ") for rank in admin.get_run(run)["status"]["ranks"]))
        model = layered(seed=1)
        model.load_state_dict(weights)
        groups = [
            {"params": model[1:].named_parameters(), "eps": 1e-4},
            {"params": model[0].named_parameters(prefix="new"), "lr": 0.02},
        ]
        another = adamw(groups, **OPTIONS, **EXACT, rank=0, world=2)
        options = another.state_dict()["param_groups"]
        another.load_state_dict({**state, "param_groups": options})
        goes_on = pool.submit(train, model, another, range(4, 5))
        with pytest.raises(ballast.RunRewound, match="has other weights, at step 4, than rank 1 had"):
            waits.result()
        ranks[1][0].zero_grad()
        train(*ranks[1], range(4, 5))
        goes_on.result()
    assert same_bits(weights_of(ranks[1][0]), weights_of(model))
    assert same_state(stored(another), stored(ranks[1][1]))
