"""More connections than the daemon has file descriptors for, and more calls than it has memory for: it refuses the rest,
works on, and recovers."""

import json
import re
import socket
from collections import Counter
from contextlib import ExitStack

import pytest
from daemon import Daemon
from memory import status_bytes
from rapid_reset import Flood
from stepping import Trainer

DESCRIPTORS = 128


@pytest.fixture
def daemon(tmp_path):
    limit = (DESCRIPTORS, DESCRIPTORS)
    with Daemon(tmp_path, "--shm_socket", f"{tmp_path}/shared/", descriptors=limit) as running:
        yield running


def address(server: str) -> tuple[str, int]:
    host, port = server.rsplit(":", 1)
    return host, int(port)


def flood(daemon: Daemon, opened: ExitStack, count: int) -> list[socket.socket]:
    """Idle connections; they are taken, refused, or wait to be either."""
    return [opened.enter_context(socket.create_connection(address(daemon.server), 10)) for _ in range(count)]


def logged(daemon: Daemon, event: str) -> list[dict]:
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def most_in_a_second(lines: list[dict]) -> int:
    return max(Counter(line["ts"].split(".")[0] for line in lines).values())


def test_idle_connections_beyond_the_descriptors_are_refused_and_the_rest_works_on(daemon):
    with Trainer(daemon.server, "beside") as beside, ExitStack() as opened:
        assert beside.step() == 1
        idle = flood(daemon, opened, 3 * DESCRIPTORS)
        idle[-1].settimeout(30)
        assert b"too many connections" in read_all(idle[-1])
        for step in range(2, 12):
            assert beside.step() == step
            assert daemon.get("/livez") == (200, "ok\n")
            assert daemon.status("/metrics") == 200
        counted = re.findall(r"^ballast_connections_refused_total{.*} (\d+)$", daemon.get("/metrics")[1], re.MULTILINE)
        refused = logged(daemon, "connection_refused")
        assert sum(map(int, counted)) >= len(refused)
        assert refused and most_in_a_second(refused) <= 10
        assert not [line for line in logged(daemon, "grpc") if "accept" in line["err"]]
        opened.close()
        with Trainer(daemon.server, "afterwards") as afterwards:
            assert afterwards.step() == 1
        assert beside.step() == 12


def test_streams_that_are_opened_and_reset_at_once_do_not_fill_the_memory(tmp_path):
    with ExitStack() as opened:
        daemon = opened.enter_context(Daemon(tmp_path, "--shm_socket", "off"))
        beside = opened.enter_context(Trainer(daemon.server, "beside"))
        assert beside.step() == 1
        before = status_bytes(daemon.process.pid, "VmRSS")
        step = 1
        with Flood(daemon.server, 8) as flood:
            while flood.ended < 400 or step < 20:
                step += 1
                assert beside.step() == step
                assert status_bytes(daemon.process.pid, "VmHWM") - before < 256 << 20
        assert logged(daemon, "calls_flooded")
        assert most_in_a_second(logged(daemon, "connection_refused")) <= 10, "a flood does not fill the disk"
        assert not logged(daemon, "stream_ended"), "the trainer's connection was not among those that were cut"
        afterwards = opened.enter_context(Trainer(daemon.server, "afterwards"))
        assert afterwards.step() == 1
        assert beside.step() == step + 1


def read_all(connection: socket.socket) -> bytes:
    """Receives until the other end closes; returns what came."""
    got = b""
    try:
        while part := connection.recv(4096):
            got += part
    except ConnectionResetError:
        pass
    return got


def test_the_soft_limit_is_raised_to_the_hard_one(tmp_path):
    with Daemon(tmp_path, descriptors=(128, 512)) as daemon:
        assert "process_max_fds 512\n" in daemon.get("/metrics")[1]
        assert [line["to"] for line in logged(daemon, "descriptors")] == [512]


def test_a_limit_that_does_not_hold_the_connections_asked_for_is_told(tmp_path):
    with pytest.raises(AssertionError, match=r"limits.connections.*1000.*128"):
        Daemon(tmp_path, "--limits.connections", "1000", descriptors=(128, 128)).__enter__()
