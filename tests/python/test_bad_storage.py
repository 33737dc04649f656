"""What an operator, or a disk, may do to storage.dir: each is told by the name of the file and what to do, nothing is removed
that the daemon did not make, and other runs are as they were."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ballast
from checkpoint_folder import crc32c, seal
from daemon import Daemon
from durable import RUN, checkpoints, ctl, files_in, runs_of, train, trained
from models import layered, until

OTHER = "neighbour"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "storage"
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RUN with checkpoints of steps 2 and 4, OTHER with one of step 3."""
    storage = tmp_path_factory.mktemp("two")
    trained(storage, 2, 4)
    trained(storage, 3, run=OTHER)
    return storage


@pytest.fixture
def stored(two_runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_runs, tmp_path / "stored"))


def started(storage: Path, log: Path) -> dict[str, int]:
    """What a daemon has of it: the steps of its runs. What it says goes to the log."""
    with Daemon(storage=storage, log=log) as daemon:
        found = {status["run_id"]: status["step"] for status in runs_of(daemon.server)}
        daemon.kill()
    return found


def why_not(storage: Path, log: Path) -> str:
    """Of a daemon that does not start: what it says."""
    with pytest.raises(RuntimeError, match="exit code 1"):
        Daemon(storage=storage, log=log)
    return log.read_text()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with these options."""
    made: list[Path] = []

    def mount(options: str) -> Path:
        path = tmp_path / f"mount-{len(made)}"
        path.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"NOT TESTED, a file system cannot be mounted here: {done.stderr.strip()}")
        made.append(path)
        return path

    yield mount
    for path in made:
        subprocess.run(["umount", path], check=True)


# --- what a run's folder may hold -----------------------------------------------------------------------------------


def newer_format(newest: Path) -> None:
    manifest = newest / "manifest.json"
    was = manifest.read_bytes()
    manifest.write_bytes(was.replace(b'"format":1', b'"format":2'))
    sums = newest / "SHA256SUMS"
    first = [hashlib.sha256(text).hexdigest() for text in (was, manifest.read_bytes())]
    sums.write_text(sums.read_text().replace(*first))


def linked_file(newest: Path) -> None:
    [model] = newest.glob("model-*.safetensors")
    aside = newest.parents[2] / "aside"
    model.rename(aside)
    model.symlink_to(aside)


def linked_folder(newest: Path) -> None:
    aside = newest.parents[2] / "aside"
    newest.rename(aside)
    newest.symlink_to(aside)


def a_file_of_its_name(newest: Path) -> None:
    shutil.rmtree(newest)
    newest.write_text("not a folder")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (newer_format, ["manifest.json is of format 2", "use a later one"]),
        (linked_file, ["model-", "it is a symbolic link"]),
        (linked_folder, ["has a checkpoint's name and is no folder", "put the checkpoint itself there"]),
        (a_file_of_its_name, ["has a checkpoint's name and is no folder"]),
    ],
)
def test_a_run_that_must_not_go_back_in_silence_is_refused(
    stored: Path, tmp_path: Path, change: Callable[[Path], None], said: list[str]
) -> None:
    newest = checkpoints(stored)[-1]
    change(newest)
    before = files_in(stored / "runs")
    log = tmp_path / "log"
    assert started(stored, log) == {OTHER: 3}
    text = log.read_text()
    assert all(part in text for part in [*said, newest.name, RUN]), text
    with Daemon(storage=stored, log=log) as daemon:
        with pytest.raises(ballast.BallastError) as refused:
            train(daemon.server, 5)
        assert said[0] in str(refused.value)
        assert ctl("delete", RUN, server=daemon.server).returncode != 0 or change in (newer_format, linked_file)
        daemon.kill()
    if change is not newer_format and change is not linked_file:
        assert files_in(stored / "runs") == before
    if change in (linked_file, linked_folder):
        assert (stored / "aside").exists()


def later_run(newest: Path) -> None:
    """run.json has a field that this version does not know; all hashes are right."""
    files = {
        file.name: file.read_bytes() for file in newest.iterdir() if file.name not in ("manifest.json", "SHA256SUMS")
    }
    manifest = json.loads((newest / "manifest.json").read_text())
    run = files["run.json"] = files["run.json"].replace(b"{", b'{"laterThing":1,', 1)
    [entry] = [entry for entry in manifest["files"] if entry["name"] == "run.json"]
    entry |= {"bytes": str(len(run)), "sha256": hashlib.sha256(run).hexdigest(), "crc32c": [crc32c(run)]}
    shutil.rmtree(newest)
    seal(newest, files, manifest)


def test_why_a_run_is_not_read_back_stays_counted_when_its_trainer_asks_for_it(stored: Path) -> None:
    """The run is tried anew for each trainer that asks, and its counters begin anew with it."""
    later_run(checkpoints(stored)[-1])

    def counted() -> list[str]:
        with urllib.request.urlopen(daemon.metrics_url) as answer:
            shown = answer.read().decode()
        wanted = r'^ballast_(?:checkpoint_verify_failures|restores)_total\{.*(?:"version"|"failed").*\} 1$'
        return [line for line in re.findall(wanted, shown, re.MULTILINE) if f'"{RUN}"' in line]

    with Daemon(storage=stored) as daemon:
        assert len(counted()) == 2
        with pytest.raises(ballast.BallastError, match="since a later one wrote it"):
            train(daemon.server, 5)
        assert len(counted()) == 2


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "SHA256SUMS",
        "spec.json",
        "run.json",
        "model-00001-of-00001.safetensors",
        "optimizer-00001-of-00001.safetensors",
    ],
)
def test_a_missing_file_is_named_and_the_checkpoint_before_taken(stored: Path, tmp_path: Path, name: str) -> None:
    newest = checkpoints(stored)[-1]
    (newest / name).unlink()
    before = files_in(stored / "runs")
    log = tmp_path / "log"
    assert started(stored, log) == {RUN: 2, OTHER: 3}
    assert f"{newest.name}/{name} is damaged: it is missing" in log.read_text()
    assert files_in(stored / "runs") == before


def rename_in_manifest(checkpoint: Path, name: bytes) -> None:
    """The first of the weights' files has this name there, and SHA256SUMS fits."""
    manifest = checkpoint / "manifest.json"
    was = manifest.read_bytes()
    [model] = (path.name.encode() for path in checkpoint.glob("model-*.safetensors"))
    manifest.write_bytes(was.replace(b'"name":"%s"' % model, b'"name":"%s"' % name))
    hashes = [hashlib.sha256(text).hexdigest().encode() for text in (was, manifest.read_bytes())]
    sums = checkpoint / "SHA256SUMS"
    sums.write_bytes(sums.read_bytes().replace(*hashes).replace(model, name))


