"""A ballastd of the tests' own, on a free port."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from threading import Timer
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("BALLASTD", ROOT / "build" / "dev" / "server" / "ballastd"))
LEASE_S = 1


_CLAIMS: deque[socket.socket] = deque(maxlen=200)  # the oldest are closed


def free_port() -> int:
    """Below the ports that the system gives to connections: one of those may take it while a daemon is away from it. Nobody who
    asks likewise gets the same for a while: this process keeps the UDP port of that number."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20000, 32000)
        claim = socket.socket(type=socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        _CLAIMS.append(claim)
        return port


class Daemon:
    """Started by the constructor; `server` is its address, `metrics_url` its metrics'. Ends with the `with` block.
    `storage`: keeps its runs there. `signals`: each is sent so many seconds after its start. `log`: where it writes what it
    says. `flags`: more of them. `variables`: of its environment."""

    def __init__(
        self,
        port: int = 0,
        lease_s: int = LEASE_S,
        storage: Path | None = None,
        signals: Sequence[tuple[float, int]] = (),
        log: Path | None = None,
        flags: Sequence[str] = (),
        **variables: str,
    ) -> None:
        said = None if log is None else log.open("a")
        self._process = subprocess.Popen(
            [
                BINARY,
                f"--listen=127.0.0.1:{port or free_port()}",
                "--ops_http.listen=127.0.0.1:0",
                "--device=cpu",
                "--threads=1",
                "--memory_limit=256MiB",
                f"--limits.lease={lease_s}s",
                "--log.level=warn",
                f"--storage.dir={storage or 'off'}",
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={key: value for key, value in os.environ.items() if not key.startswith("BALLAST_")} | variables,
        )
        if said is not None:
            said.close()
        self._timers = [Timer(after_s, self._process.send_signal, [signal]) for after_s, signal in signals]
        for timer in self._timers:
            timer.start()
        self.server = self._read_address()
        self.port = int(self.server.rpartition(":")[2])

    def _read_address(self) -> str:
        assert self._process.stdout is not None
        banner = self._process.stdout.readline()
        found = re.search(r"grpc (\S+)", banner)
        metrics = re.search(r"metrics (\S+)", banner)
        self.metrics_url = metrics[1] if metrics else ""
        if not found:
            self._process.kill()
            self._cancel_signals()
            raise RuntimeError(f"ballastd did not start (exit code {self._process.wait()}, it said {banner!r})")
        return found[1]

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """As an operator does."""
        self._process.terminate()

    def drain(self) -> None:
        """Stops it, and waits for its end."""
        self.stop()
        assert self.wait() == 0

    def wait(self, timeout_s: float | None = None) -> int:
        """For an end that it comes to by itself; its exit code."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stands_still(self) -> bool:
        """Waits until it does, at a failpoint that says ":stop". False: it has ended."""
        seen = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return seen is not None and seen.si_code == os.CLD_STOPPED

    def _cancel_signals(self) -> None:
        for timer in self._timers:
            timer.cancel()
            timer.join()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # threads may go on until the first of them has heard it

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel_signals()
        if self._process.poll() is None:
            self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Daemons:
    """Several of them, for runs of which each has a part. What is done is done to all, but for restart."""

    def __init__(self, count: int, storage: Path | None = None, **options: Any) -> None:
        self._options = options
        self._folders = [None if storage is None else storage / f"part-{part}" for part in range(count)]
        for folder in self._folders:
            if folder is not None:
                folder.mkdir(parents=True)
        self.each = [Daemon(storage=folder, **options) for folder in self._folders]

    @property
    def server(self) -> str:
        return ",".join(daemon.server for daemon in self.each)

    @property
    def metrics_url(self) -> str:
        return self.each[0].metrics_url

    @property
    def pid(self) -> int:
        return self.each[0].pid

    def restart(self, part: int) -> None:
        """Kills one, and starts it anew where it was."""
        port = self.each[part].port
        self.each[part].__exit__()
        self.each[part] = Daemon(port, storage=self._folders[part], **self._options)

    def kill(self) -> None:
        for daemon in self.each:
            daemon.kill()

    def drain(self) -> None:
        for daemon in self.each:
            daemon.stop()
        for daemon in self.each:
            assert daemon.wait() == 0

    def freeze(self) -> None:
        for daemon in self.each:
            daemon.freeze()

    def thaw(self) -> None:
        for daemon in self.each:
            daemon.thaw()

    def __enter__(self) -> Daemons:
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self.each:
            daemon.__exit__()
