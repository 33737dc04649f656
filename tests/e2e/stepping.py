"""Trainers in processes of their own, which are spoken to in lines: one makes a step when it is told to."""

import subprocess
from contextlib import contextmanager

from daemon import plain_environment
from warm_python import WarmPython

TRAINER = """
import sys, torch, ballast
w = torch.nn.Parameter(torch.ones(1000))
opt = ballast.AdamW([("w", w)], lr=1e-3, server=sys.argv[1], run=sys.argv[2], transport=sys.argv[3])
print("ready", flush=True)
for line in sys.stdin:
    (w * w).sum().backward()
    opt.step()
    assert opt.last_result.outcome == "APPLIED", opt.last_result
    print(opt.last_result.step, flush=True)
"""


class Trainer:
    """variables: of its environment."""

    def __init__(self, server: str, run: str, transport: str = "auto", variables: dict[str, str] | None = None):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = plain_environment() | (variables or {})
        self.process = WarmPython(["-c", TRAINER, server, run, transport], env=environment, text=True, **pipes)
        assert self.process.stdout.readline() == "ready\n", self.process.stderr.read()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def step(self) -> int:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.process.stderr.read()
        return int(answer)


@contextmanager
def running(script: str, server: str):
    """This one, which finds the server in sys.argv[1]; it is killed at the end."""
    words, pipe = ["-W", "ignore", "-c", script, server], subprocess.PIPE
    trainer = WarmPython(words, stdin=pipe, stdout=pipe, text=True, env=plain_environment())
    try:
        yield trainer
    finally:
        trainer.kill()
        trainer.communicate()
