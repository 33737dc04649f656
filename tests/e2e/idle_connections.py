"""What connections cost that nobody uses: so many are opened from several addresses of this machine, and stay.

    idle_connections.py CONNECTIONS [tls]

Each says that it speaks HTTP/2, as a client of gRPC does that makes no call, over TLS after a handshake in which both
ends show a certificate. Printed are the seconds that it took to open them, and the daemon's bytes for each.
"""

import socket
import ssl
import sys
import tempfile
import time
from pathlib import Path

from daemon import Daemon
from memory import status_bytes
from pki import Pki
from rapid_reset import PREFACE, SETTINGS, frame

ADDRESSES = [f"127.0.0.{number}" for number in range(2, 12)]  # three quarters of the connections may be of one
SPARE = 100  # connections that the daemon takes beside


def flags(connections: int) -> list[str]:
    return ["--limits.connections", str(connections + SPARE), "--shm_socket", "off"]


class Idle:
    """Opens them when it is made, and closes them at the end of the `with`."""

    def __init__(self, server: str, connections: int, context: ssl.SSLContext | None = None):
        host, port = server.rsplit(":", 1)
        self.sockets: list[socket.socket] = []
        for number in range(connections):
            source = (ADDRESSES[number % len(ADDRESSES)], 0)
            connection = socket.create_connection((host, int(port)), 60, source)
            if context is not None:
                connection = context.wrap_socket(connection, server_hostname=host)
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
            self.sockets.append(connection)

    def __enter__(self) -> "Idle":
        return self

    def __exit__(self, *_):
        for connection in self.sockets:
            connection.close()

    def open(self) -> int:
        """How many the daemon has answered with its SETTINGS, and not closed."""
        for connection in self.sockets:
            connection.settimeout(60)
        return sum(self._greeted(connection) for connection in self.sockets)

    @staticmethod
    def _greeted(connection: socket.socket) -> bool:
        try:
            head = connection.recv(9)
        except OSError:
            return False
        return len(head) == 9 and head[3] == SETTINGS


def client_context(pki: Pki) -> ssl.SSLContext:
    context = pki.trust()
    context.load_cert_chain(pki / "trainer.crt", pki / "trainer.key")
    context.set_alpn_protocols(["h2"])
    return context


def main() -> None:
    connections, over_tls = int(sys.argv[1]), sys.argv[2:] == ["tls"]
    with tempfile.TemporaryDirectory() as folder:
        pki = Pki(Path(folder) / "pki") if over_tls else None
        with Daemon(Path(folder), *flags(connections), *(pki.flags if pki else [])) as daemon:
            before, began = status_bytes(daemon.process.pid, "VmRSS"), time.monotonic()
            with Idle(daemon.server, connections, client_context(pki) if pki else None) as idle:
                greeted, took = idle.open(), time.monotonic() - began
                each = (status_bytes(daemon.process.pid, "VmRSS") - before) // connections
                print(f"{greeted} connections in {took:.1f} s, {each} bytes each")


if __name__ == "__main__":
    main()
