"""Two trainers of a run on three daemons, each in a network namespace of its own, whose network fails in the middle of steps:
cut off for a while, deaf, mute, or slow. All end with the bits of a run on one daemon that nothing disturbs.

    partitions.py [KIND...]

KIND: cut, deaf (the daemon hears nothing, and is heard), mute (the other way), slow; by default all, one after another. Needs
root, `ip` and `tc`; without them it prints NOT RUN and why. A cluster was not at hand: namespaces stand in for its network.
"""

import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from daemon import BALLASTD, plain_environment
from torch import nn

import ballast

PARTS, WORLD, STEPS = 3, 2, 30
FAILS_S = {"cut": 12.0, "deaf": 12.0, "mute": 12.0, "slow": 4.0}  # longer than a connection takes to be found dead, 8 s
FAILS_AT = (5, 14)  # steps, each on a daemon that is drawn
PORT = 7700
DROP = {"cut": ("ingress", "egress"), "deaf": ("ingress",), "mute": ("egress",), "slow": ()}
TRAINS = ["--ops_http.listen", "off", "--device", "cpu", "--threads", "1", "--limits.lease", "30s"]  # a daemon's flags
# One instruction, which returns TC_ACT_SHOT: of all classifiers cls_bpf alone needs no module for its action.
EVERYTHING = ["bpf", "bytecode", "1,6 0 0 2,", "direct-action"]
# Of the daemon's side: 4 Mbit/s, where a step's gradients are some 100 KB.
SLOW = ["root", "tbf", "rate", "4mbit", "burst", "16kb", "latency", "200ms"]


def run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}: {result.stderr}"


def lacking() -> str:
    """What the namespaces need and is not there; empty: nothing."""
    if os.geteuid() != 0:
        return "needs root"
    programs = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if programs:
        return f"needs {' and '.join(programs)} (package iproute2)"
    probe = f"ballast-probe-{os.getpid()}"  # files of tests run side by side, and several ask
    try:
        run("ip", "netns", "add", probe)
        run("ip", "netns", "delete", probe)
    except AssertionError as why:
        return f"cannot make a network namespace: {why}"
    return ""


class Network:
    """A hub, in which the trainers are, and a namespace for each daemon, at 10.77.0.(10 + part)."""

    def __init__(self, parts: int):
        self.hub = f"ballast-hub-{os.getpid()}"
        self.spokes = [f"ballast-d{part}-{os.getpid()}" for part in range(parts)]

    def __enter__(self) -> "Network":
        run("ip", "netns", "add", self.hub)
        self.inside(self.hub, "ip", "link", "set", "lo", "up")
        self.inside(self.hub, "ip", "link", "add", "bridge", "type", "bridge")
        self.inside(self.hub, "ip", "address", "add", "10.77.0.1/24", "dev", "bridge")
        self.inside(self.hub, "ip", "link", "set", "bridge", "up")
        for part, spoke in enumerate(self.spokes):
            run("ip", "netns", "add", spoke)
            link = f"d{part}"
            self.inside(self.hub, "ip", "link", "add", link, "type", "veth", "peer", "name", "eth", "netns", spoke)
            self.inside(self.hub, "ip", "link", "set", link, "master", "bridge", "up")
            self.inside(spoke, "ip", "address", "add", f"10.77.0.{10 + part}/24", "dev", "eth")
            for device in ("lo", "eth"):
                self.inside(spoke, "ip", "link", "set", device, "up")
            self.inside(spoke, "tc", "qdisc", "add", "dev", "eth", "clsact")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.spokes, self.hub):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def inside(self, name: str, *command: str) -> None:
        run("ip", "netns", "exec", name, *command)

    @contextmanager
    def failing(self, part: int, kind: str) -> Iterator[None]:
        spoke = self.spokes[part]
        for side in DROP[kind]:
            self.inside(spoke, "tc", "filter", "add", "dev", "eth", side, *EVERYTHING)
        if kind == "slow":
            self.inside(spoke, "tc", "qdisc", "add", "dev", "eth", *SLOW)
        yield
        for side in DROP[kind]:
            self.inside(spoke, "tc", "filter", "delete", "dev", "eth", side)
        if kind == "slow":
            self.inside(spoke, "tc", "qdisc", "delete", "dev", "eth", "root")


