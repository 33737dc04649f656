"""state_dict() has all of a run's state, and load_state_dict() takes it anywhere: to torch, a new run, back in the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from ballast import rank_zero
from daemon import Daemon
from models import layered, same_bits, until, weights_of
from test_moments import EXACT, RULES, difference, train

Make = Callable[..., Any]
AdamW = Callable[..., ballast.AdamW]
COMMITS = [{}, {"commit": "staged"}, {"overlap_forward": True}]


def moments_in(state_dict: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors of its state."""
    return [value for _, state in sorted(state_dict["state"].items()) for _, value in sorted(state.items())]


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


@pytest.mark.parametrize(("kind", "peer", "options"), RULES, ids=lambda value: getattr(value, "__name__", ""))
def test_torch_goes_on_from_it_and_back(make: Make, run: str, kind: Any, peer: Any, options: dict[str, Any]) -> None:
    """Fifty steps, some here, some by torch, some here: as fifty by torch alone."""
    alone, ours = layered(seed=1), layered(seed=1)
    reference = peer(alone.parameters(), **options)
    train(alone, reference, range(50))
    first = make(kind, ours.named_parameters(), **options, **EXACT)
    train(ours, first, range(20))
    theirs = peer(ours.parameters(), **options)
    theirs.load_state_dict(first.state_dict())
    first.close()
    train(ours, theirs, range(20, 35))
    again = make(kind, ours.named_parameters(), run=f"{run}-again", **options, **EXACT)
    again.load_state_dict(theirs.state_dict())
    train(ours, again, range(35, 50))
    assert difference(ours, alone) < 1e-6


def test_it_has_torchs_names_shapes_and_values(make: Make) -> None:
    ours, theirs = layered(seed=1), layered(seed=1)
    optimizer, peer = make(ballast.AdamW, ours.named_parameters(), **EXACT), torch.optim.AdamW(theirs.parameters())
    assert optimizer.state_dict()["state"] == {}
    train(ours, optimizer, range(3))
    train(theirs, peer, range(3))
    mine, wanted = optimizer.state_dict(), peer.state_dict()
    assert mine["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        assert mine["state"][index].keys() == state.keys()
        for name, value in state.items():
            assert mine["state"][index][name].dtype == value.dtype
            torch.testing.assert_close(mine["state"][index][name], value, rtol=1e-5, atol=1e-8)
    status = optimizer.run_status()
    assert (status.step, mine["ballast"]["step"], mine["ballast"]["run"]) == (3, 3, optimizer.run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_narrow_parameters_master_is_there_and_comes_back(adamw: AdamW, run: str, dtype: torch.dtype) -> None:
    model = layered(seed=1, dtype=dtype)
    optimizer = adamw(model.named_parameters(), lr=1e-3, master="split32", state="fp32")

    def step(which: nn.Module, by: Any) -> None:
        which(torch.ones(2, 8, dtype=dtype)).square().mean().backward()
        by.step()

    for _ in range(3):
        step(model, optimizer)
    state = optimizer.state_dict()
    for index, p in enumerate(model.parameters()):
        master = state["state"][index]["master"]
        assert master.dtype == torch.float32 and not torch.equal(master, p.float())
    other = twin(model)
    second = adamw(other.named_parameters(), lr=1e-3, master="split32", state="fp32", run=f"{run}-2")
    second.load_state_dict(state)
    for _ in range(3):
        step(model, optimizer)
        step(other, second)
    assert same_bits(weights_of(model), weights_of(other))
    assert all(map(torch.equal, moments_in(optimizer.state_dict()), moments_in(second.state_dict())))


@pytest.mark.parametrize("state", ["companded8", "bf16", "fp32", "flash8"])
def test_another_run_of_the_same_formats_has_the_same_bits(adamw: AdamW, run: str, state: str) -> None:
    model = layered(seed=1)
    optimizer = adamw(
        model.named_parameters(), lr=1e-2, state=state, **({"master": "fp32"} if state == "flash8" else {})
    )
    train(model, optimizer, range(10))
    given = optimizer.state_dict()
    other = twin(model)
    options = {"state": state, "seed": 5, **({"master": "fp32"} if state == "flash8" else {})}
    second = adamw(other.named_parameters(), lr=1e-2, run=f"{run}-2", **options)
    second.load_state_dict(given)
    second._starting_state.settle(second._steps.joined())
    taken = second.state_dict()
    assert taken["state"].keys() == given["state"].keys()
    assert all(map(torch.equal, moments_in(taken), moments_in(given)))
    assert same_bits(weights_of(model), weights_of(other))


def test_torchs_state_is_rounded_to_the_compressed_default(adamw: AdamW) -> None:
    """By at most a 64th of a block's largest."""
    model = layered(seed=1)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, theirs, range(10))
    optimizer = adamw(model.named_parameters(), lr=1e-2)
    optimizer.load_state_dict(theirs.state_dict())
    optimizer._starting_state.settle(optimizer._steps.joined())
    taken = optimizer.state_dict()["state"]
    for index, state in theirs.state_dict()["state"].items():
        assert taken[index]["step"] == state["step"] == 10
        for name in ("exp_avg", "exp_avg_sq"):
            assert (taken[index][name] - state[name]).abs().max() <= state[name].abs().max() / 64


@pytest.mark.parametrize("options", COMMITS, ids=str)
@pytest.mark.parametrize("weights_first", [True, False])
def test_a_rollback_in_the_middle_of_a_run(adamw: AdamW, weights_first: bool, options: dict[str, Any]) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), lr=1e-2, **EXACT, **options)
    train(model, optimizer, range(3))
    optimizer.wait()
    kept, state = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    train(model, optimizer, range(3, 6))
    optimizer.wait()
    wanted = weights_of(model)
    train(model, optimizer, range(6, 8))
    optimizer.wait()
    if weights_first:
        model.load_state_dict(kept)
    optimizer.load_state_dict(state)
    if not weights_first:
        model.load_state_dict(kept)
    train(model, optimizer, range(3, 6))
    optimizer.wait()
    assert same_bits(weights_of(model), wanted)
    assert optimizer.last_result is not None
    assert (optimizer.last_result.step, optimizer.last_result.outcome) == (11, "APPLIED"), "steps count on"
    assert optimizer.run_status().generation == 2


