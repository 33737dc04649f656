"""Names that no daemon can hear: a string of Python may hold surrogates, as os.fsdecode() makes them of a name's odd bytes. And
those that a terminal would obey."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ballast
from ballast.progress import say
from daemon import Daemon

ODD = "a\udcff"


def test_what_is_no_text_is_refused_by_the_option(daemon: Daemon, run: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "run": lambda: ballast.delete_run(ODD, server=daemon.server),
        "server": lambda: ballast.delete_run(run, server=ODD),
        "at": lambda: ballast.Subscriber(daemon.server, run, at=ODD),
        "format": lambda: ballast.Subscriber(daemon.server, run, format=ODD),
    }
    for option, call in calls.items():
        with pytest.raises(ballast.Rejected, match=f"{option}='a.udcff': it holds a surrogate") as refused:
            call()
        assert refused.value.code == "INVALID_ARGUMENT"
    with pytest.raises(ballast.Rejected, match="run=None: it must be a string"):
        ballast.delete_run(None, server=daemon.server)  # type: ignore[arg-type]


def test_a_versions_name_that_is_no_text_is_refused(adamw: Callable[..., ballast.AdamW]) -> None:
    w = nn.Parameter(torch.ones(8))
    optimizer = adamw([("w", w)], follow=ballast.Follow(tags=2))
    w.sum().backward()
    optimizer.step()
    for call in (optimizer.tag, optimizer.untag):
        with pytest.raises(ballast.Rejected, match="name='a.udcff': it holds a surrogate"):
            call(ODD)
    assert optimizer.tags() == {}


def test_what_a_terminal_would_obey_is_shown_by_its_number(
    adamw: Callable[..., ballast.AdamW], run: str, daemon: Daemon, capfd: pytest.CaptureFixture[str]
) -> None:
    w = nn.Parameter(torch.ones(8))
    optimizer = adamw([("w\x1b[2J\x9b31m\u202e", w)], follow=True)
    w.sum().backward()
    optimizer.step()
    with pytest.raises(ballast.Rejected) as refused:
        ballast.follow(nn.Linear(2, 2), server=daemon.server, run=run)
    assert r"w\x1b[2J\x9b31m\u202e" in str(refused.value)
    assert str(refused.value).isprintable()
    say("w\x1b[2J")
    assert capfd.readouterr().err.endswith("ballast: w\\x1b[2J\n")
