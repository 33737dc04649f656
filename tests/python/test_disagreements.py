"""Ranks that give different values in step after step."""

from __future__ import annotations

from typing import Any

import pytest

from test_lost_rank import Program, Team

BOTH = ONE, OTHER = [0, 1]


@pytest.fixture
def team(program: Program) -> Team:
    return Team(program)


def disagree(team: Team) -> list[Any]:
    team.tell([ONE], "step")
    team.tell([OTHER], "step_otherwise")
    return team.hear(BOTH)


def test_a_loop_that_would_disagree_for_ever_ends_on_every_rank(team: Team) -> None:
    team.start(BOTH, world=2)
    assert team.hear(BOTH) == ["attached"] * 2
    for _ in range(2):  # the tenth in a row is too many; one that agrees begins the count anew
        for _ in range(9):
            result, same = disagree(team)
            assert result == same and result["reason"] == "disagreement"
        assert team.steps(BOTH, 1)[0]["outcome"] == "APPLIED"
    for _ in range(9):
        disagree(team)
    said = disagree(team)
    assert said[0] == said[1]
    assert "Rejected: the last 10 steps of run '" in said[0] and "lr = " in said[0]
