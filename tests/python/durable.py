"""A small run in training on a daemon with storage, and what lies on the disk of it. For tests."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import torch

import ballast
from ballast import _core
from daemon import ROOT, Daemon
from models import layered

RUN = "durable"
CTL = ROOT / "build" / "dev" / "client" / "cpp" / "ballastctl"


def train(server: str, last: int, run: str = RUN, **options: Any) -> None:
    """Steps up to `last`, each on a batch of its own, from where the run is."""
    model = layered(seed=3, width=33)
    weights = "server" if any(status["run_id"] == run for status in runs_of(server)) else None
    optimizer = ballast.AdamW(model.parameters(), lr=0.01, server=server, run=run, weights=weights, **options)
    optimizer.connect()
    for step in range(optimizer.run_status()["step"] + 1, last + 1):
        batch = torch.randn(8, 33, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
    optimizer.close()


def runs_of(server: str) -> list[Any]:
    """Their statuses."""
    client = _core.Client.connect(server, 5.0, 5.0)
    try:
        return list(client.list_runs()["runs"])
    finally:
        client.close()


def trained(storage: Path, *lasts: int, run: str = RUN, **options: Any) -> list[Path]:
    """Trains to each of these steps with a daemon of its own, and drains it. The run's checkpoints, oldest first."""
    for last in lasts:
        with Daemon(storage=storage) as daemon:
            train(daemon.server, last, run, **options)
            daemon.drain()
    return checkpoints(storage, run)


def checkpoints(storage: Path, run: str = RUN) -> list[Path]:
    """Those that count, oldest first."""
    return sorted((storage / "runs" / run).glob("0*-step-*"))


def planes(checkpoint: Path) -> dict[str, bytes]:
    """What lies in the files of weights and moments."""
    return {path.name: path.read_bytes() for path in checkpoint.glob("*-of-*.safetensors")}


def known(checkpoint: Path) -> dict[str, Any]:
    """What the run knew, without times and generations, in which two runs differ."""
    run = json.loads((checkpoint / "run.json").read_text())
    found = {name: run[name] for name in ("step", "updates", "updatedIn", "result", "detector", "counts", "policy")}
    found["result"].pop("durableStep", None)  # which depends on when it was written
    return found


def files_in(folder: Path) -> dict[str, bytes]:
    """All of them, by their paths in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def ctl(*words: Any, server: str = "127.0.0.1:1") -> subprocess.CompletedProcess[str]:
    """ballastctl's answer."""
    return subprocess.run([CTL, "--server", server, *map(str, words)], capture_output=True, text=True, check=False)