def test_loading_what_the_run_has_sends_nothing(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    train(model, optimizer, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(2, 3))
    state = optimizer.state_dict()
    state.pop("ballast")
    optimizer.load_state_dict(state)
    train(model, optimizer, range(3, 4))
    assert optimizer.run_status().generation == 1
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"].mul_(2)
    optimizer.load_state_dict(state)
    train(model, optimizer, range(4, 5))
    assert optimizer.run_status().generation == 2, "the token does not hide a change"


def test_back_to_the_beginning_drops_the_moments(adamw: AdamW, run: str) -> None:
    model, unbroken = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), lr=1e-2, **EXACT)
    optimizer.connect()
    optimizer._starting_state.settle(optimizer._membership.session)
    kept, state = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    train(model, optimizer, range(3))
    model.load_state_dict(kept)
    optimizer.load_state_dict(state)
    train(model, optimizer, range(3))
    train(unbroken, adamw(unbroken.named_parameters(), lr=1e-2, **EXACT, run=f"{run}-unbroken"), range(3))
    assert same_bits(weights_of(model), weights_of(unbroken))


def test_between_backward_and_step_it_is_refused(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    train(model, optimizer, range(1))
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ballast.Rejected, match="state_dict\\(\\) between backward\\(\\) and step\\(\\) of step 2"):
        optimizer.state_dict()
    optimizer.step()
    assert optimizer.state_dict()["ballast"]["step"] == 2


