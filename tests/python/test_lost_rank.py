"""on_lost_rank="continue": steps that go on without a trainer that is lost, and with its replacement."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import layered
from team import CONTINUE, LR, MOMENTUM, WORLD, loss_of

LOST = 2
OTHERS = [0, 1]
ALL = [*OTHERS, LOST]
CLIP = 0.1

Program = Callable[..., Any]
Result = dict[str, Any]


class Team:
    """The ranks as processes. `tell` returns at once; `hear` returns the next answer of each."""

    def __init__(self, program: Program):
        self._program = program("team")

    def start(self, ranks: Sequence[int], server: str | None = None, **options: Any) -> None:
        self._order("start", ranks, server=server, options={**CONTINUE, **options})

    def tell(self, ranks: Sequence[int], what: str) -> None:
        self._order(what, ranks)

    def hear(self, ranks: Sequence[int]) -> list[Any]:
        self._order("hear", ranks)
        answers: list[Any] = json.loads(self._program.hear())
        return answers

    def ask(self, ranks: Sequence[int], what: str) -> list[Any]:
        self.tell(ranks, what)
        return self.hear(ranks)

    def kill(self, rank: int) -> None:
        self._order("kill", [rank])

    def steps(self, ranks: Sequence[int], count: int) -> list[Result]:
        """What all of them say alike of so many steps that they make together."""
        made = [self.ask(ranks, "step") for _ in range(count)]
        for results in made:
            assert all(result == results[0] for result in results), results
        return [results[0] for results in made]

    def weights(self, ranks: Sequence[int]) -> list[Tensor]:
        """The same on all of them, to the bit: what JSON holds of a float is the float."""
        told = self.ask(ranks, "weights")
        assert all(weights == told[0] for weights in told)
        return [torch.tensor(values) for values in told[0]]

    def _order(self, what: str, ranks: Sequence[int], **more: Any) -> None:
        self._program.go_on(json.dumps({"do": what, "ranks": list(ranks), **more}))


@pytest.fixture
def team(program: Program) -> Team:
    return Team(program)


def reference(results: Sequence[Result], clip: float | None) -> list[Tensor]:
    """torch's weights after these steps: each is of the mean over those that took part."""
    model: nn.Module = layered(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    for result in results:
        if result["outcome"] == "ABORTED":
            continue
        ranks = [rank for rank in ALL if rank not in result["ranks_left_out"]]
        optimizer.zero_grad()
        torch.stack([loss_of(model, result["step"], rank) for rank in ranks]).mean().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for name, parameter in model.named_parameters():
            parameter.grad = None if name in result["not_applied"] else parameter.grad
        optimizer.step()
    return [parameter.detach().flatten() for parameter in model.parameters()]


def check(team: Team, results: Sequence[Result], clip: float | None = None) -> None:
    assert [result["step"] for result in results] == list(range(1, len(results) + 1))
    for ours, theirs in zip(team.weights(ALL), reference(results, clip), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    if clip is not None:
        assert all(result["clip_coefficient"] < 1 for result in results if result["outcome"] == "APPLIED")
    assert team.ask(ALL, "close") == ["closed"] * WORLD


def outcomes(results: Sequence[Result]) -> list[tuple[str, list[int]]]:
    return [(result["outcome"], result["ranks_left_out"]) for result in results]


@pytest.mark.parametrize("clip", [None, CLIP], ids=["release", "staged"])
def test_a_trainer_that_is_killed_between_steps_is_done_without_until_it_is_replaced(
    clip: float | None, team: Team
) -> None:
    team.start(ALL, max_grad_norm=clip)
    assert team.hear(ALL) == ["attached"] * WORLD
    results = team.steps(ALL, 2)
    team.kill(LOST)
    results += team.steps(OTHERS, 3)
    team.start([LOST], max_grad_norm=clip, weights="server")
    assert team.hear([LOST]) == ["attached"]
    results += team.steps(ALL, 2)
    assert outcomes(results) == [("APPLIED", [])] * 2 + [("APPLIED", [LOST])] * 3 + [("APPLIED", [])] * 2
    check(team, results, clip)


def test_a_trainer_that_is_killed_within_a_released_step_leaves_it_partial(team: Team) -> None:
    team.start(ALL)
    assert team.hear(ALL) == ["attached"] * WORLD
    results = team.steps(ALL, 2)
    assert team.ask([LOST], "begin") == ["begun"]
    team.tell(OTHERS, "step")
    assert team.ask([LOST], "await_last_layer") == ["returned"]
    team.kill(LOST)
    partial, same = team.hear(OTHERS)
    assert partial == same and partial["not_applied"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    results += [partial, *team.steps(OTHERS, 2)]
    team.start([LOST], weights="server")
    assert team.hear([LOST]) == ["attached"]
    results += team.steps(ALL, 2)
    assert (
        outcomes(results)
        == [("APPLIED", [])] * 2 + [("PARTIAL", [])] + [("APPLIED", [LOST])] * 2 + [("APPLIED", [])] * 2
    )
    check(team, results)


def test_a_trainer_that_is_killed_within_a_staged_step_changes_nothing_by_it(team: Team) -> None:
    """Whether some of what it sent was summed, and the step is ABORTED, or not, and it goes on, depends on the hour."""
    team.start(ALL, max_grad_norm=CLIP)
    assert team.hear(ALL) == ["attached"] * WORLD
    results = team.steps(ALL, 1)
    assert team.ask([LOST], "begin") == ["begun"]
    team.kill(LOST)
    results += team.steps(OTHERS, 3)
    assert outcomes(results)[1] in [("ABORTED", []), ("APPLIED", [LOST])]
    assert outcomes(results)[2:] == [("APPLIED", [LOST])] * 2
    team.start([LOST], max_grad_norm=CLIP, weights="server")
    assert team.hear([LOST]) == ["attached"]
    results += team.steps(ALL, 2)
    assert outcomes(results)[4:] == [("APPLIED", [])] * 2
    check(team, results, CLIP)


@pytest.mark.parametrize("clip", [None, CLIP], ids=["release", "staged"])
def test_a_replacement_may_come_while_the_others_make_steps(clip: float | None, team: Team) -> None:
    """Within a step, of which in release some weights are new already, or between two: it has to take all of one step."""
    team.start(ALL, max_grad_norm=clip)
    assert team.hear(ALL) == ["attached"] * WORLD
    team.kill(LOST)
    results = team.steps(OTHERS, 1)
    assert team.ask(OTHERS, "begin") == ["begun"] * 2
    if clip is None:
        assert team.ask(OTHERS, "await_last_layer") == ["returned"] * 2
    team.start([LOST], max_grad_norm=clip, weights="server")
    team.tell([LOST], "step")
    second, same = team.ask(OTHERS, "end")
    assert second == same
    results.append(second)
    while results[-1]["ranks_left_out"]:
        results += team.steps(OTHERS, 1)
        assert len(results) < 20_000, team.hear([LOST] * 2)
    assert team.hear([LOST] * 2) == ["attached", results[-1]]
    results += team.steps(ALL, 2)
    assert outcomes(results) == [("APPLIED", [LOST])] * (len(results) - 3) + [("APPLIED", [])] * 3
    check(team, results, clip)


def test_a_replacement_waits_for_the_open_step_as_long_as_it_is_told(team: Team) -> None:
    team.start(ALL)
    assert team.hear(ALL) == ["attached"] * WORLD
    team.kill(LOST)
    results = team.steps(OTHERS, 1)
    assert team.ask(OTHERS, "begin") == ["begun"] * 2
    team.start([LOST], weights="server", join_timeout=0.5)
    (said,) = team.hear([LOST])
    assert said.startswith("Unavailable: attaching as rank 2") and "within 0.5 s" in said and "join_timeout" in said
    team.start([LOST], weights="server")
    team.tell(OTHERS, "end")
    second, same = team.hear(OTHERS)
    assert second == same
    assert team.hear([LOST]) == ["attached"]
    results += [second, *team.steps(ALL, 2)]
    assert outcomes(results) == [("APPLIED", [LOST])] * 2 + [("APPLIED", [])] * 2
    check(team, results)


def test_one_that_starts_late_knows_the_weights_that_all_begin_with_as_they_are_stored(team: Team) -> None:
    """Rounded to fewer bits; what a trainer begins with is not."""
    team.start(OTHERS, master="split24")
    assert team.hear(OTHERS) == ["attached"] * 2
    assert outcomes(team.steps(OTHERS, 1)) == [("ABORTED", [])]
    team.start([LOST], master="split24")
    assert team.hear([LOST]) == ["attached"]
    assert outcomes(team.steps(ALL, 2)) == [("APPLIED", [])] * 2
    team.weights(ALL)
    assert team.ask(ALL, "close") == ["closed"] * WORLD


def test_one_that_is_interrupted_while_it_waits_for_the_open_step_leaves_the_others_alone(
    team: Team, program: Program
) -> None:
    team.start(ALL)
    assert team.hear(ALL) == ["attached"] * WORLD
    team.kill(LOST)
    results = team.steps(OTHERS, 1)
    assert team.ask(OTHERS, "begin") == ["begun"] * 2
    late = program("late")
    for _ in range(2):
        late.go_on("connect")
        assert f"step 2 is being made without rank {LOST}" in late.hear()
        late.send(signal.SIGINT)
        assert late.hear() == "interrupted"
    second, same = team.ask(OTHERS, "end")
    assert second == same
    results += [second, *team.steps(OTHERS, 2)]
    assert outcomes(results) == [("APPLIED", [LOST])] * 4
    late.go_on("connect")
    assert late.hear() == "connected"
    late.go_on("step")
    assert team.steps(OTHERS, 1)[0]["ranks_left_out"] == []
    assert late.hear() == "step 5 APPLIED"


def test_one_that_starts_late_is_awaited(team: Team) -> None:
    """It brings the weights that all begin with, and would be refused once they are others."""
    team.start(OTHERS)
    assert team.hear(OTHERS) == ["attached"] * 2
    results = team.steps(OTHERS, 2)
    assert outcomes(results) == [("ABORTED", [])] * 2
    assert "no process has attached to rank 2 yet" in results[-1]["detail"]
    team.start([LOST])
    assert team.hear([LOST]) == ["attached"]
    results += team.steps(ALL, 2)
    assert outcomes(results)[2:] == [("APPLIED", [])] * 2
    check(team, results)
