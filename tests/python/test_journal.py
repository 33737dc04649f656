"""A run with a journal: a killed daemon comes back at the very step that it had promised, to the bit as one that never
stopped; what it cannot know, it says."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ballast
from ballast import _core
from daemon import ROOT, Daemon
from models import layered

RUN = "journaled"
# The first step's checkpoint begins the journal, and no other is written.
SYNC: dict[str, Any] = {"durability": "journal_sync", "checkpoint_every_seconds": 1e6}

Weights = list[torch.Tensor]
Optimizer = ballast.AdamW


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "storage"
    made.mkdir()
    return made


def status_of(daemon: Daemon) -> dict[str, Any]:
    client = _core.Client.connect(daemon.server, 5.0, 5.0)
    try:
        return client.list_runs()["runs"][0] | {"durability": client.list_runs()["runs"][0].get("durability")}
    finally:
        client.close()


@contextmanager
def training(daemon: Daemon, state: object = None, **options: Any) -> Iterator[tuple[torch.nn.Module, Optimizer]]:
    """The model, which has the weights of the run, where there is one."""
    client = _core.Client.connect(daemon.server, 5.0, 5.0)
    weights = "server" if client.list_runs()["runs"] else None
    client.close()
    model = layered(seed=3, width=33)
    options = {"lr": 0.01, "run": RUN, "weights": weights, "reconnect_timeout": 1, **options}
    kind = options.pop("kind", ballast.AdamW)
    optimizer = kind(model.parameters(), server=daemon.server, **options)
    if state is not None:
        optimizer.register_client_state("state", state)
    optimizer.connect()
    try:
        yield model, optimizer
    finally:
        optimizer.close()


def steps(model: torch.nn.Module, optimizer: Optimizer, last: int, micros: int = 1) -> Weights:
    """Steps up to `last`, each on batches of its own, from where the run is."""
    for step in range(optimizer.run_status()["step"] + 1, last + 1):
        for micro in range(micros):
            batch = torch.randn(8, 33, generator=torch.Generator().manual_seed(100 * step + micro))
            loss = model(batch).square().mean()
            loss.backward()
        optimizer.step(loss=loss.item())
    optimizer.wait()
    optimizer.pull()
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(ours: Weights, theirs: Weights) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "runs" / RUN / "journal").glob("segment-*"))


def run_killed_at(folder: Path, last: int, options: dict[str, Any], micros: int = 1) -> Weights:
    with Daemon(storage=folder) as daemon, training(daemon, **options) as (model, optimizer):
        weights = steps(model, optimizer, last, micros)
        assert optimizer.last_result.durable_step == last
        daemon.kill()
    return weights


KINDS: dict[str, dict[str, Any]] = {
    "release": {},
    "staged, clipped": {"commit": "staged", "max_grad_norm": 0.05},
    "clipped by tensor": {"tensor_clip": "adagc"},
    "bf16 gradients": {"gradient_dtype": "bf16"},
    "accumulated": {"gradient_accumulation_steps": 2},
    "curvature": {"spikes": ballast.Spikes(curvature=True)},
    "matrices": {"kind": ballast.Muon, "adamw_lr": 0.01},
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back_at_the_last_step_and_goes_on_to_the_bit(kind: str, folder: Path, tmp_path: Path) -> None:
    options = SYNC | KINDS[kind]
    micros = options.get("gradient_accumulation_steps", 1)
    whole = tmp_path / "whole"
    whole.mkdir()
    with Daemon(storage=whole) as daemon, training(daemon, **(options | {"durability": "checkpoint"})) as made:
        uncut = steps(*made, 12, micros)
    for last in (5, 9):
        killed = run_killed_at(folder, last, options, micros)
        with Daemon(storage=folder) as daemon:
            assert status_of(daemon)["step"] == last
            with training(daemon, **options) as made:
                assert same(steps(*made, last, micros), killed)
            daemon.kill()
    with Daemon(storage=folder) as daemon, training(daemon, **options) as made:
        assert same(steps(*made, 12, micros), uncut)


def test_a_journal_that_is_not_synced_for_each_step_loses_few(folder: Path) -> None:
    options = SYNC | {"durability": "journal", "journal_steps": 3}
    with Daemon(storage=folder) as daemon, training(daemon, **options) as (model, optimizer):
        steps(model, optimizer, 20)
        durable = optimizer.last_result.durable_step
        daemon.kill()
    assert durable >= 20 - 3 - 1  # the last step's result was told as it closed
    with Daemon(storage=folder) as daemon:
        assert durable <= status_of(daemon)["step"] <= 20


def test_a_checkpoint_makes_what_came_before_it_superfluous(folder: Path) -> None:
    with Daemon(storage=folder) as daemon, training(daemon, **SYNC) as (model, optimizer):
        steps(model, optimizer, 3)
        before = segments(folder)
        assert optimizer.checkpoint() == 3
        killed = steps(model, optimizer, 7)
        assert len(before) == 1 and before[0] not in segments(folder)
        daemon.kill()
    with Daemon(storage=folder) as daemon, training(daemon, **SYNC) as made:
        assert same(steps(*made, 7), killed)


@pytest.mark.parametrize("to", [2, 4])  # before the checkpoint that the journal goes on from, and after it
def test_a_rewind_is_not_undone_by_a_crash(to: int, folder: Path) -> None:
    options = SYNC | {"snapshots": 6, "snapshot_every": 1}
    with Daemon(storage=folder) as daemon, training(daemon, **options) as (model, optimizer):
        steps(model, optimizer, 2)
        optimizer.checkpoint()
        steps(model, optimizer, 3)
        optimizer.checkpoint()
        steps(model, optimizer, 6)
        assert optimizer.rewind(to=to) == to
        daemon.kill()
    with Daemon(storage=folder) as daemon:
        assert status_of(daemon)["step"] == to
        with training(daemon, **options) as (model, optimizer):
            killed = steps(model, optimizer, to + 2)
            assert optimizer.last_result.durable_step == to + 2
        daemon.kill()
    with Daemon(storage=folder) as daemon, training(daemon, **options) as made:
        assert same(steps(*made, to + 2), killed)


def test_client_state_and_figures_come_back_with_the_step(folder: Path) -> None:
    class Position:
        at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    position = Position()
    with Daemon(storage=folder) as daemon, training(daemon, position, **SYNC) as (model, optimizer):
        for step in range(1, 6):
            position.at = 10 * step
            steps(model, optimizer, step)
        loss = status_of(daemon)["loss"]
        daemon.kill()
    position.at = -1
    with Daemon(storage=folder) as daemon:
        status = status_of(daemon)
        assert (status["step"], status["loss"], status["steps_applied"]) == (5, loss, 5)
        with training(daemon, position, **SYNC):
            assert position.at == 50


def test_what_a_crash_tore_off_is_left_out(folder: Path) -> None:
    run_killed_at(folder, 6, SYNC)
    newest = segments(folder)[-1]
    whole = newest.read_bytes()
    newest.write_bytes(whole[: len(whole) - 4096])
    with Daemon(storage=folder) as daemon:
        assert status_of(daemon)["step"] == 5
        with training(daemon, **SYNC) as made:
            steps(*made, 8)
        daemon.kill()
    with Daemon(storage=folder) as daemon:
        assert status_of(daemon)["step"] == 8


def test_damage_in_the_middle_is_refused_and_named(folder: Path) -> None:
    run_killed_at(folder, 6, SYNC)
    newest = segments(folder)[-1]
    content = bytearray(newest.read_bytes())
    content[2 * 4096 + 100] ^= 1
    newest.write_bytes(content)
    with Daemon(storage=folder) as daemon:
        client = _core.Client.connect(daemon.server, 5.0, 5.0)
        assert client.list_runs()["runs"] == []
        client.close()
        with pytest.raises(
            ballast.BallastError, match=rf"{newest.name} is damaged: frame 1, .*give those steps up: move"
        ):
            with training(daemon, **SYNC):
                pass
    shutil.move(newest.parent, folder / "away")
    with Daemon(storage=folder) as daemon:
        assert status_of(daemon)["step"] == 1


def test_a_restore_of_a_checkpoint_leaves_the_journal_behind(folder: Path) -> None:
    with Daemon(storage=folder) as daemon, training(daemon, **SYNC) as (model, optimizer):
        steps(model, optimizer, 2)
        optimizer.checkpoint()
        steps(model, optimizer, 5)
        ctl = [ROOT / "build" / "dev" / "client" / "cpp" / "ballastctl", f"--server={daemon.server}"]
        subprocess.run([*ctl, "restore", RUN, "--step=2"], check=True, timeout=60)
        daemon.kill()
    with Daemon(storage=folder) as daemon:
        assert status_of(daemon)["step"] == 2


def test_a_deleted_run_leaves_no_journal(folder: Path) -> None:
    with Daemon(storage=folder) as daemon:
        with training(daemon, **SYNC) as made:
            steps(*made, 3)
        assert segments(folder)
        client = _core.Client.connect(daemon.server, 5.0, 5.0)
        client.delete_run(RUN, force=True)
        client.close()
        assert not (folder / "runs" / RUN).exists()


def test_runs_that_are_deleted_leave_the_memory_of_their_journals(folder: Path) -> None:
    """16 MiB each (proto/CHECKPOINTS.md), one run after the other."""
    resident = []
    with Daemon(storage=folder) as daemon:
        for number in range(20):
            with training(daemon, run=f"r{number}", **SYNC) as made:
                steps(*made, 2)
            ballast.delete_run(f"r{number}", server=daemon.server)
            status = Path(f"/proc/{daemon.pid}/status").read_text()
            resident += [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
    assert resident[-1] - resident[1] < 64 << 10, resident


def test_wrong_options_are_refused() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4))]
    for options, message in (
        ({"durability": "always"}, "durability='always': it must be None or one of 'checkpoint', 'journal'"),
        ({"journal_steps": 4}, "journal_steps is for durability='journal'"),
        ({"durability": "journal", "journal_steps": 0}, "journal_steps=0: it must be None or a whole number from 1"),
    ):
        with pytest.raises(ballast.Rejected, match=message):
            ballast.AdamW(parameters, server="127.0.0.1:1", run=RUN, **options)


def test_a_daemon_without_storage_refuses_it_by_name() -> None:
    with Daemon() as daemon, pytest.raises(
        ballast.Rejected, match="durability is given, but this daemon has no storage"
    ):
        with training(daemon, **SYNC):
            pass


def test_nothing_is_written_while_it_is_read_back(folder: Path) -> None:
    """It takes longer than the moment after which a run looks whether a checkpoint is wanted."""
    model = layered(seed=3, width=400)
    with Daemon(storage=folder) as daemon:
        with ballast.AdamW(model.parameters(), server=daemon.server, run=RUN, **SYNC) as optimizer:
            for step in range(1, 81):
                model(torch.randn(1, 400)).square().mean().backward()
                optimizer.step()
        daemon.kill()
    for _ in range(2):
        with Daemon(storage=folder) as daemon:
            assert status_of(daemon)["step"] == 80
            daemon.kill()
