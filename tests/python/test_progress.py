"""What is said of long waits, on a terminal and elsewhere."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ballast
from ballast import progress
from models import layered, until

MIB = 2**20


class Terminal:
    """stderr as a terminal that keeps what is written."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


class Bar:
    """tqdm, as far as it is used. `bars`: all that were made."""

    bars: list[Bar] = []

    def __init__(self, **options: Any):
        self.options, self.n, self.closed = options, 0, False
        Bar.bars.append(self)

    def update(self, more: int) -> None:
        self.n += more

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after seconds comes at once."""
    for name in ("_BAR_AFTER_S", "_BAR_EVERY_S", "_LINE_AFTER_S"):
        monkeypatch.setattr(progress, name, 0.001)


def bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    """tqdm is installed, and stderr is a terminal. In the test itself: before it, pytest puts a stderr of its own there."""
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    monkeypatch.setattr(sys, "stderr", Terminal())
    Bar.bars = []
    return Bar.bars


def test_a_bar_on_a_terminal_follows_what_has_moved(hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = bars_on_a_terminal(monkeypatch)
    moved = 0
    with progress.Transfer("pulling weights of run 'r'", 3 * MIB, lambda: moved):
        until(lambda: bool(bars))
        moved = MIB
        until(lambda: bars[0].n == MIB)
        moved = 5 * MIB  # a part came twice
        until(lambda: bars[0].n == 3 * MIB)
    assert bars[0].closed and bars[0].options["total"] == 3 * MIB
    assert "pulling weights of run 'r'" in bars[0].options["desc"]


def test_lines_elsewhere(hasty: None, capsys: pytest.CaptureFixture[str]) -> None:
    asked = threading.Event()

    def moved() -> int:
        asked.set()
        return MIB

    with progress.Transfer("uploading weights of run 'r'", 4 * MIB, moved):
        assert asked.wait(60)
    assert "ballast: uploading weights of run 'r': 1 of 4 MiB, 25 %" in capsys.readouterr().err


def test_lines_on_a_terminal_without_tqdm(hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.Transfer("pulling", MIB, lambda: 0):
        until(lambda: "ballast: pulling: 0 of 1 MiB" in terminal.text)


def test_a_wait_without_a_count_is_said_in_lines_on_a_terminal_too(
    hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = bars_on_a_terminal(monkeypatch)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.Waiting("waiting for the disk"):
        until(lambda: "ballast: waiting for the disk (" in terminal.text)
    assert bars == []


def test_nothing_is_said_of_what_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.Transfer("pulling", MIB, lambda: MIB):
        pass
    progress.Patience(lambda: "waiting").look()
    assert capsys.readouterr().err == ""


def test_an_exception_goes_through() -> None:
    with pytest.raises(KeyError), progress.Transfer("pulling", MIB, lambda: 0):
        raise KeyError


def test_a_wait_that_is_interrupted_as_it_begins_is_told_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is heard while the thread starts that would tell of it."""
    start, started = threading.Thread.start, []

    def interrupted(self: threading.Thread) -> None:
        start(self)
        started.append(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", interrupted)
        with progress.Transfer("pulling", MIB, lambda: 0):
            pass
    assert len(started) == 1
    until(lambda: not started[0].is_alive())


def test_lines_of_a_wait_come_at_longer_and_longer_intervals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(progress, "monotonic", lambda: now)
    patience = progress.Patience(lambda: "waiting for step 3")
    said = []
    for now in (105.0, 110.0, 115.0, 120.0, 130.0, 140.0):
        patience.look()
        said.append(capsys.readouterr().err)
    assert said == [
        "",
        "ballast: waiting for step 3 (10 s so far)\n",
        "",
        "ballast: waiting for step 3 (20 s so far)\n",
        "",
        "ballast: waiting for step 3 (40 s so far)\n",
    ]


def test_what_is_uploaded_and_pulled_is_counted(adamw: Callable[..., ballast.AdamW]) -> None:
    layers = layered(seed=1)
    size = sum(parameter.nbytes for parameter in layers.parameters())
    optimizer = adamw(layers.named_parameters())
    layers(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    client = optimizer._membership.connected()
    assert client.moved == size, "of the upload"
    optimizer.pull()
    assert client.moved == size, "of the pull"
