"""A tree of relays, each in a network namespace of its own, and readers of all of them, while the network of one relay fails:

    trainer's daemon --- upper --- lower
                     `-- beside

upper's network is cut off, deaf, mute or slow (partitions.py). Meanwhile the trainer trains on, and readers of its daemon and of
beside keep up; upper and lower show that nothing comes, where nothing does. Afterwards all readers have what is newest, and
every version that any of them has written is the trainer's, to the bit.

    relay_partitions.py [KIND...]

KIND, and what it needs: as partitions.py.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from daemon import BALLASTCTL, plain_environment, until
from partitions import DROP, PORT, TRAINS, Network, daemon_in, lacking
from safetensors.torch import load_file, save_file
from torch import nn

import ballast

RUN = "relayed"
NAMES = ("daemon", "upper", "lower", "beside")  # in the order of their namespaces
UPSTREAMS = {"upper": "daemon", "lower": "upper", "beside": "daemon"}
CONNECTED = f'ballast_relay_connected{{run_id="{RUN}"}}'
LONG_S = 120.0  # for what takes 8 s where a connection must be found dead, on a machine that has other work
ASK = f"import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:{PORT + 1}/metrics').read().decode())"


def address(name: str) -> str:
    return f"10.77.0.{10 + NAMES.index(name)}"


def train(server: str, folder: Path) -> None:
    """As many steps as each line of input says; each step's weights become a file, and what was asked for is answered."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
    options = {"server": server, "run": RUN, "follow": True}
    step = 0
    with ballast.AdamW(model.named_parameters(), lr=1e-2, **options) as optimizer:
        for line in sys.stdin:
            for _ in range(int(line)):
                step += 1
                x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
                nn.functional.mse_loss(model(x), x[:, :1].sin()).backward()
                optimizer.step()
                optimizer.wait()
                save_file({name: p.detach().clone() for name, p in model.named_parameters()}, folder / f"step-{step}")
            print(step, flush=True)


class Tree:
    """All processes, until the end of the block that has it."""

    def __init__(self, network: Network, folder: Path, stack: ExitStack):
        self.network = network
        self.trained, self.step = folder / "trained", 0
        self.trained.mkdir()
        self._inside = {name: ["ip", "netns", "exec", network.spokes[place]] for place, name in enumerate(NAMES)}
        self._hub = ["ip", "netns", "exec", network.hub]
        self._folder, self._stack = folder, stack
        self._start("daemon", TRAINS[2:])
        self._trainer = stack.enter_context(self._training())
        self.train(1)
        for name, upstream in UPSTREAMS.items():
            self._start(name, ["--relay.upstream", f"{address(upstream)}:{PORT}", "--relay.runs", RUN])
            until(f"{name} is connected", lambda n=name: self.connected(n), LONG_S)
        self.out = {name: folder / f"read-{name}" for name in NAMES}
        self.readers = {name: stack.enter_context(self._reading(name, folder)) for name in NAMES}

    def _start(self, name: str, flags: list[str]) -> None:
        flags = ["--ops_http.listen", f"127.0.0.1:{PORT + 1}", *flags]
        self._stack.enter_context(daemon_in(self._inside[name], address(name), self._folder, flags))

    @contextmanager
    def _training(self) -> Iterator[subprocess.Popen]:
        command = [*self._hub, sys.executable, __file__, "--train", f"{address('daemon')}:{PORT}", str(self.trained)]
        pipe, environment = subprocess.PIPE, plain_environment() | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        yield process
        process.kill()
        process.communicate()

    @contextmanager
    def _reading(self, name: str, folder: Path) -> Iterator[subprocess.Popen]:
        """ballastctl follow, which writes a file of each version."""
        flags = ["--server", f"{address(name)}:{PORT}", "--timeout", str(LONG_S)]
        follow = ["follow", RUN, "--out", self.out[name], "--retain", "1000"]
        with (folder / f"read-{name}.log").open("w") as log:
            command = [*self._hub, BALLASTCTL, *flags, *follow]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=plain_environment())
        yield process
        process.kill()
        process.wait()

    def train(self, steps: int) -> None:
        self._trainer.stdin.write(f"{steps}\n")
        self._trainer.stdin.flush()
        self.step = int(self._trainer.stdout.readline())

    def connected(self, name: str) -> bool:
        """What the alert BallastRelayDisconnected looks at, of this relay."""
        told = subprocess.run([*self._inside[name], sys.executable, "-c", ASK], capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        return any(line.split() == [CONNECTED, "1"] for line in told.stdout.splitlines())

    def expect_newest(self, *names: str) -> None:
        for name in names:
            newest = self.out[name] / f"step-{self.step}.safetensors"
            until(
                f"{newest} is there", lambda n=name, f=newest: self.readers[n].poll() is not None or f.exists(), LONG_S
            )
            assert newest.exists(), (newest.parent.parent / f"read-{name}.log").read_text()

    def expect_bits(self) -> int:
        """Of everything that was written; how many versions these are."""
        files = [file for folder in self.out.values() for file in folder.glob("*.safetensors")]
        for file in files:
            wanted = load_file(self.trained / file.stem)
            read = load_file(file)
            assert read.keys() == wanted.keys() and all(torch.equal(read[name], wanted[name]) for name in wanted), file
        return len(files)


def fail(tree: Tree, kind: str) -> int:
    tree.train(2)
    tree.expect_newest(*NAMES)
    with tree.network.failing(NAMES.index("upper"), kind):
        if DROP[kind]:
            for name in ("upper", "lower"):
                until(f"{name} says that nothing comes", lambda n=name: not tree.connected(n), LONG_S)
        tree.train(5)
        tree.expect_newest("daemon", "beside")
        assert tree.connected("beside")
        if not DROP[kind]:
            tree.expect_newest("upper", "lower")
            assert tree.connected("upper") and tree.connected("lower")
    tree.expect_newest(*NAMES)
    for name in UPSTREAMS:
        until(f"{name} is connected", lambda n=name: tree.connected(n), LONG_S)
    tree.train(2)
    tree.expect_newest(*NAMES)
    return tree.expect_bits()


def main(kinds: list[str]) -> None:
    if why := lacking():
        print(f"NOT RUN: {why}")
        return
    for kind in kinds:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ballast-relays-") as name, ExitStack() as stack:
            network = stack.enter_context(Network(len(NAMES)))
            tree = Tree(network, Path(name), stack)
            versions = fail(tree, kind)
            print(
                f"{kind}: {tree.step} steps, {versions} versions of {len(NAMES)} readers, each the trainer's to the bit, "
                f"{time.monotonic() - began:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2], Path(sys.argv[3]))
    else:
        main(sys.argv[1:] or list(DROP))
