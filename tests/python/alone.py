"""A trainer with a daemon of its own, for trainer.py: does what a test orders on stdin, a word a line."""

from __future__ import annotations

import os
import signal

import torch

import ballast
from ballast import local_daemon
from models import layered
from trainer import hear, say

_kept: list[ballast.Optimizer] = []


class Alone:
    """Each order is a method, and what it returns is said."""

    def __init__(self, run: str):
        self._run = run
        self._layers = layered(seed=1)
        self._optimizer = ballast.AdamW(self._layers.named_parameters(), run=run)
        _kept.append(self._optimizer)  # left open at exit, as scripts do

    def daemon(self) -> str:
        """Its process, and its folder."""
        assert local_daemon._daemon is not None
        return f"{local_daemon._daemon._process.pid} {local_daemon._daemon.log.parent}"

    def backward(self) -> str:
        self._layers(torch.ones(2, 8)).sum().backward()
        return "open"

    def step(self) -> str:
        self.backward()
        self._optimizer.step()
        assert self._optimizer.last_result is not None
        return f"{self._optimizer.last_result.step} {self._optimizer.last_result.outcome}"

    def second(self) -> str:
        """Another optimizer: whether it has the same daemon."""
        _kept.append(ballast.AdamW(layered(seed=2).named_parameters(), run=f"{self._run}-second", server="local"))
        return str(_kept[-1].server == self._optimizer.server)

    def anew(self) -> str:
        """Another optimizer, after its daemon was killed: its run's first step."""
        layers = layered(seed=3)
        _kept.append(ballast.AdamW(layers.named_parameters(), run=f"{self._run}-anew"))
        layers(torch.ones(2, 8)).sum().backward()
        _kept[-1].step()
        return str(_kept[-1].server != self._optimizer.server)

    def fork(self) -> str:
        """A child that lives on, and ends in its own way where it is told to."""
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        return str(child)

    def forked_exit(self) -> str:
        """A child that ends as a program does."""
        child = os.fork()
        if child == 0:
            raise SystemExit(0)
        return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    def wait(self) -> str:
        """For Ctrl-C, which is heard also if it comes just before the call that waits, or in another thread."""
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        signal.set_wakeup_fd(writes)
        say("waiting")
        os.read(reads, 1)
        return "not interrupted"

    def delete(self) -> str:
        self._optimizer.close()
        return str(ballast.delete_run(self._run) > 0)


def conduct(run: str) -> None:
    alone = Alone(run)
    say("ready")
    while True:
        try:
            order = hear()
            if order == "end":
                return
            say(getattr(alone, order)())
        except KeyboardInterrupt:
            say("interrupted")
