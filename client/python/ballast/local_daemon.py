"""A ballastd of this process's own, for server="local": started when it is first asked for, ended with the process."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import tempfile
import threading
import time

from ballast import programs
from ballast.daemon_folder import DaemonFolder
from ballast.errors import Rejected, Unavailable
from ballast.progress import say

# A GPU is checked before the daemon serves.
_START_S = 120.0
_END_S = 20.0
# The address of a Unix socket has 107 bytes; the folder gets a name of about 30, the sockets in it one of 4.
_MOST_PARENT_BYTES = 60
# What systemd tells a service, which the trainer may be and the daemon is not.
_NOT_FOR_THE_DAEMON = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class LocalDaemon:
    """A ballastd that is a child of this process. server: its address. log: the path of its log.

    It listens at a Unix socket in a folder of mode 0700, where it shares memory, too. Its standard input is a pipe whose
    other end is this process's alone: the daemon ends when that is closed, also by SIGKILL. It is in a session of its
    own, so that Ctrl-C in a terminal, which goes to all of the terminal's group, does not reach it. It computes on the CPU,
    in the host's memory, since a GPU here is the trainer's. Variables BALLAST_... are its settings, and win over these.

    Raises Unavailable, with the end of the log and its path, if it does not start. One thread at a time.
    """

    def __init__(self) -> None:
        self._program = programs.find("ballastd")
        self._folder = _made_folder()
        self.log = self._folder.log
        self.server = f"unix:{self._folder.path / 'grpc'}"
        self._process = self._spawn([f"--listen={self.server}", "--end_with_stdin", *self._defaults()])
        try:
            banner = self._banner()
        except BaseException:  # Ctrl-C among them
            self._process.kill()
            self._process.wait()
            self.let_go()
            raise
        page = re.search(r"metrics (https?://\S+/)metrics", banner)
        shown = f", page {page[1]}" if page else ""
        say(f"started {self._program} for this process: server {self.server}{shown}, log {self.log}")

    @property
    def over(self) -> bool:
        """Whether it has ended, by itself or killed by another."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Ends it. Nobody is left for whom a step could be finished, so it ends at once. Its log stays if something was
        wrong with it."""
        self.let_go()
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code == 0:
            self._folder.remove()
        else:
            self._folder.keep()

    def give_up(self) -> None:
        """Of one that is over, and should not be. Its log stays."""
        self.let_go()
        self._folder.keep()

    def let_go(self) -> None:
        """Closes this process's ends of its pipes; in a fork, the copies."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _defaults(self) -> list[str]:
        """Flags for what no variable says."""
        defaults = {"device": "cpu", "ops_http.listen": "127.0.0.1:0", "shm_socket": str(self._folder.path / "shm")}
        variables = {key: f"BALLAST_{key.replace('.', '_').upper()}" for key in defaults}
        return [f"--{key}={value}" for key, value in defaults.items() if variables[key] not in os.environ]

    def _spawn(self, flags: list[str]) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_THE_DAEMON}
        with self._folder.open_log() as log:
            try:
                return subprocess.Popen(
                    [self._program, *flags],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise self._failure(f"cannot be executed: {error}") from error

    def _banner(self) -> str:
        """The line that it prints when it serves."""
        pipe = self._process.stdout
        assert pipe is not None
        line = b""
        deadline = time.monotonic() + _START_S
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(deadline - time.monotonic()):
                    raise self._failure(f"does not serve after {_START_S:.0f} s")
                piece = os.read(pipe.fileno(), 4096)
                if not piece:
                    raise self._failure(f"ended with exit code {self._process.wait(_END_S)}")
                line += piece
        return line.decode(errors="replace")

    def _failure(self, what: str) -> Unavailable:
        self._folder.keep()
        lines = self.log.read_text(errors="replace").strip().splitlines()
        said = f": {lines[-1][-500:]}" if lines else ""
        return Unavailable(
            f"the daemon that is started for this process, {self._program}, {what}{said}. Its log is {self.log}. Mend "
            "that, or give server='host:port' of a daemon that runs"
        )


_lock = threading.Lock()
_daemon: LocalDaemon | None = None
_inherited: list[LocalDaemon] = []  # in a fork: its parent's


def start() -> str:
    """The address of this process's daemon, which is started unless it runs."""
    global _daemon
    with _lock:
        if _daemon is not None and _daemon.over:
            say(f"the daemon of this process has ended, its log is {_daemon.log}; another is started")
            _daemon.give_up()
            _daemon = None
        if _daemon is None:
            _daemon = LocalDaemon()
        return _daemon.server


def running() -> str:
    """The same, of one that was started. Rejected if there is none."""
    with _lock:
        if _daemon is None or _daemon.over:
            raise Rejected(
                "this process has started no daemon, and no server is named: give server='host:port' or "
                "'unix:path', or set BALLAST_SERVER",
                "NOT_FOUND",
            )
        return _daemon.server


def end() -> None:
    """Ends this process's daemon, if it has one. At exit, when all optimizers are closed."""
    global _daemon
    with _lock:
        daemon, _daemon = _daemon, None
    if daemon is not None:
        daemon.end()


def _forget() -> None:
    """In a fork: the daemon is the parent's, and ends with that, whatever the fork does."""
    global _daemon, _lock
    _lock = threading.Lock()
    daemon, _daemon = _daemon, None
    if daemon is not None:
        daemon.let_go()
        _inherited.append(daemon)


os.register_at_fork(after_in_child=_forget)


def _made_folder() -> DaemonFolder:
    """Unavailable where there is no room for it."""
    try:
        return DaemonFolder(_parent())
    except OSError as error:
        raise Unavailable(
            f"the daemon that is started for this process has no folder for its sockets and its log: {error}. Make room there, "
            "name another folder for temporary files (TMPDIR), or give server='host:port' of a daemon that runs"
        ) from error


def _parent() -> str:
    """The folder that the daemon's is made in."""
    for folder in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if folder and os.path.isabs(folder) and len(os.fsencode(folder)) <= _MOST_PARENT_BYTES:
            if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
                return folder
    return "/tmp"
