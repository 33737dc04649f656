"""What `ballastctl doctor` and `ballastctl runs` say of a daemon, which a test may play in this process."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from daemon import BINARY, Daemon
from fake_follow import messages

BALLASTCTL = BINARY.parents[1] / "client" / "cpp" / "ballastctl"
FAILED, RELAYED = 3, 6


def handler(answer: Any, request: Any) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(
        lambda request, context: answer,
        request_deserializer=request.FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )


@contextmanager
def played(tmp_path: Path, **run: Any) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """A daemon with this one run; yields how ballastctl is called of it."""
    message = messages(tmp_path)
    there, runs = message("GetServerResponse")(), message("ListRunsResponse")()
    there.state, there.device, there.max_runs, there.protocol_min, there.protocol_max = "serving", "cuda:0", 16, 1, 1
    runs.runs.add(run_id="r", **run)
    served = {
        "GetServer": handler(there, message("GetServerRequest")),
        "ListRuns": handler(runs, message("ListRunsRequest")),
    }
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ballast.v1.AdminService", served),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield lambda *words: subprocess.run(
        [BALLASTCTL, "--server", address, *words], capture_output=True, text=True, timeout=60
    )
    server.stop(None)


def test_a_run_that_has_failed_is_not_to_be_deleted_with_its_checkpoints(tmp_path: Path) -> None:
    """A trainer that is started again has it anew from them."""
    with played(tmp_path, state=FAILED, failure="the GPU has gone") as ask:
        told = ask("doctor")
    assert told.returncode == 1 and "FAIL  failed runs" in told.stdout, told.stdout + told.stderr
    said = told.stdout.partition("failed runs")[2].partition("\nWARN")[0]
    assert "start their trainers again" in said and "delete RUN --keep-checkpoints" in said, said


def test_a_checkpoint_that_failed_is_a_finding(tmp_path: Path) -> None:
    with played(tmp_path, durability={"last_failure": "/d/runs/r: No space left on device"}) as ask:
        told = ask("doctor")
    assert told.returncode == 1, told.stdout + told.stderr
    assert "FAIL  checkpoints" in told.stdout and "r: /d/runs/r: No space left on device" in told.stdout, told.stdout
    assert "ballastctl checkpoint RUN" in told.stdout, told.stdout


@pytest.mark.parametrize("stored", [True, False])
def test_the_disk_is_looked_at(tmp_path: Path, stored: bool) -> None:
    with Daemon(storage=tmp_path if stored else None) as daemon:
        told = subprocess.run(
            [BALLASTCTL, "--server", daemon.server, "doctor"], capture_output=True, text=True, timeout=60
        )
        daemon.kill()
    assert told.returncode == 0, told.stdout + told.stderr
    wanted = (
        r"^OK +disk +[\d.]+ \w+ free of [\d.]+ \w+$" if stored else r"^WARN +disk +none: .*\n +fix: set storage.dir"
    )
    assert re.search(wanted, told.stdout, re.MULTILINE), told.stdout


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (
            {"state": RELAYED, "relay": {"upstream": "node7:7700", "failure": "no ballastd answers"}},
            "r: nothing comes from node7:7700: no ballastd answers",
        ),
        ({"state": RELAYED, "relay": {"upstream": "node7:7700", "connected": True}}, None),
        ({"state": FAILED, "failure": "the GPU has gone"}, "r: lost: the GPU has gone"),
        ({"failure": "3 rewinds\x1b[2J"}, "r: stopped: 3 rewinds\\x1b[2J"),
        ({"durability": {"last_failure": "disk full"}}, "r: the last checkpoint failed: disk full"),
    ],
)
def test_the_list_of_runs_says_what_is_the_matter(tmp_path: Path, run: dict[str, Any], line: str | None) -> None:
    with played(tmp_path, **run) as ask:
        told = ask("runs")
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[2:] == ([] if line is None else [line])
