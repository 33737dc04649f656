"""A real ballastd for a test: started on free ports, stopped at the end of a `with`."""

import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "dev"))
BALLASTD = BUILD / "server" / "ballastd"
BALLASTCTL = BUILD / "client" / "cpp" / "ballastctl"
EXAMPLE = BUILD / "client" / "cpp" / "ballast_example"


def plain_environment() -> dict[str, str]:
    """Ours without BALLAST_*: a test states its configuration."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BALLAST_")}


def until(what: str, probe, seconds: float = 60):
    """Waits until the probe returns something true, and returns that: for what is published later than it happens."""
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        threading.Event().wait(0.05)
    return found


class Daemon:
    """with Daemon(tmp_path) as daemon:
    daemon.get("/readyz")

    `descriptors`: how many file descriptors it may have, soft and hard; the test's own limits where None. `environment`: of
    its own, beside the test's. `clients`: that of ballastctl, likewise. `launcher`: the command that starts the program.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        descriptors: tuple[int, int] | None = None,
        environment: dict[str, str] | None = None,
        clients: dict[str, str] | None = None,
        launcher: list[str | Path] | None = None,
    ):
        self.server = self.ops = ""  # host:port, once it runs
        self.log = folder / "ballastd.log"
        self.flags = [
            "--listen",
            "127.0.0.1:0",
            "--ops_http.listen",
            "127.0.0.1:0",
            "--device",
            "cpu",
            "--threads",
            "1",
        ]
        self.flags += ["--log.format", "json", *flags]
        self.process = None
        self.environment = environment or {}
        self.clients = clients or {}
        self.launcher = launcher or []
        if descriptors is not None:  # by a program: a preexec_fn would run the fork handlers of the test's libraries
            self.launcher = ["prlimit", "--nofile={}:{}".format(*descriptors), *self.launcher]

    def __enter__(self) -> "Daemon":
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*self.launcher, BALLASTD, *self.flags],
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                text=True,
                env=plain_environment() | self.environment,
            )
        # The daemon prints one line when it serves, or ends.
        banner = re.search(r"grpc (.+?)(?: \(tls\))? \| metrics https?://([^/\s]+)", self.process.stdout.readline())
        if banner is None:
            self.__exit__()
            raise AssertionError(f"the daemon did not start; its log:\n{self.log.read_text()}")
        self.server, self.ops = banner.groups()
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def restart(self) -> None:
        """Kills it, and starts it anew where it was."""
        self.__exit__()
        self.flags += ["--listen", self.server]
        self.__enter__()

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self.ops}{path}", timeout=60) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def status(self, path: str) -> int | None:
        """The HTTP status, or None where nobody answers."""
        try:
            return self.get(path)[0]
        except OSError:
            return None

    def stop(self, seconds: float = 60) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def ctl(self, *arguments: str) -> subprocess.CompletedProcess:
        command = [BALLASTCTL, "--server", self.server, *arguments]
        environment = plain_environment() | self.clients
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


class Daemons:
    """Several of them, of each of which a run has a part, with a folder of its own for each: as Daemon, where a trainer
    looks."""

    def __init__(self, folder: Path, count: int, *flags: str):
        """In the flags {folder} is the daemon's own."""
        self.each = []
        for part in range(count):
            own = folder / f"part-{part}"
            own.mkdir(exist_ok=True)
            self.each.append(Daemon(own, *(flag.format(folder=own) for flag in flags)))

    @property
    def server(self) -> str:
        return ",".join(daemon.server for daemon in self.each)

    def __enter__(self) -> "Daemons":
        for daemon in self.each:
            daemon.__enter__()
        return self

    def __exit__(self, *_):
        for daemon in self.each:
            daemon.__exit__()

    def restart(self) -> None:
        """Kills one, and starts it anew where it was."""
        self.each[len(self.each) // 2].restart()
