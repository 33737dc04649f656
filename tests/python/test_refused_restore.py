"""A restore that is refused leaves the run, its snapshots and what is said of them as they were."""

from __future__ import annotations

import shutil
from pathlib import Path

from daemon import Daemon
from durable import RUN, ctl, runs_of, train


def snapshots(daemon: Daemon) -> list[int]:
    """The steps that the run may be rewound to, as it says."""
    [run] = runs_of(daemon.server)
    return [int(step) for step in run["snapshot_steps"]]


def done(daemon: Daemon, *words: object) -> str:
    said = ctl(*words, server=daemon.server)
    assert said.returncode == 0, said.stderr
    return said.stdout


def refused(daemon: Daemon, *words: object) -> str:
    said = ctl(*words, server=daemon.server)
    assert said.returncode == 1, said.stdout + said.stderr
    return said.stderr


def train_and_keep(daemon: Daemon, *steps: int) -> None:
    """To each of them, with a checkpoint and a snapshot there, and no room for as many snapshots."""
    for step in steps:
        train(daemon.server, step, snapshots=2, snapshot_every=10, checkpoints_kept=6)
        done(daemon, "checkpoint", RUN)
    assert snapshots(daemon) == list(steps)[-3:]


def damage(folder: Path, step: int) -> None:
    [checkpoint] = folder.glob(f"0*-step-{step}")
    [model] = checkpoint.glob("model-*.safetensors")
    text = bytearray(model.read_bytes())
    text[len(text) // 2] ^= 1
    model.write_bytes(text)


def test_what_was_undone_does_not_come_back_by_a_refused_restore(tmp_path: Path) -> None:
    options = {"snapshots": 4, "snapshot_every": 20, "checkpoints_kept": 6}
    with Daemon(storage=tmp_path) as daemon:
        train(daemon.server, 33, **options)
        done(daemon, "checkpoint", RUN)
        done(daemon, "rewind", RUN, "--to", 20)
        [undone] = (tmp_path / "runs" / RUN).glob("discarded-*-step-33")
        said = refused(daemon, "restore", RUN, "--step", 33)
        assert f"is at step 20, and {undone} is of step 33, which is later" in said, said
        assert f"ballastctl delete {RUN} --keep-checkpoints" in said, said
        assert snapshots(daemon) == [20]
        train(daemon.server, 39, **options)
        assert "is back at step 20" in done(daemon, "rewind", RUN, "--back", 1)
        # As it was told to.
        done(daemon, "delete", RUN, "--keep-checkpoints")
        assert "is back at step 33" in done(daemon, "restore", RUN, "--step", 33)
        daemon.kill()


def test_what_was_brought_is_not_read_whole_where_the_run_has_not_come_to_its_step(tmp_path: Path) -> None:
    storage, imports = tmp_path / "storage", tmp_path / "imports"
    storage.mkdir()
    imports.mkdir()
    with Daemon(storage=storage, flags=[f"--storage.import_dir={imports}"]) as daemon:
        train(daemon.server, 12, snapshots=2, snapshot_every=5)
        done(daemon, "checkpoint", RUN)
        shutil.copytree(storage / "runs" / RUN, imports / RUN)
        damage(imports / RUN, 12)
        done(daemon, "rewind", RUN, "--to", 10)
        said = refused(daemon, "restore", RUN, "--from", imports / RUN)
        assert "is of step 12, which is later" in said and "damaged" not in said, said
        assert snapshots(daemon) == [5, 10]
        daemon.kill()


def test_what_can_be_restored_is_named_with_what_was_undone(tmp_path: Path) -> None:
    with Daemon(storage=tmp_path) as daemon:
        train(daemon.server, 12, snapshots=2, snapshot_every=5)
        done(daemon, "checkpoint", RUN)
        done(daemon, "rewind", RUN, "--to", 10)
        said = refused(daemon, "restore", RUN, "--step", 13)
        assert "there are those of steps 10, and discarded ones, of steps that were undone: 12" in said, said
        daemon.kill()


def test_a_damaged_checkpoint_takes_no_snapshots_place(tmp_path: Path) -> None:
    with Daemon(storage=tmp_path) as daemon:
        train_and_keep(daemon, 10, 20, 30, 40)
        for step in (10, 20):
            damage(tmp_path / "runs" / RUN, step)
            assert "is damaged" in refused(daemon, "restore", RUN, "--step", step)
            assert snapshots(daemon) == [20, 30, 40]
        assert "is back at step 20" in done(daemon, "rewind", RUN, "--to", 20)
        assert snapshots(daemon) == [20]
        daemon.kill()


def test_a_whole_one_takes_the_place_of_the_oldest_snapshot(tmp_path: Path) -> None:
    with Daemon(storage=tmp_path) as daemon:
        train_and_keep(daemon, 10, 20, 30, 40)
        assert "is back at step 10" in done(daemon, "restore", RUN, "--step", 10)
        assert snapshots(daemon) == [10]
        assert runs_of(daemon.server)[0]["durability"]["restored"].endswith("-step-10")
        daemon.kill()
