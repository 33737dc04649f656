"""The ranks of a run, as processes that a test leads step by step: forks of one program, which imports torch once."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

import ballast
from forks import FORKS
from models import layered, until

PATIENCE_S = 90.0
LR, MOMENTUM = 0.05, 0.9
WORLD = 3
# With the tests' daemon a rank is lost 1.5 s after its process.
CONTINUE = {"world": WORLD, "on_lost_rank": "continue", "rank_timeout": 0.5}


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 8, generator=random), torch.randn(4, 8, generator=random)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return nn.functional.mse_loss(model(x), y)


def optimizer_of(model: nn.Module, server: str, run: str, rank: int, options: dict[str, Any]) -> ballast.SGD:
    options = {"master": "fp32", "state": "fp32", "gradient_dtype": "fp32", **options}
    return ballast.SGD(model.named_parameters(), LR, MOMENTUM, server=server, run=run, rank=rank, **options)


class Member:
    """One rank, in its own process: makes what it is ordered, and answers each order."""

    def __init__(self, server: str, run: str, rank: int, options: dict[str, Any]):
        self.rank = rank
        self.model = layered(seed=1)
        self.optimizer = optimizer_of(self.model, server, run, rank, options)
        self.optimizer.connect()

    def next_step(self) -> int:
        session = self.optimizer._membership.session
        assert session is not None
        return session.step

    def step(self) -> dict[str, Any]:
        self.begin()
        return self.end()

    def begin(self) -> str:
        """A step, as far as the last layer: its gradient alone is sent."""
        first, second, last = self.model
        x, y = batch(self.next_step(), self.rank)
        self.hidden = second(first(x))
        self.input = self.hidden.detach().requires_grad_()
        self.weight_before = last.weight.detach().clone()
        nn.functional.mse_loss(last(self.input), y).backward()
        return "begun"

    def arrive(self) -> str:
        """As begin(), and what was sent is with the daemon, so that the step has begun there."""
        before = self.optimizer.run_status().received_bytes
        self.begin()
        until(lambda: self.optimizer.run_status().received_bytes > before)
        return "arrived"

    def await_last_layer(self) -> str:
        """Its new weights return when the last rank has begun."""
        until(lambda: not torch.equal(self.model[2].weight, self.weight_before))
        return "returned"

    def end(self) -> dict[str, Any]:
        self.hidden.backward(self.input.grad)
        self.optimizer.step()
        result = self.optimizer.last_result
        assert result is not None
        assert self.optimizer.step_was_skipped == (result.outcome not in ("APPLIED", "PARTIAL"))
        told = ("step", "outcome", "reason", "detail", "not_applied", "ranks_left_out", "clip_coefficient")
        return {name: getattr(result, name) for name in told}

    def step_otherwise(self) -> dict[str, Any]:
        """With another lr than the other ranks: the step comes to nothing."""
        group = self.optimizer.param_groups[0]
        group["lr"] = 2 * LR
        try:
            return self.step()
        finally:
            group["lr"] = LR

    def weights(self) -> list[list[float]]:
        return [parameter.detach().flatten().tolist() for parameter in self.model.parameters()]

    def close(self) -> str:
        self.optimizer.close()
        return "closed"


def obey(pipe: Connection, others: Sequence[Connection], *arguments: Any) -> None:
    for other in others:  # or this process would keep them open after their program's end
        other.close()
    try:
        member = Member(*arguments)
        pipe.send("attached")
        while True:
            pipe.send(getattr(member, pipe.recv())())
    except EOFError:
        pass
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


def conduct(server: str, run: str) -> None:
    """Carries out the orders on stdin, one a line: {"do": ..., "ranks": [...]}."""
    pipes: dict[int, Connection] = {}
    processes: dict[int, Any] = {}
    for line in sys.stdin:
        order = json.loads(line)
        for rank in order["ranks"]:
            if order["do"] == "start":
                pipes[rank], end = FORKS.Pipe()
                arguments = (end, list(pipes.values()), order["server"] or server, run, rank, order["options"])
                processes[rank] = FORKS.Process(target=obey, args=arguments, daemon=True)
                processes[rank].start()
                end.close()
            elif order["do"] == "kill":
                processes[rank].kill()
                processes[rank].join()
                pipes.pop(rank).close()
            elif order["do"] != "hear":
                pipes[rank].send(order["do"])
        if order["do"] == "hear":
            answers = [pipes[r].recv() if pipes[r].poll(PATIENCE_S) else "no answer" for r in order["ranks"]]
            print(json.dumps(answers), flush=True)
