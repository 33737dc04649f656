"""Programs that tests run as processes of their own, to kill or interrupt. One a function; told to go on by a line."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from typing import Any

import torch

import ballast
from ballast.weights import Weights
from models import layered, until


def say(word: str) -> None:
    print(word, flush=True)


def hear() -> str:
    return sys.stdin.readline().strip()


class Announced:
    """A client whose wait for the step's end says so."""

    def __init__(self, target: Any):
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def end_step(self, *args: Any) -> Announced:
        return Announced(self._target.end_step(*args))

    def wait(self, timeout_s: float) -> Any:
        say("waiting")
        return self._target.wait(timeout_s)


def torn(server: str, run: str) -> None:
    """Pushes the last of three layers, sees its weights return, and hangs."""
    layers = layered(seed=1)
    optimizer = ballast.AdamW(layers.named_parameters(), server=server, run=run)
    last = layers[2].weight
    before = last.detach().clone()
    (last.sum() + layers[2].bias.sum()).backward()
    until(lambda: not torch.equal(last, before) and optimizer.run_status().received_bytes > 0)
    say("pushed")
    threading.Event().wait()


def leaves_a_fork(server: str, run: str) -> None:
    """Makes a step, and has a fork that keeps its connection open, as a DataLoader's worker does, until a line comes."""
    layers = layered(seed=1)
    optimizer = ballast.AdamW(layers.named_parameters(), server=server, run=run, transport="grpc")
    layers(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if os.fork() == 0:
        say("forked")
        hear()
        os._exit(0)
    threading.Event().wait()


def interrupted(server: str, run: str) -> None:
    """Is interrupted while it waits in step(), and waits on."""
    layers = layered(seed=1)
    optimizer = ballast.AdamW(layers.named_parameters(), server=server, run=run, reconnect_timeout=60)
    layers(torch.ones(2, 8)).sum().backward()
    session = optimizer._membership.session
    assert session is not None
    session._client = Announced(session._client)
    say("backward done")
    hear()
    try:
        optimizer.step()
        say("no interrupt")
    except KeyboardInterrupt:
        say("interrupted")
    pending = session._open.pop()
    assert isinstance(pending, Announced)
    session._open.append(pending._target)
    hear()
    optimizer.step()
    assert optimizer.last_result is not None
    say(f"step {optimizer.last_result.step} {optimizer.last_result.outcome}")


def full(server: str, run: str) -> None:
    """Is interrupted in a backward() that waits for a daemon which takes nothing, and ends the step."""
    weight = torch.nn.Parameter(torch.ones(1 << 23))
    options: dict[str, Any] = {"gradient_buffer_bytes": 0, "gradient_dtype": "fp32", "reconnect_timeout": 60}
    optimizer = ballast.SGD([("weight", weight)], 0.1, server=server, run=run, **options)
    optimizer.connect()
    say("connected")
    hear()
    handle = weight.register_hook(lambda gradient: say("backward"))
    try:
        weight.sum().backward()
        say("no interrupt")
    except KeyboardInterrupt:
        say("interrupted")
    handle.remove()
    hear()
    optimizer.step()
    if optimizer.last_result is None:  # the signal came before the gradient was pushed
        weight.sum().backward()
        optimizer.step()
    torch.testing.assert_close(weight, torch.full_like(weight, 0.9))
    assert optimizer.last_result is not None
    say(f"step {optimizer.last_result.step} {optimizer.last_result.outcome}")


def left_open(server: str, run: str) -> None:
    """Ends without closing its optimizer."""
    layers = layered(seed=1)
    global optimizer
    optimizer = ballast.AdamW(layers.named_parameters(), server=server, run=run)
    layers(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    say("done")


def forks(server: str, run: str) -> None:
    """Forks children that leave in every way, then trains on."""
    layers = layered(seed=1)
    optimizer = ballast.AdamW(layers.named_parameters(), server=server, run=run)
    layers(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    for leave in ("exit", "del", "use"):
        child = os.fork()
        if child == 0:
            if leave == "del":
                del optimizer
            if leave == "use":
                try:
                    layers(torch.ones(2, 8)).sum().backward()
                except ballast.Rejected as error:
                    say(f"refused: {'fork' in str(error)}")
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        say(f"{leave}: {os.waitstatus_to_exitcode(status)}")
    layers(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert optimizer.last_result is not None
    say(f"step {optimizer.last_result.step} {optimizer.last_result.outcome}")


def followed_forks(server: str, run: str) -> None:
    """Forks children that use a module which follows a run here, then goes on with it. A child that waits without end is
    killed."""
    trained, module = layered(seed=1), layered(seed=2)
    input = torch.ones(2, 8)
    optimizer = ballast.AdamW(trained.named_parameters(), server=server, run=run, follow=True)
    trained(input).sum().backward()
    optimizer.step()
    follower = ballast.follow(module, server=server, run=run)
    follower.wait()
    uses = {"forward": lambda: module(input), "wait": lambda: follower.wait(step=2), "close": follower.close}
    for name, use in uses.items():
        if os.fork() == 0:
            signal.alarm(60)
            try:
                use()
                module(input)
                say(f"{name}: module is called")
            except ballast.Rejected as error:
                say(f"{name}: {error}")
            sys.exit(0)
        say(f"{name}: {os.waitstatus_to_exitcode(os.wait()[1])}")
    trained(input).sum().backward()
    optimizer.step()
    follower.wait(step=2)
    say(f"follows: {all(torch.equal(p, q) for p, q in zip(trained.parameters(), module.parameters()))}")


def forks_that_connect(server: str, run: str) -> None:
    """Forks children that train in runs of their own: one while this process has a connection, and some at once when it has
    closed one. A child that waits without end is killed, and has said nothing."""

    def train(name: str) -> str:
        layers = layered(seed=1)
        with ballast.AdamW(layers.named_parameters(), server=server, run=f"{run}-{name}") as optimizer:
            layers(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            return str(optimizer.last_result and optimizer.last_result.outcome)

    def fork(name: str) -> None:
        if os.fork() > 0:
            _, status = os.wait()
            return say(f"{name}: {os.waitstatus_to_exitcode(status)}")
        signal.alarm(60)
        try:
            say(train(name))
        except ballast.Rejected as error:
            say(f"refused: {error}")
        sys.exit(0)

    with ballast.AdamW(layered(seed=1).named_parameters(), server=server, run=run):
        fork("beside")
    for number in range(3):
        train("parent")
        ballast.delete_run(f"{run}-parent", server=server)
        fork(f"after-{number}")


def with_state(server: str, run: str) -> None:
    """Makes steps one by one, with a scheduler and dropout, and keeps their state with the daemon."""
    from stateful import Stateful

    trainer = Stateful(server, run)
    say(f"restored {trainer.restored}")
    while hear() == "on":
        say(f"step {trainer.step()} {trainer.digest()}")


def uploads(server: str, run: str) -> None:
    """Is interrupted while it uploads its weights to a daemon that is away."""
    layers = layered(seed=1)
    optimizer = ballast.AdamW(layers.named_parameters(), server=server, run=run, reconnect_timeout=600)
    optimizer.connect()
    try:
        say("attached")
        hear()
        say("uploads")
        layers(torch.ones(2, 8)).sum().backward()
        say("no interrupt")
    except KeyboardInterrupt:
        say("interrupted")


def growing(server: str, run: str) -> None:
    """Adds a layer to its run in the middle of a training, and is killed when it is to upload the weights of that."""
    checkpoint = hear()
    model = layered(seed=1)
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "master": "fp32", "state": "fp32"}
    optimizer = ballast.AdamW(model[1:].named_parameters(), server=server, run=run, **options)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save((model.state_dict(), optimizer.state_dict()), checkpoint)
    say("saved")
    optimizer.add_param_group({"params": model[0].named_parameters(prefix="new"), "lr": 0.02})
    optimizer.param_groups[0]["eps"] = 1e-4

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    Weights.bring = die  # type: ignore[method-assign]
    model(torch.ones(4, 8)).sum().backward()
    say("not killed")


def _rank(server: str, run: str, rank: int, transport: str) -> None:
    layers = layered(seed=1)
    optimizer = ballast.AdamW(
        layers.named_parameters(), server=server, run=run, rank=rank, world=2, transport=transport, reconnect_timeout=30
    )
    try:
        say("waits")
        for step in range(1_000_000):
            layers(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            if step == 2:
                say("trains")
        say("ended")
    except ballast.BallastError as error:
        say(f"{type(error).__name__} {error}")


def rank_0(server: str, run: str) -> None:
    """Trains, as rank 0 of two, until it hears of an error, and says which."""
    _rank(server, run, 0, "grpc")


def rank_1(server: str, run: str) -> None:
    """Its peer, which shares memory with the daemon."""
    _rank(server, run, 1, "shm")


def late(server: str, run: str) -> None:
    """Takes the place of a rank of team's that was lost, and is interrupted while it waits for that. What the client
    logs is heard too."""
    from team import CONTINUE, loss_of, optimizer_of

    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
    model = layered(seed=1)
    optimizer = optimizer_of(model, server, run, 2, CONTINUE)
    while hear() == "connect":
        try:
            optimizer.connect()
            say("connected")
        except KeyboardInterrupt:
            say("interrupted")
    optimizer.pull()
    assert optimizer._membership.session is not None
    loss_of(model, optimizer._membership.session.step, 2).backward()
    optimizer.step()
    assert optimizer.last_result is not None
    say(f"step {optimizer.last_result.step} {optimizer.last_result.outcome}")


def team(server: str, run: str) -> None:
    """Forks the ranks of a run, which make what a test orders on stdin."""
    from team import conduct

    conduct(server, run)


def wrapped(server: str, run: str) -> None:
    """Forks two ranks that train in DistributedDataParallel, as often as a test orders on stdin."""
    from parallel import conduct

    conduct(server)


def looping(server: str, run: str) -> None:
    """Forks ranks that loop over loaders of different lengths, as often as a test orders on stdin."""
    from loopers import conduct

    conduct(server)


def fully_sharded(server: str, run: str) -> None:
    """Forks ranks whose model is sharded by fully_shard, as often as a test orders on stdin."""
    from fully_sharded import conduct

    conduct()


def alone(server: str, run: str) -> None:
    """Trains with a daemon of its own, as a test orders on stdin."""
    from alone import conduct

    conduct(run)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "nursery":
        from nursery import attend

        attend(socket.socket(fileno=int(sys.argv[2])))
    globals()[sys.argv[1]](*sys.argv[2:])
