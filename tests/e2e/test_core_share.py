"""A benchmark's daemon is held to a share of a core, or it is said that the kernel does not do it here."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from daemon import ROOT

sys.path.append(str(ROOT / "tests" / "bench"))

import core_share  # noqa: E402
import several_daemons  # noqa: E402
from turns import TICK, process_seconds  # noqa: E402

SHARE = 0.2
BUSY = """
import hashlib, threading
def spin():
    while True:
        hashlib.sha256(bytes(1 << 20))  # without Python's lock
for _ in range(2):
    threading.Thread(target=spin).start()
"""


def test_all_threads_together_use_their_share_at_most() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY]) as busy:
        try:
            with core_share.held(busy.pid, SHARE):
                group = core_share.group_of(busy.pid)
                assert group.joinpath("cgroup.procs").read_text().split() == [str(busy.pid)]
                used, began = process_seconds(busy.pid), time.monotonic()
                with pytest.raises(subprocess.TimeoutExpired):
                    busy.wait(1)
                assert process_seconds(busy.pid) - used <= SHARE * (time.monotonic() - began) + 3 * TICK
            assert not group.exists()
        except core_share.CannotHold as error:
            pytest.skip(str(error))
        finally:
            busy.kill()


def test_a_machine_that_holds_nobody_is_told_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(core_share, "hierarchy", lambda: (Path("/proc"), 1))  # where no folder can be made
    with ExitStack() as stack:
        assert not several_daemons.hold(stack, [SimpleNamespace(process=SimpleNamespace(pid=1))])
    assert "NOT MEASURED, daemons that are held to 0.2 of a core: " in capsys.readouterr().err


def test_the_hierarchy_has_the_controller_that_is_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory pids\n")
    mounts = f"cgroup2 {tmp_path} cgroup2 rw 0 0\ncgroup /c/memory cgroup rw,memory 0 0\n"
    monkeypatch.setattr(core_share, "MOUNTS", tmp_path / "mounts")
    core_share.MOUNTS.write_text(mounts)
    with pytest.raises(core_share.CannotHold, match="no cgroup hierarchy with the controller cpu"):
        core_share.hierarchy()
    core_share.MOUNTS.write_text(mounts + "cgroup /c/cpu cgroup rw,cpu,cpuacct 0 0\n")
    assert core_share.hierarchy() == (Path("/c/cpu"), 1)
    core_share.MOUNTS.write_text(mounts)
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    assert core_share.hierarchy() == (tmp_path, 2)
