"""A stranger that calls as fast as the daemon answers, with a token that is nobody's: raw frames of HTTP/2 over TLS, from
an address of its own.

    with Stranger(daemon.server, pki / "ca.crt", "127.0.0.2") as stranger: ...; stranger.calls
"""

import multiprocessing
import socket
import ssl
import struct
from pathlib import Path

from rapid_reset import END_HEADERS, HEADERS, POST, PREFACE, SETTINGS, frame

DATA, END_STREAM = 0, 1
HTTPS = b"\x87"  # of HPACK's static table
AT_ONCE = 32  # of the 64 streams that a connection may have
MOST_CALLS = 500_000  # of a connection; streams' numbers have 31 bits
EMPTY_MESSAGE = bytes(5)


def plain(name: bytes, value: bytes) -> bytes:
    """A header that no table keeps."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


CALL = POST + HTTPS + plain(b":path", b"/ballast.v1.AdminService/ListRuns") + plain(b":authority", b"localhost")
CALL += plain(b"content-type", b"application/grpc") + plain(b"te", b"trailers")
CALL += plain(b"authorization", b"Bearer ballast_nobodys-token")


def call(stream: int) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, CALL) + frame(DATA, END_STREAM, stream, EMPTY_MESSAGE)


def read_frame(incoming) -> tuple[int, int]:
    """Kind and flags of the next one."""
    head = incoming.read(9)
    if len(head) < 9:
        raise ConnectionError("closed")
    incoming.read(struct.unpack(">I", b"\0" + head[:3])[0])
    return head[3], head[4]


def call_on(address: tuple[str, int], source: str, authority: Path, answered) -> None:
    context = ssl.create_default_context(cafile=authority)
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(address, 60, (source, 0)) as bare:
        with context.wrap_socket(bare, server_hostname=address[0]) as connection:
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
            with connection.makefile("rb") as incoming:
                for first in range(1, 2 * MOST_CALLS, 2 * AT_ONCE):
                    connection.sendall(b"".join(call(stream) for stream in range(first, first + 2 * AT_ONCE, 2)))
                    ended = 0
                    while ended < AT_ONCE:
                        kind, flags = read_frame(incoming)
                        ended += kind == HEADERS and bool(flags & END_STREAM)
                    answered.value += AT_ONCE


class Stranger:
    """calls: how many were answered; none of them is let in."""

    def __init__(self, server: str, authority: Path, source: str):
        host, port = server.rsplit(":", 1)
        processes = multiprocessing.get_context("spawn")
        self._answered = processes.Value("q", 0, lock=False)
        arguments = ((host, int(port)), source, authority, self._answered)
        self._process = processes.Process(target=call_on, args=arguments, daemon=True)

    @property
    def calls(self) -> int:
        assert self._process.is_alive(), "it was cut off"
        return self._answered.value

    def __enter__(self) -> "Stranger":
        self._process.start()
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.join()
