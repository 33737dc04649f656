"""A trainer's daemon, a relay of it, a relay of that, and a reader there, each a process: the middle one is killed, started
anew and stopped for a while, and what the reader writes has the trainer's bits."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ballast
import pytest
import torch
from browser import Browser, find_browser
from daemon import BALLASTCTL, Daemon, plain_environment, until
from safetensors.torch import load_file

RUN = "relayed"


def relay_of(folder: Path, upstream: str, *flags: str) -> Daemon:
    folder.mkdir()
    return Daemon(folder, "--relay.upstream", upstream, "--relay.runs", RUN, *flags)


@contextmanager
def following(server: str, out: Path) -> Iterator[subprocess.Popen]:
    """ballastctl follow, which writes a file of each version."""
    command = [BALLASTCTL, "--server", server, "follow", RUN, "--out", out, "--retain", "100", "--wait-for-run", "60"]
    with (out.parent / "follow.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=plain_environment())
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


class Trainer:
    """Steps of a small model, whose weights are kept by step."""

    def __init__(self, server: str):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).bfloat16()
        named = self.model.named_parameters()
        self.optimizer = ballast.AdamW(named, lr=1e-3, server=server, run=RUN, follow=True)
        self.seen: dict[int, dict[str, torch.Tensor]] = {}
        self.step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(self.step)).bfloat16()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.wait()
            self.seen[self.step] = {name: t.detach().clone() for name, t in self.model.named_parameters()}


def metric(daemon: Daemon, series: str) -> float | None:
    lines = daemon.get("/metrics")[1].splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{series} ")), None)


def test_a_reader_below_two_relays_has_the_trainers_bits_whatever_becomes_of_the_middle(tmp_path):
    out = tmp_path / "versions"
    with Daemon(tmp_path) as root:
        trainer = Trainer(root.server)
        trainer.train(1)
        with relay_of(tmp_path / "middle", root.server) as middle, relay_of(tmp_path / "leaf", middle.server) as leaf:
            with following(leaf.server, out) as reader:

                def expect_newest() -> None:
                    file = out / f"step-{trainer.step}.safetensors"
                    until(f"{file.name} is there", lambda: reader.poll() is not None or file.exists())
                    assert file.exists(), (tmp_path / "follow.log").read_text()
                    for name, weights in load_file(file).items():
                        assert torch.equal(weights, trainer.seen[trainer.step][name]), (trainer.step, name)

                expect_newest()
                for _ in range(3):
                    trainer.train(1)
                    expect_newest()
                assert metric(root, f'ballast_followers{{run_id="{RUN}"}}') == 1

                middle.process.kill()  # the middle is gone; the run trains on
                middle.process.wait()
                trainer.train(2)
                until("the leaf says so", lambda: metric(leaf, f'ballast_relay_connected{{run_id="{RUN}"}}') == 0)
                told = leaf.ctl("run", RUN)
                assert "not connected" in told.stdout and f"from {middle.server}" in " ".join(told.stdout.split())
                assert reader.poll() is None
                middle.restart()
                expect_newest()

                middle.process.send_signal(signal.SIGSTOP)  # it says nothing, and its connections stay
                trainer.train(2)
                until("the leaf says so", lambda: metric(leaf, f'ballast_relay_connected{{run_id="{RUN}"}}') == 0)
                middle.process.send_signal(signal.SIGCONT)
                expect_newest()
                trainer.train(1)
                expect_newest()

            assert f"relay of {middle.server}, below 1 more relay" in " ".join(leaf.ctl("status").stdout.split())
            assert "relayed" in leaf.ctl("runs").stdout
            refused = leaf.ctl("delete", RUN)
            assert refused.returncode != 0 and f"this daemon is a relay of {middle.server}" in refused.stderr
            refused = leaf.ctl("rewind", RUN)
            assert refused.returncode == 1 and f"relayed here from {middle.server}" in refused.stderr, refused.stderr
        trainer.optimizer.close()


def test_a_relay_and_its_reader_may_be_started_before_the_trainer(tmp_path):
    out = tmp_path / "versions"
    with Daemon(tmp_path) as root, relay_of(tmp_path / "relay", root.server) as relay, following(relay.server, out):
        log = tmp_path / "follow.log"
        until("the reader waits", lambda: f"for run '{RUN}'" in log.read_text())
        trainer = Trainer(root.server)
        trainer.train(1)
        until("its version is there", (out / "step-1.safetensors").exists)
        for name, weights in load_file(out / "step-1.safetensors").items():
            assert torch.equal(weights, trainer.seen[1][name]), name
        trainer.optimizer.close()


def test_why_it_has_nothing_of_a_run_is_said_at_once(tmp_path):
    """A reader is told to ask again, for as long as it likes to; who looks at the relay wants to know."""
    with Daemon(tmp_path) as root, relay_of(tmp_path / "relay", root.server) as relay:
        assert root.stop() == 0
        until("it has asked", lambda: "refused" in relay.ctl("runs").stdout)
        assert f"{RUN}: nothing comes from {root.server}: " in relay.ctl("runs").stdout
        told = subprocess.run(
            [BALLASTCTL, "--server", relay.server, "run", RUN], capture_output=True, text=True, timeout=30
        )
        assert told.returncode == 0 and f"{root.server}; not connected: " in told.stdout, told.stdout + told.stderr


@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")
def test_the_page_says_where_a_run_comes_from(tmp_path):
    with Daemon(tmp_path) as root:
        trainer = Trainer(root.server)
        trainer.train(2)
        with relay_of(tmp_path / "relay", root.server, "--relay.runs", f"{RUN},other") as relay, Browser(
            tmp_path
        ) as page:
            page.open(f"http://{relay.ops}/#run={RUN}")
            page.wait_for("document.title !== ''")
            until("it is connected", lambda: f"Relayed from {root.server}" in page.text("#run-state"))
            until("its step is shown", lambda: "The weights here are of step 2" in page.text("#run-state"))
            page.evaluate("location.hash = 'run=other'")
            until("the other is not there", lambda: f"Nothing comes from {root.server}" in page.text("#run-state"))
            assert page.complaints == []
        trainer.optimizer.close()


def test_a_trainer_is_told_where_to_train(tmp_path):
    with Daemon(tmp_path) as root, relay_of(tmp_path / "relay", root.server) as relay:
        weights = torch.nn.Parameter(torch.zeros(8))
        weights.sum().backward()
        optimizer = ballast.SGD([("w", weights)], lr=0.1, server=relay.server, run=RUN)
        with pytest.raises(ballast.BallastError, match=f"(is relayed from|this daemon is a relay of) {root.server}"):
            optimizer.step()
        assert relay.stop() == 0
