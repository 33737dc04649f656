"""What framework_loops.py tells of its loops, and whether two accounts of one loop are the same."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from daemon import ROOT, plain_environment
from nursery import Nursery

PYTHON = ROOT / "build" / "frameworks-venv" / "bin" / "python"


SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
PATIENCE_S = 280


@functools.cache
def nursery() -> Nursery:
    """Of all tests: framework_loops.py, when it has imported the frameworks. It ends when this process does."""
    assert PYTHON.exists(), f"{PYTHON} is missing: run deploy/setup.sh frameworks"
    settings = [f"{name}={value}" for name, value in SETTINGS.items()]
    return Nursery("env", *settings, PYTHON, ROOT / "tests" / "e2e" / "framework_loops.py")


def told_by(
    kind: str, loops: list[str], folder: Path, *more: str, variables: dict[str, str] | None = None
) -> dict[str, Any]:
    """What a process of its own told of these loops, which had more variables in its environment."""
    environment = {**plain_environment(), **SETTINGS, **(variables or {})}
    child = nursery().start(kind, str(folder), *loops, *more, environment=environment)
    timer = threading.Timer(PATIENCE_S, child.send_signal, [signal.SIGKILL])
    timer.start()
    said = child.stdout.read()
    code = child.wait(PATIENCE_S)
    timer.cancel()
    child.close()
    assert code == 0, f"exit code {code}: {said[-2000:]}"
    told: dict[str, Any] = json.loads(said.splitlines()[-1])
    return told


def ask(program: str, *arguments: str) -> dict[str, Any]:
    """The object that a program of this folder prints at its end, run with the frameworks."""
    command = [PYTHON, ROOT / "tests" / "e2e" / program, *arguments]
    environment = {**plain_environment(), **SETTINGS}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def compare(loop: str, ours: dict[str, Any], theirs: dict[str, Any], int8: bool = False) -> None:
    """Losses, logged norms and rates, and weights at the end: those of torch's optimizer. int8: of layers that compute so,
    where a last bit of fp32 may be a code."""
    assert "refused" not in ours, ours["refused"]
    # torch's own AdamW ends up to 5e-6 of a weight from its result in double (tests/bench/open_loop.py). Forwards in bf16
    # round what differs in the last bit of fp32 to what differs in the last of bf16.
    in_bf16 = loop.endswith("bf16")
    near = 2e-3 if in_bf16 or int8 else 5e-6
    assert len(theirs["losses"]) >= 10
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=near, nan_ok=True)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=10 * near)
    assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-12)
    assert ours["ends"].keys() == theirs["ends"].keys()
    for parameter, (total, largest) in ours["ends"].items():
        of_end = {"rel": 0.02, "abs": 0.1} if int8 else {"rel": 5e-5, "abs": 5e-6}
        assert in_bf16 or [total, largest] == pytest.approx(theirs["ends"][parameter], **of_end), parameter