def test_after_close_there_is_none_to_be_had(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    train(model, optimizer, range(1))
    optimizer.close()
    with pytest.raises(ballast.Rejected, match="is closed"):
        optimizer.state_dict()


@pytest.mark.parametrize("same_daemon", [True, False])
def test_a_new_process_resumes(adamw: AdamW, run: str, same_daemon: bool) -> None:
    """From step 4, though the run has made 6: by the same daemon, or one that knows nothing of it."""
    model = layered(seed=1)
    first = adamw(model.named_parameters(), lr=1e-2, **EXACT)
    train(model, first, range(4))
    checkpoint = copy.deepcopy((model.state_dict(), first.state_dict()))
    train(model, first, range(4, 6))
    wanted = weights_of(model)
    first.close()
    with Daemon() as other:
        resumed = layered(seed=2)
        resumed.load_state_dict(checkpoint[0])
        server = {} if same_daemon else {"server": other.server}
        second = adamw(resumed.named_parameters(), lr=1e-2, **EXACT, **server)
        second.load_state_dict(checkpoint[1])
        train(resumed, second, range(4, 6))
        assert same_bits(weights_of(resumed), wanted)
        second.close()


# --- several ranks --------------------------------------------------------------------------------------------------


@pytest.fixture
def team(adamw: AdamW) -> Iterator[Callable[..., list[tuple[nn.Module, ballast.AdamW]]]]:
    def start(world: int, **options: Any) -> list[tuple[nn.Module, ballast.AdamW]]:
        models = [layered(seed=1) for _ in range(world)]
        return [
            (model, adamw(model.named_parameters(), lr=1e-2, rank=rank, world=world, **EXACT, **options))
            for rank, model in enumerate(models)
        ]

    yield start


def together(ranks: list[tuple[nn.Module, ballast.AdamW]], work: Callable[..., Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: work(*rank), ranks))


@pytest.mark.parametrize("world", [2, 8])
def test_all_ranks_roll_back_and_one_alone_saves(team: Callable[..., Any], world: int) -> None:
    ranks = team(world)
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2)))
    kept, state = copy.deepcopy(ranks[0][0].state_dict()), ranks[0][1].state_dict()
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2, 4)))
    wanted = weights_of(ranks[-1][0])

    def back(model: nn.Module, optimizer: ballast.AdamW) -> None:
        optimizer.load_state_dict(state)
        model.load_state_dict(kept)
        train(model, optimizer, range(2, 4))

    together(ranks, back)
    for model, optimizer in ranks:
        assert same_bits(weights_of(model), wanted)
        assert optimizer.last_result is not None and optimizer.last_result.step == 6


def test_a_rank_that_did_not_load_is_told(team: Callable[..., Any]) -> None:
    ranks = team(2)
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2)))
    state = ranks[0][1].state_dict()
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2, 3)))
    ranks[0][1].load_state_dict(state)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(train, *ranks[0], range(3, 4))
        until(lambda: ranks[1][1].run_status().generation == 2)
        with pytest.raises(ballast.RunRewound, match="rewound to step 3 "):
            train(*ranks[1], range(3, 4))
        train(*ranks[1], range(3, 4))
        first.result()
    assert same_bits(weights_of(ranks[0][0]), weights_of(ranks[1][0]))


def test_a_rank_that_has_begun_the_next_step_is_in_the_way(team: Callable[..., Any]) -> None:
    ranks = team(2)
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2)))
    state = ranks[0][1].state_dict()
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2, 3)))
    model, optimizer = ranks[1]
    before = optimizer.run_status().received_bytes
    model(torch.ones(2, 8)).sum().backward()
    until(lambda: optimizer.run_status().received_bytes > before)
    ranks[0][1].load_state_dict(state)
    with pytest.raises(ballast.Rejected, match="between two steps, and step 4 of run .* is open"):
        train(*ranks[0], range(3, 4))


def test_a_rank_that_waits_says_for_whom(team: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero, "_TOLD_AFTER_S", 0.0)
    monkeypatch.setattr(rank_zero, "_WAIT_S", 0.5)
    ranks = team(2)
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2)))
    state = ranks[0][1].state_dict()
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2, 3)))
    model, optimizer = ranks[1]
    optimizer.load_state_dict(state)
    with pytest.warns(UserWarning, match="rank 1 of run .* waits until rank 0 replaces the run's weights"):
        with pytest.raises(ballast.Unavailable, match="until rank 0 replaces the run's weights"):
            train(model, optimizer, range(3, 4))


