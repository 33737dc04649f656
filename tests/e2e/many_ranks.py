"""Many trainers of one run, as processes, with the options as they are: one is killed and replaced, and the run is
rewound. All end with the bits of one trainer that makes every rank's batches by itself.

    many_ranks.py RANKS [grpc | auto] [none | journal | journal_sync] [int8 | tls | tokens | parts]

RANKS is a power of two, so that a mean over them is exact. The transport is by default auto: memory shared with the daemon.
With a journal the daemon is killed, too, and started again under its trainers, and once more in the end: it has the same bits.
int8: two of the layers compute in the codes that are served. tls: both ends show a certificate. tokens: and the trainers bring
a token, whose grant lets them have one stream more than there are ranks, and fewer calls a second than they make. parts: the
run is on three daemons, one of which is killed; the one trainer's run is on them, too. torch is imported once and the trainers
are forks of it.
"""

import hashlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from daemon import Daemon, Daemons
from grants import give_token
from pki import Pki
from torch import Tensor, nn

import ballast
from ballast import nn as bnn

sys.path.append(str(Path(__file__).parents[1] / "python"))
from nursery import settle

STEPS = 20
KILLED_BEFORE = 7  # this step, which the others wait in
REWOUND_AFTER = 13  # this step, to the 10th
RESTARTED_BEFORE = 17  # this step: the daemon, where it has a journal
JOURNAL_STEPS = 16  # that a journal which is not synced for each step may lack, by default
SNAPSHOTS = {"snapshots": 2, "snapshot_every": 5}
PATIENCE_S = 240
PARTS = 3

FORKS = multiprocessing.get_context("fork")


# The option `formats` of a run whose model computes in int8.
SERVED = {f"{layer}.weight": {"serving": "int8-tensor"} for layer in (0, 2)}


def make_model(place: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1))
    if place["formats"]:
        bnn.switch(model, "[02]")
        assert bnn.served_formats(model) == place["formats"]
    return model


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    random = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 16, generator=random)
    return nn.functional.mse_loss(model(x), x[:, :4].sum(1, keepdim=True).sin())


def weights_of(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.state_dict().values())).hexdigest()


def next_step(optimizer: ballast.AdamW) -> int:
    return optimizer.last_result.step + 1 if optimizer.last_result else 1


def transports_of(optimizer: ballast.AdamW, rank: int) -> set[str]:
    """The rank's, where the daemon shows one: while a run is rewound it does not."""
    lines = [line for line in optimizer.run_status()["ranks"] if line.startswith(f"rank {rank}:")]
    return {line.rpartition("transport ")[2] for line in lines if "transport " in line}


class Trainer:
    """A process that trains one rank, and tells the program of it."""

    def __init__(self, place: dict[str, Any], rank: int, world: int, role: str):
        self.rank = rank
        self.told, end = FORKS.Pipe()
        self._process = FORKS.Process(target=guarded, args=(end, train, place, rank, world, role), daemon=True)
        self._process.start()
        end.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def guarded(tell: Connection, run: Callable[..., Any], *arguments: Any) -> None:
    """`tell` gets what `run` returns, or what it raised."""
    try:
        tell.send(run(tell, *arguments))
    except BaseException:
        tell.send(traceback.format_exc())


def train(tell: Connection, place: dict[str, Any], rank: int, world: int, role: str) -> dict[str, Any]:
    model, losses, transports, rewinds = make_model(place), {}, set(), []
    restarts = rank == 0 and place["durability"] is not None
    weights = "server" if role == "successor" else None
    options = {**place, **SNAPSHOTS, "rank": rank, "world": world, "weights": weights}
    with ballast.AdamW(model.named_parameters(), lr=1e-2, **options) as optimizer:
        while (step := next_step(optimizer)) <= STEPS:
            if role == "victim" and step == KILLED_BEFORE:
                tell.send("kill me")
                signal.pause()
            if restarts and step == RESTARTED_BEFORE:
                restarts = False
                tell.send("kill the daemon")
                tell.recv()
            try:
                loss = loss_of(model, step, rank)
                losses[step] = loss.item()  # the step's, also where the daemon is killed before its result comes
                loss.backward()
                optimizer.step(loss=loss)
                transports |= transports_of(optimizer, rank)
                assert optimizer.last_result.outcome == "APPLIED", optimizer.last_result
                if role == "rewinder" and step == REWOUND_AFTER and not rewinds:
                    rewinds.append(optimizer.rewind(1))
            except ballast.RunRewound as back:
                rewinds.append(back.step)
    return {"weights": weights_of(model), "losses": losses, "rewinds": rewinds, "transports": transports}


def train_alone(_: Connection, place: dict[str, Any], world: int) -> dict[str, Any]:
    """Every rank's batches as micro-batches of one."""
    model, losses = make_model(place), {}
    with ballast.AdamW(model.named_parameters(), lr=1e-2, **place, gradient_accumulation_steps=world) as optimizer:
        for step in range(1, STEPS + 1):
            for rank in range(world):
                loss = loss_of(model, step, rank)
                losses[step, rank] = loss.item()
                (loss / world).backward()
            optimizer.step()
    return {"weights": weights_of(model), "losses": losses}


def take_over(_: Connection, place: dict[str, Any], world: int) -> dict[str, Any]:
    """What a daemon has that was started over the folder of another."""
    model = make_model(place)
    options = {**place, **SNAPSHOTS, "rank": 0, "world": world, "weights": "server"}
    with ballast.AdamW(model.named_parameters(), lr=1e-2, **options) as optimizer:
        optimizer.connect()
        return {"weights": weights_of(model), "step": next_step(optimizer) - 1}


