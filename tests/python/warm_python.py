"""Python programs as forks of one that has imported torch and ballast, which takes longer than most trainers of tests.

    with WarmPython(["-c", TRAINER, server], stdout=subprocess.PIPE, text=True) as trainer: ...
    done = run(["-c", TRAINER, server], timeout=60)

    warm_python.py nursery N

imports them, and forks such programs as it is told by the socket that is descriptor N (nursery.py).
"""

from __future__ import annotations

import functools
import os
import runpy
import socket
import subprocess
import sys
import types
import warnings
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from nursery import Nursery, attend


@functools.cache
def nursery() -> Nursery:
    """Of all tests of this process, with which it ends. A thread for each program, as tests/run.sh has it."""
    return Nursery("env", "OMP_NUM_THREADS=1", sys.executable, __file__)


class WarmPython(subprocess.Popen[Any]):
    """subprocess.Popen([sys.executable, *words]), where words are a script or -c and a text, with -W ignore before them or not.

    The process has a session of its own. What is in its environment for Python or OpenMP to read as they start is not read. It
    is no child of this process: what Popen does by fork() and waitpid() is replaced."""

    def __init__(self, words: Sequence[str | Path], **options: Any):
        super().__init__([str(word) for word in words], **options)

    def _execute_child(self, args: Any, executable: Any, preexec: Any, close: Any, passed: Any, *more: Any) -> None:
        assert not (executable or preexec or passed), "there is no such program, function or descriptor in a fork"
        folder, environment = more[:2]
        stdin, to_it, from_it, stdout, from_stderr, stderr = more[5:11]
        message = {
            "words": args,
            "environment": dict(os.environ) if environment is None else dict(environment),
            "folder": str(folder or os.getcwd()),
        }
        own = [number if given == -1 else given for number, given in enumerate((stdin, stdout, stderr))]
        try:
            self.pid = nursery().ask(message, own)
        finally:
            self._close_pipe_fds(stdin, to_it, from_it, stdout, from_stderr, stderr)
        self._child_created = True
        self._ended = os.pidfd_open(self.pid)  # it is a zombie until it is asked after

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and connection.wait([self._ended], 0):
            self._wait(None)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        with self._waitpid_lock:
            if self.returncode is None:
                if not connection.wait([self._ended], timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                self.returncode = nursery().ask({"ended": self.pid})
                os.close(self._ended)
        return self.returncode


def run(words: Sequence[str | Path], timeout: float, **options: Any) -> subprocess.CompletedProcess[Any]:
    """subprocess.run([sys.executable, *words], capture_output=True, text=True), likewise."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with WarmPython(words, text=True, **pipes, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _be_the_program(words: list[str]) -> None:
    if words[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        del words[:2]
    if words[0] != "-c":
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
        return
    sys.argv, sys.path[0] = ["-c", *words[2:]], ""
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(words[1], "<string>", "exec"), sys.modules["__main__"].__dict__)


if __name__ == "__main__":
    import ballast
    import torch

    attend(socket.socket(fileno=int(sys.argv[2])))
    _be_the_program(sys.argv[1:])
