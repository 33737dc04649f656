"""One daemon for all tests, a run of its own for each."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ballast
from ballast import _core, open_optimizers
from daemon import BINARY, Daemon, Daemons
from nursery import Nursery, settle

if TYPE_CHECKING:
    from fake_follow import FakeFollow
    from followed_net import Net

_numbers = itertools.count(1)
# What takes longest begins first, so that it is not left alone at the end: tests/run.sh runs files side by side.
LONGEST = (
    "lost_rank",
    "fsdp",
    "local_daemon",
    "late_rank",
    "crashes",
    "follow_restart",
    "lives",
    "power",
    "convert",
    "restart",
    "convert_memory",
    "types",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--daemons", type=int, default=1, help="on how many daemons the tests' runs are")


def pytest_sessionstart() -> None:
    if not BINARY.exists():
        pytest.exit(f"{BINARY} is missing: build it (cmake --build --preset dev), or set BALLASTD", returncode=2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _frozen() -> None:
    """Garbage is looked for in what tests make, and not in what was imported for them, each time anew."""
    settle()


@pytest.fixture(scope="session")
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon | Daemons]:
    count = request.config.getoption("--daemons")
    with Daemon() if count == 1 else Daemons(count) as started:
        yield started


@pytest.fixture(scope="session")
def admin(daemon: Daemon) -> Iterator[_core.Client]:
    client = _core.Client.connect(daemon.server, 60.0, 60.0)
    yield client
    client.close()


@pytest.fixture
def run(admin: _core.Client) -> Iterator[str]:
    """A run that no other test has. It and all runs whose names begin with its own are gone afterwards."""
    name = f"test-{next(_numbers)}x"
    yield name
    for status in admin.list_runs()["runs"]:
        if status["run_id"].startswith(name):
            admin.delete_run(status["run_id"], force=True)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeFollow]:
    """A daemon whose run "r" has the weights of `net`, at step 0."""
    from fake_follow import FakeFollow  # gRPC's own package, which few tests need
    from followed_net import weights_at

    with FakeFollow(tmp_path, weights_at(0)) as daemon:
        yield daemon


@pytest.fixture
def net() -> Net:
    from followed_net import Net

    return Net()


@pytest.fixture
def none_open() -> None:
    """No optimizer is open in this process: those that other tests have forgotten, open as they were, are closed."""
    open_optimizers.close_unreachable()
    assert not [one.run for one in open_optimizers._open]


@pytest.fixture
def adamw(daemon: Daemon, run: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ballast.AdamW]]:
    """ballast.AdamW on the tests' daemon and this test's run, closed at the end."""
    with _maker(daemon, run, monkeypatch) as make:
        yield lambda *args, **kwargs: make(ballast.AdamW, *args, **kwargs)


@pytest.fixture
def make(daemon: Daemon, run: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """The same for any of the optimizers: make(ballast.SGD, parameters, lr=...)."""
    with _maker(daemon, run, monkeypatch) as maker:
        yield maker


@contextmanager
def _maker(daemon: Daemon, run: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("BALLAST_SERVER", daemon.server)
    monkeypatch.setenv("BALLAST_RUN", run)
    made: list[ballast.Optimizer] = []

    def make(kind: Callable[..., ballast.Optimizer], *args: Any, **kwargs: Any) -> ballast.Optimizer:
        made.append(kind(*args, **kwargs))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.close()


@functools.cache
def nursery() -> Nursery:
    """Of all tests. It ends when this process does."""
    return Nursery(sys.executable, Path(__file__).with_name("trainer.py"))


class Program:
    """A function of trainer.py as a process."""

    def __init__(self, *words: str):
        self._process = nursery().start(*words)

    def hear(self) -> str:
        return self._process.stdout.readline().strip()

    def ask(self, order: Any) -> Any:
        """What it answers, each as JSON on a line."""
        self.go_on(json.dumps(order))
        return json.loads(self.hear())

    def go_on(self, word: str = "") -> None:
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def send(self, signal: int) -> None:
        self._process.send_signal(signal)

    def end(self) -> int:
        return self._process.wait(timeout=120)

    def close(self) -> None:
        """Ends it, and the processes that it left: they would hold its pipes open."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.close()


def kept(name: str) -> Any:
    """A fixture of a module: a program that makes one case after another, so that torch is imported once."""

    @pytest.fixture(scope="module")
    def kept_program(daemon: Daemon) -> Iterator[Program]:
        program = Program(name, daemon.server, "")
        yield program
        program.close()

    return kept_program


@pytest.fixture
def program(daemon: Daemon, run: str) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(name: str, server: str = daemon.server, run: str = run) -> Program:
        started.append(Program(name, server, run))
        return started[-1]

    yield start
    for one in started:
        one.close()