@contextmanager
def daemon_in(prefix: list[str], address: str, folder: Path, flags: list[str] = TRAINS) -> Iterator[str]:
    flags = ["--listen", f"{address}:{PORT}", "--insecure=true", "--shm_socket", "off", *flags]
    with (folder / f"{address}.log").open("wb") as log:
        process = subprocess.Popen(
            [*prefix, BALLASTD, *flags], stdout=subprocess.PIPE, stderr=log, text=True, env=plain_environment()
        )
    banner = process.stdout.readline()
    assert re.search(r"grpc \S+", banner), (folder / f"{address}.log").read_text()
    try:
        yield f"{address}:{PORT}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def train(server: str, rank: int) -> None:
    """One rank; prints each step as it is done, and in the end what it has."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
    options = {"server": server, "run": "parts", "rank": rank, "world": WORLD, "reconnect_timeout": 120}
    staged = {"commit": "staged", "max_grad_norm": 0.5}
    with ballast.AdamW(model.named_parameters(), lr=1e-2, **options, **staged) as optimizer:
        for step in range(1, STEPS + 1):
            drawn = torch.Generator().manual_seed(1000 * step + rank)
            x = torch.randn(8, 16, generator=drawn)
            nn.functional.mse_loss(model(x), x[:, :4].sum(1, keepdim=True).sin()).backward()
            optimizer.step()
            optimizer.wait()
            assert optimizer.last_result.outcome == "APPLIED", optimizer.last_result
            print("step", step, flush=True)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)


def trainers(prefix: list[str], server: str) -> list[subprocess.Popen]:
    command = [*prefix, sys.executable, __file__, "--rank"]
    environment = plain_environment() | {"OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen([*command, str(rank), server], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(WORLD)
    ]


def ends(ranks: list[subprocess.Popen], network: Network | None = None, kind: str = "") -> set[str]:
    """What the ranks have in the end; with the failures as they come to their steps."""
    draw = random.Random(kind)
    for line in ranks[0].stdout:
        if network is None or line.split()[0] != "step" or int(line.split()[1]) not in FAILS_AT:
            last = line
            continue
        with network.failing(draw.randrange(PARTS), kind):
            time.sleep(FAILS_S[kind])  # the failure's length, not a wait for something
    found = {last, *(rank.stdout.read().splitlines(keepends=True)[-1] for rank in ranks[1:])}
    assert [rank.wait() for rank in ranks] == [0] * WORLD
    return found


def undisturbed(folder: Path) -> set[str]:
    with daemon_in([], "127.0.0.1", folder) as server:
        return ends(trainers([], server))


def disturbed(folder: Path, kind: str) -> set[str]:
    with Network(PARTS) as network:
        inside = [["ip", "netns", "exec", spoke] for spoke in network.spokes]
        with (
            daemon_in(inside[0], "10.77.0.10", folder) as a,
            daemon_in(inside[1], "10.77.0.11", folder) as b,
            daemon_in(inside[2], "10.77.0.12", folder) as c,
        ):
            return ends(trainers(["ip", "netns", "exec", network.hub], f"{a},{b},{c}"), network, kind)


def main(kinds: list[str]) -> None:
    if why := lacking():
        print(f"NOT RUN: {why}")
        return
    with tempfile.TemporaryDirectory(prefix="ballast-partitions-") as name:
        wanted = undisturbed(Path(name))
        assert len(wanted) == 1, wanted
        for kind in kinds:
            began = time.monotonic()
            assert disturbed(Path(name), kind) == wanted, f"{kind}: the ranks ended with other weights"
            print(
                f"{kind}: {STEPS} steps of {WORLD} ranks on {PARTS} daemons, {time.monotonic() - began:.1f} s",
                flush=True,
            )
    print(f"{', '.join(kinds)}: the bits of one daemon that nothing disturbs")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        train(sys.argv[3], int(sys.argv[2]))
    else:
        main(sys.argv[1:] or list(FAILS_S))
