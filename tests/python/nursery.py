"""Processes of one program as forks of one, which has imported what they need: importing it takes longer than most of them."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any, TextIO

MOST_BYTES = 1 << 20  # of a message: it has the environment
PATIENCE_S = 120.0  # for an answer, the first after torch was imported


class Child:
    """A process of a nursery, in a session of its own, its stdin and stdout as text."""

    def __init__(self, nursery: Nursery, words: tuple[str, ...], environment: dict[str, str]):
        self._nursery = nursery
        self._code: int | None = None
        stdin, to_it = os.pipe()
        from_it, stdout = os.pipe()
        self.stdin: TextIO = open(to_it, "w")
        self.stdout: TextIO = open(from_it)
        message = {"words": words, "environment": environment, "folder": os.getcwd()}
        self.pid = nursery.ask(message, [stdin, stdout, 2])
        os.close(stdin)
        os.close(stdout)
        self._ended = os.pidfd_open(self.pid)  # it is a zombie until it is asked after

    def send_signal(self, number: int) -> None:
        if self._code is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        """Its exit code; of one that a signal ended, minus the signal's number."""
        if self._code is None:
            if not connection.wait([self._ended], timeout):
                raise subprocess.TimeoutExpired("a child of the nursery", timeout)
            os.close(self._ended)
            self._code = self._nursery.ask({"ended": self.pid})
        return self._code

    def close(self) -> None:
        """Waits for its end, and that of all that have its stdout. May be called again."""
        if self.stdout.closed:
            return
        with suppress(BrokenPipeError):
            self.stdin.close()
        with self.stdout:
            self.stdout.read()
        self.wait(120)


class Nursery:
    """The process that forks, and this end of the line to it. It ends with this process, and kills its children. Thread-safe.

    `command`: the program, which calls attend() where its words are "nursery" and a descriptor's number."""

    def __init__(self, *command: str | Path) -> None:
        self._lock = threading.Lock()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(PATIENCE_S)
        with theirs:
            self._process = subprocess.Popen(
                [*command, "nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def ask(self, message: dict[str, Any], descriptors: list[int] | None = None) -> int:
        with self._lock:
            try:
                socket.send_fds(self._line, [json.dumps(message).encode()], descriptors or [])
                answer = self._line.recv(MOST_BYTES)
            except BaseException:
                self._line.close()  # the next answer would be this one's
                raise
        assert answer, f"the nursery ended: {self._process.wait()}"
        return int(answer)

    def start(self, *words: str, environment: dict[str, str] | None = None) -> Child:
        """environment: this process's own where None."""
        return Child(self, words, dict(os.environ) if environment is None else environment)


def settle() -> None:
    """For a program that is about to fork. What torch and ballast import for a process's first optimizer is imported, which
    takes a second, and no fork collects what is there: that would write to all of it, and so copy it."""
    import torch._dynamo

    import ballast.optimizer

    gc.collect()
    gc.freeze()


def attend(line: socket.socket) -> None:
    """The nursery's own: forks whenever it is asked to. Returns in each child, whose words are in sys.argv; else never."""
    settle()
    children: set[int] = set()
    while True:
        data, descriptors, _, _ = socket.recv_fds(line, MOST_BYTES, 3)
        if not data:
            for child in children:
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
            os._exit(0)
        message = json.loads(data)
        if "ended" in message:
            children.remove(message["ended"])
            line.send(str(os.waitstatus_to_exitcode(os.waitpid(message["ended"], 0)[1])).encode())
            continue
        child = os.fork()
        if child == 0:
            _become(message, descriptors)
            line.send(str(os.getpid()).encode())  # now its session is its own
            line.close()
            return
        children.add(child)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(message: dict[str, Any], descriptors: list[int]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(message["environment"])
    os.chdir(message["folder"])
    sys.argv[1:] = message["words"]