# --- references -----------------------------------------------------------------------------------------------------


def test_a_reference_takes_the_same_run_there(adamw: AdamW) -> None:
    model = layered(seed=1)
    options = {"lr": 1e-2, "saved_state": "reference", "snapshots": 2, "snapshot_every": 2}
    optimizer = adamw(model.named_parameters(), **options)
    train(model, optimizer, range(2))
    at_two, kept = optimizer.state_dict(), weights_of(model)
    assert at_two["state"] == {} and at_two["ballast"]["step"] == 2
    optimizer.load_state_dict(at_two)
    assert optimizer.run_status().rewinds == 0, "it is there"
    train(model, optimizer, range(2, 3))
    at_three = optimizer.state_dict()
    train(model, optimizer, range(3, 4))
    wanted = weights_of(model)
    with pytest.raises(ballast.Rejected, match="keeps snapshots of \\[2, 4\\].*saved_state='full'"):
        optimizer.load_state_dict(at_three)
    optimizer.load_state_dict(at_two)
    assert same_bits(weights_of(model), kept)
    train(model, optimizer, range(2, 4))
    assert same_bits(weights_of(model), wanted)


def test_a_reference_is_of_its_own_run(adamw: AdamW, run: str) -> None:
    model, other = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), saved_state="reference")
    train(model, optimizer, range(1))
    with pytest.raises(ballast.Rejected, match=f"refers to step 1 of run '{run}'"):
        adamw(other.named_parameters(), run=f"{run}-2").load_state_dict(optimizer.state_dict())
    with pytest.raises(ballast.Rejected, match="saved_state='token'"):
        adamw(other.named_parameters(), run=f"{run}-3", saved_state="token")


def test_ranks_follow_a_reference(team: Callable[..., Any]) -> None:
    ranks = team(2, saved_state="reference", snapshots=2, snapshot_every=2)
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2)))
    state, kept = ranks[1][1].state_dict(), weights_of(ranks[0][0])
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2, 3)))
    together(ranks, lambda model, optimizer: optimizer.load_state_dict(state))
    assert all(same_bits(weights_of(model), kept) for model, _ in ranks)
    together(ranks, lambda model, optimizer: train(model, optimizer, range(2, 4)))


# --- weights that are changed by hand ---------------------------------------------------------------------------------


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)


def test_changed_weights_are_uploaded_and_moments_kept(adamw: AdamW) -> None:
    ours, theirs = layered(seed=1), layered(seed=1)
    optimizer = adamw(ours.named_parameters(), lr=1e-2, changed_weights="upload", **EXACT)
    peer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for step in range(6):
        for model, by in ((ours, optimizer), (theirs, peer)):
            train(model, by, range(step, step + 1))
            if step % 2:
                clamp(model)
    train(ours, optimizer, range(6, 7))
    train(theirs, peer, range(6, 7))
    assert difference(ours, theirs) < 1e-6
    assert optimizer.last_result is not None and optimizer.last_result.step == 7


@pytest.mark.parametrize("world", [2, 8])
def test_all_ranks_change_weights_alike(team: Callable[..., Any], adamw: AdamW, run: str, world: int) -> None:
    ranks = team(world, changed_weights="upload")

    def work(model: nn.Module, optimizer: ballast.AdamW) -> None:
        for step in range(3):
            train(model, optimizer, range(step, step + 1))
            clamp(model)
        train(model, optimizer, range(3, 4))

    together(ranks, work)
    alone = layered(seed=1)
    work(alone, adamw(alone.named_parameters(), lr=1e-2, changed_weights="upload", run=f"{run}-alone", **EXACT))
    assert all(same_bits(weights_of(model), weights_of(ranks[0][0])) for model, _ in ranks)
    assert difference(ranks[0][0], alone) < 1e-6
