"""server="local": a daemon of the process's own, which is there when it is wanted and gone when the process is."""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from conftest import Program
from daemon import BINARY

_LONG_S = 60


class Watched:
    """A process that is no child of this one."""

    def __init__(self, pid: int):
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def over(self, seconds: float = _LONG_S) -> bool:
        """Whether it ends within that time."""
        return bool(select.select([self._descriptor], [], [], seconds)[0])

    def close(self) -> None:
        os.close(self._descriptor)


class Alone:
    """A trainer of alone.py and its daemon."""

    def __init__(self, program: Program):
        self.program = program
        assert program.hear() == "ready"
        pid, folder = self.order("daemon").split(maxsplit=1)
        self.daemon, self.folder = Watched(int(pid)), Path(folder)

    def order(self, word: str) -> str:
        self.program.go_on(word)
        return self.program.hear()

    def log(self) -> str:
        return (self.folder / "ballastd.log").read_text()

    def close(self) -> None:
        """Kills the trainer. What it leaves is for whoever asks why it was killed, until another one is started."""
        self.program.close()
        assert self.daemon.over()
        self.daemon.close()


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No daemon is named, and ballastd is on PATH. Folders of daemons are made where nobody else's are."""
    folders = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # a short name, since the sockets' are limited
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folders))
    for name in ("BALLAST_SERVER", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{BINARY.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("BALLAST_THREADS", "1")
    monkeypatch.setenv("BALLAST_MEMORY_LIMIT", "256MiB")
    yield folders
    shutil.rmtree(folders)


@pytest.fixture
def alone(path: Path, program: Callable[..., Program]) -> Iterator[Alone]:
    started = Alone(program("alone"))
    yield started
    started.close()


def unnamed(**options: Any) -> ballast.AdamW:
    return ballast.AdamW([nn.Parameter(torch.zeros(3))], run="r", **options)


def test_a_process_without_a_server_has_a_daemon_that_ends_with_it(alone: Alone) -> None:
    assert alone.order("step") == "1 APPLIED"
    assert stat.S_IMODE(alone.folder.stat().st_mode) == 0o700
    alone.program.go_on("end")
    assert alone.program.end() == 0
    assert alone.daemon.over()
    assert not alone.folder.exists()


@pytest.mark.parametrize(("device", "flags"), [(None, ["--device=cpu"]), ("auto", [])])
def test_it_computes_on_the_cpu_unless_a_variable_says_otherwise(
    device: str | None, flags: list[str], path: Path, program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device is not None:
        monkeypatch.setenv("BALLAST_DEVICE", device)
    started = Alone(program("alone"))
    command = Path(f"/proc/{started.daemon.pid}/cmdline").read_text().split("\0")
    assert [word for word in command if word.startswith("--device")] == flags
    assert f"--listen=unix:{started.folder}/grpc" in command
    started.close()


def test_optimizers_of_a_process_share_its_daemon(alone: Alone) -> None:
    assert alone.order("second") == "True"


def test_a_run_of_it_can_be_deleted(alone: Alone) -> None:
    assert alone.order("step") == "1 APPLIED"
    assert alone.order("delete") == "True"


@pytest.mark.parametrize("killed", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_when_the_process_is_killed_in_a_step(alone: Alone, killed: signal.Signals) -> None:
    assert alone.order("backward") == "open"
    alone.program.send(killed)
    assert alone.program.end() == -killed
    assert alone.daemon.over()
    assert "the end of standard input" in alone.log()


def test_what_a_killed_process_leaves_is_gone_with_the_next_daemon_and_what_lives_is_not(
    path: Path, program: Callable[..., Program]
) -> None:
    killed, living = Alone(program("alone")), Alone(program("alone"))
    assert killed.folder.parent == path and killed.folder.exists()
    killed.program.send(signal.SIGKILL)
    assert killed.program.end() == -signal.SIGKILL
    assert killed.daemon.over()
    assert os.listdir(killed.folder) == ["ballastd.log"]
    third = Alone(program("alone"))
    assert not killed.folder.exists()
    assert living.order("step") == third.order("step") == "1 APPLIED"
    for alone in (killed, living, third):
        alone.close()


def test_a_folder_of_somebody_else_stays_though_it_is_named_alike(path: Path, program: Callable[..., Program]) -> None:
    theirs = path / "ballast-soak-abcd1234" / "ballastd.log"
    theirs.parent.mkdir()
    theirs.write_text("of a daemon that was started by hand")
    Alone(program("alone")).close()
    assert theirs.exists()


def test_the_log_of_a_daemon_that_has_failed_stays(alone: Alone, path: Path, program: Callable[..., Program]) -> None:
    os.kill(alone.daemon.pid, signal.SIGTERM)  # in order, but its process wants it still
    assert alone.daemon.over()
    assert alone.order("anew") == "True"
    third = Alone(program("alone"))
    assert (alone.folder / "ballastd.log").exists()
    third.close()


def test_a_fork_that_lives_on_does_not_keep_it(alone: Alone) -> None:
    child = Watched(int(alone.order("fork")))
    alone.program.send(signal.SIGKILL)
    assert alone.program.end() == -signal.SIGKILL
    assert alone.daemon.over()
    assert not child.over(0)
    child.close()


def test_a_fork_that_ends_does_not_end_it(alone: Alone) -> None:
    assert alone.order("forked_exit") == "0"
    assert alone.order("step") == "1 APPLIED"
    assert not alone.daemon.over(0)


def test_ctrl_c_in_the_terminal_is_the_trainers_alone(alone: Alone) -> None:
    group = os.getpgid(alone.program._process.pid)
    assert alone.order("wait") == "waiting"
    os.killpg(group, signal.SIGINT)
    assert alone.program.hear() == "interrupted"
    assert os.getpgid(alone.daemon.pid) != group
    assert alone.order("step") == "1 APPLIED"


def test_one_that_was_killed_is_replaced(alone: Alone) -> None:
    os.kill(alone.daemon.pid, signal.SIGKILL)
    assert alone.daemon.over()
    assert alone.order("anew") == "True"
    alone.program.go_on("end")
    assert alone.program.end() == 0


def test_several_ranks_are_refused_and_told_what_to_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = r"server='local'.*run 'r' has 2 ranks.*`ballastd`.*server='host:7700'.*BALLAST_SERVER"
    with pytest.raises(ballast.Rejected, match=wanted):
        unnamed(rank=0, world=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ballast.Rejected, match=wanted):
        unnamed(server="local", rank=0)


def test_without_the_program_it_is_said_how_to_get_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ballast.Rejected, match="there is no ballastd: .*deploy/wheel.sh"):
        unnamed()


def test_the_packages_own_entry_point_is_not_taken_for_the_program(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = tmp_path / "ballastd"
    entry.write_text("#!/usr/bin/python3\nfrom ballast.programs import ballastd\nballastd()\n")
    entry.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ballast.Rejected, match="there is no ballastd"):
        unnamed()


def test_one_that_does_not_start_is_told_with_its_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALLAST_LIMITS_CHUNK_BYTES", "1000")
    with pytest.raises(ballast.Unavailable, match="exit code 78.*limits.chunk_bytes.*1000") as told:
        unnamed()
    log = Path(str(told.value).partition("Its log is ")[2].partition(". ")[0])
    with pytest.raises(ballast.Unavailable):
        unnamed()
    assert "1000 is not a multiple" in log.read_text()


def test_its_folder_may_be_in_one_of_any_name(
    path: Path, program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="my %41 \u00fc?#", dir="/tmp") as parent:
        monkeypatch.setenv("XDG_RUNTIME_DIR", parent)
        started = Alone(program("alone"))
        assert started.folder.parent == Path(parent)
        assert started.order("step") == "1 APPLIED"
        started.program.go_on("end")
        assert started.program.end() == 0
        assert started.daemon.over()
        assert os.listdir(parent) == []
        started.close()


def test_without_room_for_its_folder_it_is_said_what_to_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**where: str) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), where["dir"])

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(ballast.Unavailable, match="No space left on device.*TMPDIR.*server='host:port'"):
        unnamed()


def test_who_only_asks_starts_none(path: Path) -> None:
    with pytest.raises(ballast.Rejected, match="this process has started no daemon.*server='host:port'"):
        ballast.delete_run("r")
