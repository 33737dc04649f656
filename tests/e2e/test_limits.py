"""What a client may do of HTTP/2 and TLS, and for how long: what is beyond is refused, and others' calls go on."""

import re
import socket
import struct
from contextlib import ExitStack

import grpc
import pytest
from daemon import Daemon, until
from failing_calls import plain
from pki import Pki
from rapid_reset import END_HEADERS, HEADERS, HTTP, POST, PREFACE, RST_STREAM, SETTINGS, TRAIN, frame
from stepping import Trainer

PING, GOAWAY, CONTINUATION = 6, 7, 9
MAX_CONCURRENT_STREAMS, ACK = 3, 1
CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303")  # the beginning of one


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path, "--shm_socket", "off") as running:
        yield running


def dial(server: str) -> socket.socket:
    host, port = server.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 60)


def frames(connection: socket.socket):
    """(kind, stream, payload) of each frame, until the daemon closes."""
    with connection.makefile("rb") as incoming:
        while len(head := incoming.read(9)) == 9:
            payload = incoming.read(struct.unpack(">I", b"\0" + head[:3])[0])
            yield head[3], struct.unpack(">I", head[5:])[0], payload


def list_runs(server: str) -> None:
    with grpc.insecure_channel(server) as channel:
        channel.unary_unary("/ballast.v1.AdminService/ListRuns")(b"", timeout=60)


def value(daemon: Daemon, series: str) -> int:
    return int(re.search(rf"^{re.escape(series)} (\d+)$", daemon.get("/metrics")[1], re.MULTILINE)[1])


def headers(path: bytes) -> bytes:
    named = plain(b":path", path) + plain(b":authority", b"ballast")
    return POST + HTTP + named + plain(b"content-type", b"application/grpc") + plain(b"te", b"trailers")


def test_metadata_of_more_than_16_kib_is_refused_before_the_call_is_one(daemon):
    started = 'ballast_rpc_started_total{method="ListRuns"}'
    before = value(daemon, started)
    block = headers(b"/ballast.v1.AdminService/ListRuns") + b"".join(
        plain(b"x-%d" % number, b"y" * 120) for number in range(200)
    )
    with dial(daemon.server) as connection:
        parts = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
        sent = PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, 0, 1, parts[0])
        for part in parts[1:]:
            sent += frame(CONTINUATION, END_HEADERS if part is parts[-1] else 0, 1, part)
        connection.sendall(sent)
        ended = next(kind for kind, stream, _ in frames(connection) if stream == 1 and kind in (HEADERS, RST_STREAM))
        assert ended in (HEADERS, RST_STREAM)
    assert value(daemon, started) == before
    list_runs(daemon.server)


def test_a_connection_that_opens_more_than_64_streams_is_closed(daemon):
    opened = b"".join(frame(HEADERS, END_HEADERS, stream, headers(TRAIN)) for stream in range(1, 2 * 65, 2))
    with dial(daemon.server) as connection:
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
        told = frames(connection)
        settings = dict(struct.iter_unpack(">HI", next(payload for kind, _, payload in told if kind == SETTINGS)))
        assert settings[MAX_CONCURRENT_STREAMS] == 64
        connection.sendall(frame(SETTINGS, ACK, 0, b"") + opened[: len(opened) // 65 * 64])
        until("64 are open", lambda: value(daemon, "ballast_streams") == 64)
        connection.sendall(opened[len(opened) // 65 * 64 :])
        for _ in told:  # until the daemon closes
            pass
        until("none is left", lambda: value(daemon, "ballast_streams") == 0)
        list_runs(daemon.server)


@pytest.mark.parametrize("over_tls", [False, True])
def test_a_handshake_that_is_never_finished_is_given_up(tmp_path, over_tls):
    pki = Pki(tmp_path / "pki") if over_tls else None
    with ExitStack() as stack:
        flags = pki.flags if pki else []
        daemon = stack.enter_context(Daemon(tmp_path, "--limits.handshake_timeout", "500ms", *flags))
        for said in (b"", CLIENT_HELLO if over_tls else PREFACE[:10]):
            connection = stack.enter_context(dial(daemon.server))
            connection.sendall(said)
            connection.settimeout(60)
            try:
                while connection.recv(4096):
                    pass
            except ConnectionResetError:
                pass
        assert daemon.get("/livez") == (200, "ok\n")


def test_a_connection_without_a_call_is_closed_and_its_client_takes_no_notice(tmp_path):
    with Daemon(tmp_path, "--limits.idle_timeout", "1s", "--shm_socket", f"{tmp_path}/s/") as daemon:
        with dial(daemon.server) as connection, Trainer(daemon.server, "a", "grpc") as streams:
            assert streams.step() == 1
            with Trainer(daemon.server, "b", "shm") as shares:
                assert shares.step() == 1
                connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
                assert GOAWAY in [kind for kind, _, _ in frames(connection)], "and then it is closed"
                with grpc.insecure_channel(daemon.server) as channel:
                    ask = channel.unary_unary("/ballast.v1.AdminService/ListRuns")
                    ask(b"", timeout=60)
                    # The trainers' own connections: that of the stream alone is in use.
                    until("idle ones are closed", lambda: value(daemon, "ballast_connections") <= 2)
                    ask(b"", timeout=60)
                for step in range(2, 5):
                    assert streams.step() == step
                    assert shares.step() == step