def lasting(durability: str, step: int) -> int:
    """The step that a daemon which was killed after `step` has at least."""
    return step if durability == "journal_sync" else step - JOURNAL_STEPS


def started_at(folder: Path, flags: list[str], parts: int) -> Daemon | Daemons:
    if parts > 1:
        return Daemons(folder, parts, *flags)
    return Daemon(folder, *(flag.format(folder=folder) for flag in flags))


def check_survival(daemon: Daemon | Daemons, place: dict[str, Any], world: int, weights: str) -> None:
    with daemon:
        told, end = FORKS.Pipe(duplex=False)
        guarded(end, take_over, {**place, "server": daemon.server}, world)
        found = told.recv()
    assert isinstance(found, dict), found
    assert lasting(place["durability"], STEPS) <= found["step"] <= STEPS, found
    assert found["step"] < STEPS or found["weights"] == weights, "the daemon came back with other weights"


def role_of(rank: int, world: int) -> str:
    return {world - 2: "victim", 1: "rewinder"}.get(rank, "member")


def train_together(daemon: Daemon | Daemons, place: dict[str, Any], world: int) -> dict[int, dict[str, Any]]:
    """What each rank told at its end; for the rank that was replaced, what its successor told."""
    trainers = [Trainer(place, rank, world, role_of(rank, world)) for rank in range(world)]
    ended: dict[int, dict[str, Any]] = {}
    give_up = time.monotonic() + PATIENCE_S
    while len(ended) < world:
        by_pipe = {trainers[rank].told: rank for rank in range(world) if rank not in ended}
        ready = wait(by_pipe, timeout=max(0.0, give_up - time.monotonic()))
        assert ready, f"ranks {sorted(by_pipe.values())} did not end"
        for pipe in ready:
            rank, told = by_pipe[pipe], pipe.recv()
            if told == "kill me":
                trainers[rank].kill()
                trainers[rank] = Trainer(place, rank, world, "successor")
                continue
            if told == "kill the daemon":
                daemon.restart()
                pipe.send("it is there again")
                continue
            assert isinstance(told, dict), f"rank {rank}: {told}"
            ended[rank] = told
    return ended


def check(ranks: dict[int, dict[str, Any]], alone: dict[str, Any], world: int, transport: str, durability: str) -> None:
    taken = "shm" if transport == "auto" else transport
    for rank, told in ranks.items():
        assert told["transports"] == {taken}, f"rank {rank} took the transports {told['transports']}"
        assert told["weights"] == alone["weights"], f"rank {rank} ended with other weights"
        assert told["rewinds"][:1] == [10] and len(told["rewinds"]) == 1 + bool(durability), (rank, told["rewinds"])
        if durability:
            assert lasting(durability, RESTARTED_BEFORE - 1) <= told["rewinds"][1] < RESTARTED_BEFORE, (
                rank,
                told["rewinds"],
            )
        own = range(KILLED_BEFORE if role_of(rank, world) == "victim" else 1, STEPS + 1)
        wanted = {step: alone["losses"][step, rank] for step in own}
        other = {step: (told["losses"].get(step), wanted.get(step)) for step in {*told["losses"], *wanted}}
        other = {step: (got, loss) for step, (got, loss) in other.items() if got != loss}
        assert not other, f"rank {rank} had other losses: by step, its own and those alone: {other}"


def main() -> None:
    world, transport, durability, layers = (*sys.argv[1:], *("8", "auto", "none", "")[len(sys.argv) - 1 :])
    served = SERVED if layers == "int8" else {}
    with tempfile.TemporaryDirectory(prefix="ballast-pki-") as folder:
        flags = []
        if layers in ("tls", "tokens"):
            pki = Pki(Path(folder) / "pki")
            flags = pki.flags
            os.environ.update(pki.variables)
        if layers == "tokens":
            quotas = [f"--most-streams={int(world) + 1}", "--most-requests=16", "--most-runs=2"]
            token, access = give_token(Path(folder), "*", "admin", *quotas)
            flags += ["--access", str(access)]
            os.environ["BALLAST_TOKEN_FILE"] = str(token)
        parts = PARTS if layers == "parts" else 1
        check_ranks(int(world), transport, durability.removeprefix("none"), served, flags, parts)


def check_ranks(
    world: int, transport: str, durability: str, served: dict[str, Any], of_tls: list[str], parts: int
) -> None:
    torch.set_num_threads(1)
    settle()
    with tempfile.TemporaryDirectory(prefix="ballast-ranks-") as folder:
        flags = ["--limits.lease", "1s", "--shm_socket", "{folder}/shared/", *of_tls]
        if durability:
            flags += ["--storage.dir", "{folder}"]
        with started_at(Path(folder), flags, parts) as daemon:
            place = {
                "server": daemon.server,
                "transport": transport,
                "durability": durability or None,
                "formats": served,
            }
            started = time.monotonic()
            ranks = train_together(daemon, {**place, "run": "together"}, world)
            took = time.monotonic() - started
            told, end = FORKS.Pipe(duplex=False)
            guarded(end, train_alone, {**place, "run": "alone"}, world)
            alone = told.recv()
            assert isinstance(alone, dict), alone
        if durability:
            again = started_at(Path(folder), flags, parts)
            check_survival(again, {**place, "run": "together"}, world, alone["weights"])
    check(ranks, alone, world, transport, durability)
    disturbed = "a kill, a rewind and a restart" if durability else "a kill and a rewind"
    where = f" on {parts} daemons" if parts > 1 else ""
    print(f"{world} ranks, transport {transport}, {STEPS} steps{where}, {disturbed}: {took:.1f} s")


if __name__ == "__main__":
    main()
