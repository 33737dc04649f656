"""A trainer whose link was away while the others closed steps, and that is still alive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from daemon import Daemon
from models import until
from proxy import Proxy
from test_lost_rank import ALL, LOST, OTHERS, Program, Result, Team, check, outcomes

ONE, OTHER = OTHERS
# By link, not by time: the daemon keeps its place, and it keeps trying.
PATIENT: dict[str, Any] = {"rank_timeout": 600.0, "reconnect_timeout": 600.0, "transport": "grpc"}


@pytest.fixture
def link(daemon: Daemon) -> Iterator[Proxy]:
    with Proxy(daemon.server) as proxy:
        yield proxy


@pytest.fixture
def team(program: Program) -> Team:
    return Team(program)


def start(team: Team, link: Proxy, **options: Any) -> list[Result]:
    team.start(OTHERS, **{**PATIENT, **options})
    team.start([LOST], link.server, **{**PATIENT, **options})
    assert team.hear(ALL) == ["attached"] * 3
    return team.steps(ALL, 2)


def disagree(team: Team, steps: int) -> list[Result]:
    """Steps that come to nothing. ONE is in each before OTHER is: LOST may be, with which OTHER would disagree."""
    results = []
    for _ in range(steps):
        assert team.ask([ONE], "arrive") == ["arrived"]
        team.tell([ONE], "end")
        team.tell([OTHER], "step_otherwise")
        result, same = team.hear(OTHERS)
        assert result == same and (result["outcome"], result["reason"]) == ("ABORTED", "disagreement")
        results.append(result)
    return results


def test_it_hears_of_its_step_and_goes_on_with_the_one_that_is_next(team: Team, link: Proxy) -> None:
    results = start(team, link)
    assert team.ask([LOST], "arrive") == ["arrived"]
    link.leave()
    team.tell([LOST], "end")
    results += disagree(team, 3)
    link.come_back()
    assert team.hear([LOST]) == [results[2]]
    results += team.steps(ALL, 2)
    assert [outcome for outcome, _ in outcomes(results)] == ["APPLIED"] * 2 + ["ABORTED"] * 3 + ["APPLIED"] * 2
    check(team, results)


def test_so_it_does_between_two_steps(team: Team, link: Proxy) -> None:
    results = start(team, link)
    link.leave()
    results += disagree(team, 3)
    link.come_back()
    until(lambda: team.ask([LOST], "next_step") == [6])
    results += team.steps(ALL, 2)
    assert [outcome for outcome, _ in outcomes(results)] == ["APPLIED"] * 2 + ["ABORTED"] * 3 + ["APPLIED"] * 2
    check(team, results)


def test_it_gets_what_its_torn_step_has_changed(team: Team, link: Proxy) -> None:
    results = start(team, link)
    assert team.ask(ALL, "begin") == ["begun"] * 3
    assert team.ask([ONE], "await_last_layer") == ["returned"]
    link.leave()
    team.tell([ONE, LOST], "end")
    team.kill(OTHER)
    team.start([OTHER], weights="server", takeover=True, **PATIENT)
    partial, attached = team.hear([ONE, OTHER])
    assert attached == "attached"
    assert partial["outcome"] == "PARTIAL" and partial["not_applied"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    results += [partial, *disagree(team, 2)]
    link.come_back()
    assert team.hear([LOST]) == [partial]
    results += team.steps(ALL, 2)
    assert [outcome for outcome, _ in outcomes(results)] == ["APPLIED"] * 2 + ["PARTIAL"] + ["ABORTED"] * 2 + [
        "APPLIED"
    ] * 2
    check(team, results)


def test_one_that_was_left_out_says_to_start_it_again(team: Team, link: Proxy) -> None:
    results = start(team, link, rank_timeout=0.5)
    link.leave()
    results += team.steps(OTHERS, 3)
    assert outcomes(results)[2:] == [("APPLIED", [LOST])] * 3
    link.come_back()
    (said,) = team.ask([LOST], "step")
    assert said.startswith(f"Unavailable: rank {LOST} of run ") and "start this trainer again" in said
    team.start([LOST], weights="server")
    assert team.hear([LOST]) == ["attached"]
    results += team.steps(ALL, 2)
    check(team, results)
