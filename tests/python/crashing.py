"""A training whose daemon is ended, and that goes on over the same folder: what the tests of crashes and of power cuts
share.

    uncut = finish(tmp_path / "uncut", SMALL)
    with Daemon(storage=folder) as daemon: ...     # ended in the middle of go_on(daemon, SMALL)
    assert finish(folder, SMALL) == uncut
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import ballast
from ballast import _core
from daemon import ROOT, Daemon
from models import layered

RUN = "crashed"
SOURCES = [*(ROOT / "server").rglob("*.cc")]
FAILPOINTS = sorted({name for path in SOURCES for name in re.findall(r'Failpoint\("([^"]+)"\)', path.read_text())})


@dataclass(frozen=True)
class Training:
    """Up to the step `last`, each step on a batch of its own, so that two that make the same steps end with the same
    bits."""

    last: int
    width: int = 33  # of three layers
    every: int = 2  # steps, a checkpoint
    awaited: bool = True  # each checkpoint is waited for, so that none is left out while another is being written
    durability: Literal["checkpoint", "journal", "journal_sync"] = "journal_sync"


SMALL = Training(last=9)


class Promises:
    """What a trainer was told: the last step that is durable, and the last that was applied."""

    def __init__(self, on_step: Callable[[int, int], None] = lambda step, count: None) -> None:
        self.durable = self.applied = self.count = 0
        self._on_step = on_step  # told each step, and how many promises were made by then

    def hear(self, applied: int, durable: int) -> None:
        self.applied = max(self.applied, applied)
        if durable > self.durable:
            self.durable = durable
            self.count += 1
        self._on_step(applied, self.count)


def status_of(daemon: Daemon) -> dict[str, Any] | None:
    """The run's, as the daemon has it; None: it has none."""
    client = _core.Client.connect(daemon.server, 5.0, 5.0)
    try:
        runs = client.list_runs()["runs"]
    finally:
        client.close()
    return runs[0] if runs else None


def go_on(daemon: Daemon, training: Training, promises: Promises) -> None:
    """From where the run is. BallastError: the daemon ended before."""
    there = status_of(daemon) is not None
    model = layered(seed=3, width=training.width)
    optimizer = ballast.AdamW(
        model.parameters(),
        lr=0.01,
        server=daemon.server,
        run=RUN,
        weights="server" if there else None,
        checkpoint_every_steps=training.every,
        durability=training.durability,
        snapshots=2,
        snapshot_every=training.every,
        reconnect_timeout=0.5,
    )
    try:
        optimizer.connect()
        for step in range(optimizer.run_status()["step"] + 1, training.last + 1):
            batch = torch.randn(8, training.width, generator=torch.Generator().manual_seed(step))
            (model(batch) - batch).square().mean().backward()
            optimizer.step()
            durable = optimizer.checkpoint() if training.awaited and step % training.every == 0 else 0
            optimizer.wait()
            promises.hear(step, max(durable, optimizer.last_result.durable_step))
    finally:
        optimizer.close()


def digests(storage: Path) -> str:
    """SHA-256 of the weights and moments of the newest checkpoint."""
    newest = max((storage / "runs" / RUN).glob("0*-step-*"))
    lines = (newest / "SHA256SUMS").read_text().splitlines()
    return "\n".join(line for line in lines if line.endswith(".safetensors") and "-of-" in line)


def finish(storage: Path, training: Training) -> str:
    """From where the folder's run is, without being disturbed. The digests at the end."""
    storage.mkdir(exist_ok=True)
    with Daemon(storage=storage) as daemon:
        go_on(daemon, training, Promises())
        daemon.drain()
    return digests(storage)


def come_back(storage: Path, promised: int, most: int = 10**9) -> int:
    """A daemon over the folder has what was promised, nothing after `most`, and finds nothing damaged. The step at which
    it is."""
    with Daemon(storage=storage) as daemon:
        status = status_of(daemon)
    found = 0 if status is None else int(status["step"])
    assert found >= promised, f"step {promised} was promised, and the daemon came back at {found}"
    assert found <= most, f"what came after step {most} was undone, and the daemon came back at {found}"
    if status is not None:
        assert "damaged" not in status["durability"]["restored"], status["durability"]["restored"]
    return found