@pytest.mark.parametrize(
    "name",
    [
        b"../../model-00001-of-00001.safetensors",
        b"..",
        b".",
        b"",
        b"/etc/passwd",
        b"a/b",
        b".hidden",
        b"m" * 256,
        b"m\\u0000x",
        b"m\0x",
        b"m\xff\xfe",
        b"model-00001-of-00001 safetensors",
        b"manifest.json",
        b"SHA256SUMS",
        b"run.json",
    ],
)
def test_a_manifest_with_a_name_that_no_file_can_have_is_damaged(stored: Path, tmp_path: Path, name: bytes) -> None:
    newest = checkpoints(stored)[-1]
    rename_in_manifest(newest, name)
    before = files_in(stored / "runs")
    log = tmp_path / "log"
    assert started(stored, log) == {RUN: 2, OTHER: 3}
    text = log.read_text()
    assert newest.name in text and "manifest.json is damaged" in text, text
    assert files_in(stored / "runs") == before
    said = ctl("verify", newest)
    assert said.returncode == 1 and "damaged" in said.stdout


@pytest.mark.parametrize("name", [b"another", b"UPPER case", b"x" * 255, b"\xff\xfe", b"-", b"new\nline"])
def test_a_runs_folder_with_another_name_is_refused_and_stays(stored: Path, tmp_path: Path, name: bytes) -> None:
    renamed = os.path.join(os.fsencode(stored / "runs"), name)
    os.rename(stored / "runs" / RUN, renamed)
    log = tmp_path / "log"
    assert started(stored, log) == {OTHER: 3}
    assert f"is of run '{RUN}': give the folder" in log.read_text()
    assert len(os.listdir(renamed)) == 2


@pytest.mark.parametrize("run", ["../runs/durable", "..", ".", "durable/", "durable/..", "a/b", "x" * 300])
def test_a_name_that_is_a_path_finds_no_run(stored: Path, run: str) -> None:
    before = files_in(stored / "runs")
    with Daemon(storage=stored) as daemon:
        for words in (["checkpoints"], ["delete"], ["restore", "--step", "2"], ["checkpoint"]):
            said = ctl(words[0], run, *words[1:], server=daemon.server)
            assert said.returncode != 0 and "no run" in said.stderr, (words, said.stderr)
        daemon.kill()
    assert files_in(stored / "runs") == before


def test_a_link_among_the_runs_is_told_and_not_followed(stored: Path, tmp_path: Path) -> None:
    (stored / "runs" / RUN).rename(tmp_path / RUN)
    (stored / "runs" / RUN).symlink_to(tmp_path / RUN)
    log = tmp_path / "log"
    assert started(stored, log) == {OTHER: 3}
    assert f"{stored}/runs/{RUN}" in log.read_text() and "no link is followed" in log.read_text()
    with Daemon(storage=stored, log=log) as daemon:
        with pytest.raises(ballast.BallastError, match="symbolic link"):
            train(daemon.server, 5)
    assert len(list((tmp_path / RUN).iterdir())) == 2


# --- the folder itself ----------------------------------------------------------------------------------------------


