"""A TCP proxy between trainer and daemon that can be cut, and slowed down."""

from __future__ import annotations

import socket
import threading
import time

TURN_S = 0.05
PIECE = 16384


class Proxy:
    """Listens on `server` and forwards to `target`. Every connection can be cut; new ones are then accepted again. What the
    target answers can be slowed down; the proxy then takes from it no more than it passes on, and buffers of 64 KiB."""

    def __init__(self, target: str):
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.server = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.upstream_bytes = self.downstream_bytes = 0
        self._rate: int | None = None  # of answers, bytes a second and connection
        self._cut_at: int | None = None
        self._cut_answers_at: int | None = None
        self._away = False
        self._held_of: bytes | None = None
        self._holds = False
        self.was_cut = threading.Event()
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, nbytes: int) -> None:
        """Cuts every connection, once, when `nbytes` more have gone upstream."""
        with self._lock:
            self._cut_at = self.upstream_bytes + nbytes

    def cut_after_answers(self, nbytes: int) -> None:
        """Likewise, when `nbytes` more have come downstream; the last of them do not arrive."""
        with self._lock:
            self._cut_answers_at = self.downstream_bytes + nbytes

    def hold_answers_of(self, method: str) -> None:
        """From the first call of "Service/Method" on, no answer passes until cut()."""
        self._held_of = method.encode()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                if self._away:
                    _hang_up(near)
                    continue
                far = socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * PIECE)
                far.connect(self._target)
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self._pairs.append((near, far))
            threading.Thread(target=self._forward, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._forward, args=(far, near, False), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, upstream: bool) -> None:
        try:
            while piece := source.recv(PIECE if upstream else self._next_answer()):
                if self._is_last(len(piece)) if upstream else self._is_last_answer(len(piece)):
                    self.cut()
                    return
                if upstream and self._held_of is not None and self._held_of in piece:
                    self._held_of, self._holds = None, True
                if upstream or not self._holds:
                    sink.sendall(piece)
        except OSError:
            pass
        for end in (source, sink):
            _hang_up(end)

    def _is_last(self, nbytes: int) -> bool:
        with self._lock:
            self.upstream_bytes += nbytes
            last = self._cut_at is not None and self.upstream_bytes >= self._cut_at
            if last:
                self._cut_at = None
            return last

    def _is_last_answer(self, nbytes: int) -> bool:
        with self._lock:
            self.downstream_bytes += nbytes
            last = self._cut_answers_at is not None and self.downstream_bytes >= self._cut_answers_at
            if last:
                self._cut_answers_at = None
            return last

    def slow_down(self, rate: int | None) -> None:
        """Answers pass at so many bytes a second from now on; None: at once."""
        self._rate = rate

    def _next_answer(self) -> int:
        """How many bytes may pass now."""
        if self._rate is None:
            return PIECE
        time.sleep(TURN_S)
        return max(1, int(TURN_S * (self._rate or PIECE / TURN_S)))

    def cut(self) -> None:
        """Cuts every connection now."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
            self._holds = False
        for pair in pairs:
            for end in pair:
                _hang_up(end)
        self.was_cut.set()

    def leave(self) -> None:
        """Cuts every connection, and each that is made until come_back()."""
        self._away = True
        self.cut()

    def come_back(self) -> None:
        self._away = False

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()


def _hang_up(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    end.close()
