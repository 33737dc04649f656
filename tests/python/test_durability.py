"""A daemon with storage that is stopped, or killed, and started again: nothing of what it wrote is lost, and a run goes on
to the bit as one that never stopped."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ballast
from ballast import _core
from daemon import ROOT, Daemon
from durable import CTL, ctl
from models import layered, until

RUN = "durable"
STEPS = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "storage"
    made.mkdir()
    return made


def train(server: str, last: int, leaves: bool = True, **options: Any) -> ballast.AdamW:
    """Steps up to `last`, each on a batch of its own, from where the run is. Then it leaves the run, and that is written."""
    model = layered(seed=3, width=33)
    client = _core.Client.connect(server, 5.0, 5.0)
    weights = "server" if client.list_runs()["runs"] else None
    client.close()
    optimizer = ballast.AdamW(model.parameters(), lr=0.01, server=server, run=RUN, weights=weights, **options)
    optimizer.connect()
    for step in range(optimizer.run_status()["step"] + 1, last + 1):
        batch = torch.randn(8, 33, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
    if leaves:
        optimizer.close()
    return optimizer


def checkpoints(folder: Path) -> list[Path]:
    """Those that count, oldest first."""
    return sorted(path for path in (folder / "runs" / RUN).glob("0*-step-*"))


def planes(checkpoint: Path) -> dict[str, bytes]:
    """What lies in the files of weights and moments."""
    return {path.name: path.read_bytes() for path in checkpoint.glob("*-of-*.safetensors")}


def known(checkpoint: Path) -> dict[str, Any]:
    """What the run knew, without times and generations, in which two runs differ."""
    run = json.loads((checkpoint / "run.json").read_text())
    return {name: run[name] for name in ("step", "updates", "updatedIn", "result", "detector", "counts", "policy")}


def test_a_run_that_was_stopped_goes_on_to_the_bit(folder: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    with Daemon(storage=whole) as daemon:
        train(daemon.server, STEPS)
        daemon.drain()
    for last in (5, 9, STEPS):
        with Daemon(storage=folder) as daemon:
            train(daemon.server, last)
            daemon.drain()
    ours, theirs = checkpoints(folder)[-1], checkpoints(whole)[-1]
    assert ours.name.endswith(f"-step-{STEPS}") and theirs.name.endswith(f"-step-{STEPS}")
    assert planes(ours) == planes(theirs)
    mine, its = known(ours), known(theirs)
    assert mine["result"].pop("durableStep") == "9" and "durableStep" not in its["result"]
    assert mine == its


def test_a_killed_daemon_comes_back_at_its_newest_checkpoint(folder: Path) -> None:
    with Daemon(storage=folder) as daemon:
        train(daemon.server, 4)
        daemon.drain()
    with Daemon(storage=folder) as daemon:
        trainer = train(daemon.server, 7, leaves=False)
        daemon.kill()
    with Daemon(storage=folder) as daemon:
        with status_of(daemon) as status:
            assert (status["step"], status["weights_loaded"], status["state"]) == (4, True, "FINISHED")
    assert trainer.run == RUN, "it has not left: then step 7 would have been written"


def test_damage_is_found_and_the_one_before_is_taken_and_said(folder: Path) -> None:
    for last in (3, 6):
        with Daemon(storage=folder) as daemon:
            train(daemon.server, last)
            daemon.drain()
    newest = checkpoints(folder)[-1]
    [optimizer] = newest.glob("optimizer-*")
    content = bytearray(optimizer.read_bytes())
    content[-1] ^= 1
    optimizer.write_bytes(content)
    with Daemon(storage=folder) as daemon, status_of(daemon) as status:
        assert status["step"] == 3
        assert optimizer.name in status["durability"]["restored"]


def test_another_spec_is_refused_by_the_field_in_which_it_differs(folder: Path) -> None:
    with Daemon(storage=folder) as daemon:
        train(daemon.server, 2)
        daemon.drain()
    with Daemon(storage=folder) as daemon:
        with pytest.raises(ballast.BallastError, match="with another spec: .*state"):
            train(daemon.server, 3, state="bf16")


def test_a_run_without_one_that_can_be_read_is_not_begun_anew(folder: Path) -> None:
    with Daemon(storage=folder) as daemon:
        train(daemon.server, 2)
        daemon.drain()
    [only] = checkpoints(folder)
    (only / "manifest.json").unlink()
    with Daemon(storage=folder) as daemon:
        with pytest.raises(ballast.BallastError, match="manifest.json is damaged: it is missing"):
            train(daemon.server, 3)
        client = _core.Client.connect(daemon.server, 5.0, 5.0)
        client.delete_run(RUN, force=True)
        client.close()
        train(daemon.server, 1)
    assert not only.exists()


def test_a_deleted_run_does_not_come_back(folder: Path) -> None:
    with Daemon(storage=folder) as daemon:
        train(daemon.server, 2)
        daemon.drain()
    with Daemon(storage=folder) as daemon:
        client = _core.Client.connect(daemon.server, 5.0, 5.0)
        client.delete_run(RUN, force=True)
        client.close()
        daemon.kill()
    with Daemon(storage=folder) as daemon:
        client = _core.Client.connect(daemon.server, 5.0, 5.0)
        assert client.list_runs()["runs"] == []
        client.close()


def test_a_run_whose_memory_is_freed_is_written_before_it_goes(folder: Path) -> None:
    with Daemon(storage=folder) as daemon:
        train(daemon.server, 3)
        client = _core.Client.connect(daemon.server, 5.0, 5.0)
        client.delete_run(RUN, force=False, keep_checkpoints=True)
        client.close()
        daemon.kill()
    assert checkpoints(folder)[-1].name.endswith("-step-3")
    with Daemon(storage=folder) as daemon, status_of(daemon) as status:
        assert status["step"] == 3


def step(model: torch.nn.Module, optimizer: ballast.AdamW, seed: int) -> None:
    model(torch.randn(8, 33, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()


def test_a_rewind_is_not_undone_by_a_crash(folder: Path) -> None:
    options: dict[str, Any] = {"snapshots": 3, "snapshot_every": 2, "checkpoint_every_steps": 2}
    with Daemon(storage=folder) as daemon:
        model = layered(seed=3, width=33)
        with ballast.AdamW(model.parameters(), lr=0.01, server=daemon.server, run=RUN, **options) as optimizer:
            for number in range(1, 7):
                step(model, optimizer, number)
                if number % 2 == 0:  # one that is due is left out while another is written
                    assert optimizer.checkpoint() == number
            assert optimizer.rewind(to=4) == 4
            daemon.kill()
    assert [path.name for path in (folder / "runs" / RUN).glob("discarded-*")]
    with Daemon(storage=folder) as daemon, status_of(daemon) as status:
        assert status["step"] == 4


def test_a_restore_waits_for_the_checkpoint_that_is_being_written(folder: Path) -> None:
    last = 3
    with Daemon(storage=folder) as daemon:
        train(daemon.server, last)
        daemon.drain()
    with Daemon(storage=folder, flags=["--storage.bytes_per_second=32KiB"]) as slow, ThreadPoolExecutor() as pool:
        optimizer = train(slow.server, last + 1, leaves=False)
        writing = pool.submit(optimizer.checkpoint)
        until(lambda: optimizer.run_status().durability["writing"])
        restored = ctl("restore", RUN, "--step", last, server=slow.server)
        assert restored.returncode == 0, restored.stderr
        assert writing.result() == last + 1
        with pytest.raises(ballast.RunRewound, match=f"step {last}"):
            optimizer.wait()
            optimizer.checkpoint()
        optimizer.close()


@pytest.mark.parametrize("durability", ["checkpoint", "journal_sync"])
def test_a_rewind_past_all_checkpoints_loses_no_run(durability: str, folder: Path) -> None:
    """The two that are kept are of later steps: without one of the step that it is back at, a crash would leave none."""
    options: dict[str, Any] = {"snapshots": 4, "snapshot_every": 1, "durability": durability}
    with Daemon(storage=folder) as daemon:
        model = layered(seed=3, width=33)
        with ballast.AdamW(model.parameters(), lr=0.01, server=daemon.server, run=RUN, **options) as optimizer:
            for number in range(1, 5):
                step(model, optimizer, number)
                assert optimizer.checkpoint() == number
            assert optimizer.rewind(to=1) == 1
            weights = [parameter.detach().clone() for parameter in model.parameters()]
            daemon.kill()
    with Daemon(storage=folder) as daemon:
        with status_of(daemon) as status:
            assert status["step"] == 1 and status["durability"]["durable_step"] == 1
        again = layered(seed=4, width=33)
        with ballast.AdamW(
            again.parameters(), lr=0.01, server=daemon.server, run=RUN, weights="server", **options
        ) as optimizer:
            assert all(torch.equal(p, q) for p, q in zip(again.parameters(), weights, strict=True))
            step(again, optimizer, 2)
            assert optimizer.checkpoint() == 2


def test_after_a_rewind_the_status_is_of_the_checkpoint_that_is_left(folder: Path) -> None:
    options: dict[str, Any] = {"snapshots": 3, "snapshot_every": 1}
    with Daemon(storage=folder) as daemon:
        model = layered(seed=3, width=33)
        with ballast.AdamW(model.parameters(), lr=0.01, server=daemon.server, run=RUN, **options) as optimizer:
            for number in (1, 2):
                step(model, optimizer, number)
            assert optimizer.checkpoint() == 2
            with status_of(daemon) as status:
                written = status["durability"]
                assert written["durable_step"] == 2 and written["checkpoint_bytes"] > 0
            assert optimizer.rewind(to=1) == 1
            with status_of(daemon) as status:
                left = status["durability"]
                assert left["durable_step"] == 1  # there was none of it: it was written before the answer
                assert left["checkpoint_bytes"] > 0
            step(model, optimizer, 2)
            assert optimizer.checkpoint() == 2
            step(model, optimizer, 3)
            assert optimizer.checkpoint() == 3
            [older, newer] = checkpoints(folder)
            assert optimizer.rewind(to=2) == 2
            with status_of(daemon) as status:
                left = status["durability"]
            sizes = json.loads((older / "manifest.json").read_text())["files"]
            assert left["durable_step"] == 2
            assert left["checkpoint_bytes"] == sum(int(file["bytes"]) for file in sizes)
            assert not newer.exists()


def test_ballastctl_says_what_its_checkpoint_waits_for(folder: Path) -> None:
    with Daemon(storage=folder) as daemon:
        model = layered(seed=1, width=33)
        optimizer = ballast.AdamW(model.named_parameters(), server=daemon.server, run="durable")
        step(model, optimizer, seed=1)
        model(torch.ones(4, 33)).sum().backward()  # its weights change, and it does not end
        command = [CTL, "--server", daemon.server, "checkpoint", "durable"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
            assert waiting.stderr is not None
            said = waiting.stderr.readline()
            assert said.startswith("waiting for step 2 to close: rank 0, which "), said
            optimizer.step()
            out, err = waiting.communicate()
        assert waiting.returncode == 0 and out.startswith("step 2 of run 'durable' is durable: checkpoint 1"), out + err
        optimizer.close()


def test_a_run_that_grew_comes_back_as_it_grew(folder: Path) -> None:
    with Daemon(storage=folder) as daemon:
        model = layered(seed=3, width=33)
        model[0].requires_grad_(False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with ballast.AdamW(trained, lr=0.01, server=daemon.server, run=RUN) as optimizer:
            step(model, optimizer, 1)
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})
            step(model, optimizer, 2)
            assert optimizer.checkpoint() == 2
            daemon.kill()
    with Daemon(storage=folder) as daemon, status_of(daemon) as status:
        assert (status["step"], status["parameters"]) == (2, sum(p.numel() for p in model.parameters()))


def test_two_daemons_do_not_share_a_folder(folder: Path) -> None:
    with Daemon(storage=folder):
        with pytest.raises(RuntimeError, match="did not start"):
            Daemon(storage=folder)


def test_nor_do_they_where_the_lock_was_removed_under_the_first(folder: Path, tmp_path: Path) -> None:
    with Daemon(storage=folder):
        (folder / "ballast.lock").unlink()
        with pytest.raises(RuntimeError, match="did not start"):
            Daemon(storage=folder, log=tmp_path / "log")
    assert f"{folder} is held by another daemon, whose ballast.lock was removed" in (tmp_path / "log").read_text()
    with Daemon(storage=folder):  # once the first is gone
        pass


def test_a_run_whose_folder_was_removed_is_written_anew(folder: Path) -> None:
    with Daemon(storage=folder) as daemon:
        optimizer = train(daemon.server, 3, leaves=False)
        assert optimizer.checkpoint() == 3
        shutil.rmtree(folder / "runs" / RUN)
        optimizer.close()
        train(daemon.server, 4)
        daemon.drain()
    with Daemon(storage=folder) as daemon, status_of(daemon) as status:
        assert status["step"] == 4


def test_what_was_not_published_goes_and_what_is_of_others_stays(folder: Path) -> None:
    with Daemon(storage=folder) as daemon:
        train(daemon.server, 2)
        daemon.drain()
    [only] = checkpoints(folder)
    runs = folder / "runs" / RUN
    shutil.copytree(only, runs / "writing-000000000002-step-9")
    shutil.copytree(only, runs / "deleting-000000000003-step-9")
    (runs / "deleting-000000000003-step-9" / "mine.txt").write_text("mine")
    (runs / "notes").mkdir()
    with Daemon(storage=folder) as daemon:
        daemon.drain()
    assert not (runs / "writing-000000000002-step-9").exists()
    assert (runs / "deleting-000000000003-step-9" / "mine.txt").read_text() == "mine"
    assert (runs / "notes").is_dir() and only.is_dir()


def test_a_checkpoint_of_the_first_version_is_read_for_ever(folder: Path) -> None:
    """tests/checkpoints/format-1: four steps of `train` by version 0.1.0, with a client state. It is never made anew."""
    (folder / "runs").mkdir()
    shutil.copytree(ROOT / "tests" / "checkpoints" / "format-1" / "golden", folder / "runs" / "golden")
    with Daemon(storage=folder) as daemon:
        model = layered(seed=3, width=33)
        with ballast.AdamW(
            model.parameters(), lr=0.01, server=daemon.server, run="golden", weights="server"
        ) as optimizer:
            data: dict[str, int] = {}
            optimizer.register_client_state("data", lambda: data, data.update)
            optimizer.connect()
            assert optimizer.run_status()["step"] == 4
            assert data == {"at": 4}
        bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    assert hashlib.sha256(bits).hexdigest() == "ff8bdd003f076fddc72b4ab3de7ef64a16fc4a14a1b25e99cbafd86f223a3cac"


def test_verify_tells_the_file_and_the_mib_that_is_damaged(folder: Path) -> None:
    with Daemon(storage=folder) as daemon:
        train(daemon.server, 2)
        daemon.drain()
    ctl = [ROOT / "build" / "dev" / "client" / "cpp" / "ballastctl", "verify", folder]
    good = subprocess.run(ctl, capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "") and ": good" in good.stdout
    [model] = checkpoints(folder)[-1].glob("model-*.safetensors")
    content = bytearray(model.read_bytes())
    content[5000] ^= 4
    model.write_bytes(content)
    damaged = subprocess.run(ctl, capture_output=True, text=True, check=False)
    assert damaged.returncode == 1
    assert f"{model.name} is damaged: MiB 0 of it" in damaged.stdout


class status_of:
    """The run's status, as an operator sees it."""

    def __init__(self, daemon: Daemon) -> None:
        self._client = _core.Client.connect(daemon.server, 5.0, 5.0)

    def __enter__(self) -> Any:
        [status] = self._client.list_runs()["runs"]
        return status

    def __exit__(self, *_: object) -> None:
        self._client.close()