def test_a_folder_that_is_a_file_or_a_link_refuses_the_start(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("text")
    link.symlink_to(tmp_path)
    for path in (file, link):
        said = why_not(path, tmp_path / f"log-{path.name}")
        assert "storage.dir" in said and str(path) in said and "it must be a folder, and no link to one" in said
    assert file.read_text() == "text"


def test_a_folder_that_is_read_only_refuses_the_start(mounted: Callable[[str], Path], tmp_path: Path) -> None:
    path = mounted("ro")
    said = why_not(path, tmp_path / "log")
    assert f"{path}/ballast.lock: Read-only file system" in said
    assert "one that the daemon's user can write to" in said


def test_a_folder_of_another_user_refuses_the_start(folder: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("NOT TESTED as root, who may write everywhere; the read-only file system above stands for it")
    folder.chmod(0o500)
    said = why_not(folder, tmp_path / "log")
    assert str(folder) in said and "one that the daemon's user can write to" in said


def test_a_full_disk_fails_the_checkpoint_and_nothing_else(mounted: Callable[[str], Path]) -> None:
    path = mounted("size=256k")
    with Daemon(storage=path) as daemon:
        train(daemon.server, 2)
        assert ctl("checkpoint", RUN, server=daemon.server).returncode == 0
        before = files_in(path / "runs")
        filler = path / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(b"\0" * 4096)
        train(daemon.server, 4)
        said = ctl("checkpoint", RUN, server=daemon.server)
        assert said.returncode != 0 and "No space left on device" in said.stderr and str(path) in said.stderr
        assert files_in(path / "runs") == before
        filler.unlink()
        assert ctl("checkpoint", RUN, server=daemon.server).returncode == 0
        daemon.kill()
    assert ctl("verify", path).returncode == 0
    assert checkpoints(path)[-1].name.endswith("-step-4")


def test_a_folder_that_another_daemon_has_by_now_is_not_written_to(folder: Path, tmp_path: Path) -> None:
    """Somebody has moved the first one's away, and started the second in its place."""
    with Daemon(storage=folder) as first:
        train(first.server, 2)
        assert ctl("checkpoint", RUN, server=first.server).returncode == 0
        folder.rename(tmp_path / "away")
        folder.mkdir()
        with Daemon(storage=folder) as second:
            train(first.server, 4)
            said = ctl("checkpoint", RUN, server=first.server)
            assert said.returncode == 1 and f"{folder} is another folder than the one" in said.stderr, said.stderr
            assert f"process {second.pid};" in said.stderr and "start the daemon anew" in said.stderr, said.stderr
            assert list((folder / "runs").iterdir()) == [] and runs_of(second.server) == []
            second.kill()
        shutil.rmtree(folder)
        (tmp_path / "away").rename(folder)
        assert ctl("checkpoint", RUN, server=first.server).returncode == 0
        first.kill()
    assert checkpoints(folder)[-1].name.endswith("-step-4")


def test_a_rewind_past_all_checkpoints_where_the_disk_is_full_is_done_and_told(
    mounted: Callable[[str], Path], tmp_path: Path
) -> None:
    """The log, and whoever asked for it, hear that a restart may bring back what it undid. The trainer goes on."""
    folder, log = mounted("size=2m,mode=700"), tmp_path / "log"
    options: dict[str, Any] = {"checkpoint_every_steps": 1, "snapshots": 4, "snapshot_every": 1}
    with Daemon(storage=folder, log=log) as daemon:
        model = layered(seed=1, width=33)
        with ballast.AdamW(model.named_parameters(), server=daemon.server, run="full", **options) as optimizer:
            for number in range(1, 5):
                model(torch.ones(4, 33)).sum().backward()
                optimizer.step()
                assert optimizer.checkpoint() == number
            filler = folder / "filler"
            with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
                while True:
                    file.write(b"\0" * 4096)
            with pytest.raises(ballast.Rejected, match="rewound in memory, and a restart.*would undo.*No space left"):
                optimizer.rewind(to=1)
            assert "a restart may bring them back" in log.read_text()
            filler.unlink()
            with pytest.raises(ballast.RunRewound, match="the next step is 2"):
                model(torch.ones(4, 33)).sum().backward()
            model(torch.ones(4, 33)).sum().backward()
            optimizer.step()
            assert optimizer.checkpoint() == 2
            until(lambda: [path.name[-6:] for path in (folder / "runs" / "full").glob("0*-step-*")] == ["step-2"])
            daemon.kill()
    with Daemon(storage=folder) as daemon:
        assert [status["step"] for status in runs_of(daemon.server)] == [2]


def test_a_limit_of_file_sizes_fails_the_checkpoint_and_not_the_daemon(folder: Path) -> None:
    with Daemon(storage=folder) as daemon:
        # First: a run whose trainer has left is written unasked, and what is asked for then is there already.
        limit = ["prlimit", f"--pid={daemon.pid}", "--fsize=4096"]
        subprocess.run(limit, check=True)
        train(daemon.server, 2)
        said = ctl("checkpoint", RUN, server=daemon.server)
        assert said.returncode != 0 and "File too large" in said.stderr
        train(daemon.server, 3)
        assert [status["step"] for status in runs_of(daemon.server)] == [3]
    assert checkpoints(folder) == []
