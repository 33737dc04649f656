"""Checkpoints that leave the machine and come back: storage.on_published, and `ballastctl restore --from`."""

from __future__ import annotations

import os
import shutil
import stat
import time
import urllib.request
from pathlib import Path

import pytest

from daemon import Daemon
from durable import RUN, checkpoints, ctl, files_in, known, planes, runs_of, train, trained

STEPS = 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "storage"
    made.mkdir()
    return made


@pytest.fixture
def imports(tmp_path: Path) -> Path:
    made = tmp_path / "imports"
    made.mkdir()
    return made


def importing(folder: Path, imports: Path) -> Daemon:
    return Daemon(storage=folder, flags=[f"--storage.import_dir={imports}"])


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return path


# --- storage.on_published -------------------------------------------------------------------------------------------


def test_every_checkpoint_is_copied_also_the_one_of_the_drain(folder: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    flags = [f"--storage.on_published=/bin/cp,-r,{{folder}},{copies}/{{run}}-{{number}}-{{step}}"]
    with Daemon(storage=folder, flags=flags) as daemon:
        train(daemon.server, 3)
        daemon.drain()
    [checkpoint] = checkpoints(folder)
    assert [path.name for path in copies.iterdir()] == [f"{RUN}-1-3"]
    assert files_in(copies / f"{RUN}-1-3") == files_in(checkpoint)


def in_a_row(failures: int) -> str:
    return f'ballast_checkpoint_hook_failures_in_a_row{{run_id="{RUN}"}} {failures}\n'


def shown_with(daemon: Daemon, line: str) -> str:
    """The metrics once they have the line: the command runs beside all else."""
    text = ""
    give_up_at = time.monotonic() + 120
    while line not in text and time.monotonic() < give_up_at:
        text = urllib.request.urlopen(daemon.metrics_url).read().decode()
    assert line in text
    return text


def test_a_finished_runs_last_checkpoint_is_copied_once_that_works_again(folder: Path, tmp_path: Path) -> None:
    """No newer one comes, so who is told to by the runbook asks for it."""
    copies, works = tmp_path / "copies", tmp_path / "works"
    copies.mkdir()
    script = program(tmp_path / "copy", f'[ -e {works} ] && cp -r "$1" {copies}')
    with Daemon(storage=folder, flags=[f"--storage.on_published={script},{{folder}}"]) as daemon:
        train(daemon.server, 2)
        shown_with(daemon, in_a_row(1))
        assert ctl("checkpoint", RUN, server=daemon.server).returncode == 0
        shown_with(daemon, in_a_row(2))
        works.touch()
        for _ in range(2):  # what has been copied is not copied again
            assert ctl("checkpoint", RUN, server=daemon.server).returncode == 0
            text = shown_with(daemon, in_a_row(0))
        assert 'ballast_checkpoint_hooks_total{result="success"} 1\n' in text
        daemon.kill()
    [checkpoint] = checkpoints(folder)
    assert files_in(copies / checkpoint.name) == files_in(checkpoint)


def test_what_fails_is_logged_and_counted_and_training_goes_on(folder: Path, tmp_path: Path) -> None:
    script = program(tmp_path / "copy", f"echo no such bucket >&2; echo ran > {tmp_path}/ran; exit 3")
    log = tmp_path / "log"
    with Daemon(storage=folder, log=log, flags=[f"--storage.on_published={script}"]) as daemon:
        train(daemon.server, 2)
        text = shown_with(daemon, in_a_row(1))
        assert 'ballast_checkpoint_hooks_total{result="failed"} 1' in text
        assert ctl("checkpoint", RUN, server=daemon.server).returncode == 0
        train(daemon.server, 3)
        daemon.drain()
    lines = [line for line in log.read_text().splitlines() if '"on_published"' in line]
    assert lines and "exit code 3" in lines[0] and "no such bucket" in lines[0] and RUN in lines[0]
    assert checkpoints(folder)[-1].name.endswith("-step-3")


@pytest.mark.parametrize("kind", ["missing", "no program", "a folder"])
def test_a_program_that_cannot_be_run_refuses_the_start(folder: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "program"
    if kind == "no program":
        path.write_text("text")
    if kind == "a folder":
        path.mkdir()
    log = tmp_path / "log"
    with pytest.raises(RuntimeError, match="exit code 1"):
        Daemon(storage=folder, log=log, flags=[f"--storage.on_published={path}"])
    assert "storage.on_published" in log.read_text() and str(path) in log.read_text()


def test_a_drain_ends_a_command_that_does_not_end_itself(folder: Path, tmp_path: Path) -> None:
    script = program(tmp_path / "copy", f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    flags = [f"--storage.on_published={script}", "--drain_timeout=1s"]
    with Daemon(storage=folder, flags=flags) as daemon:
        train(daemon.server, 2)
        daemon.drain()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# --- ballastctl restore --from --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def brought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, as of steps 3 and 6, as a copy elsewhere has it."""
    storage = tmp_path_factory.mktemp("first")
    trained(storage, 3, 6)
    return Path(shutil.copytree(storage / "runs" / RUN, tmp_path_factory.mktemp("elsewhere") / RUN))


@pytest.mark.parametrize("what", ["run", "checkpoint"])
def test_a_run_comes_back_to_an_empty_machine_and_goes_on_to_the_bit(
    folder: Path, imports: Path, tmp_path: Path, brought: Path, what: str
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    [never_stopped] = trained(whole, STEPS)
    copy = Path(shutil.copytree(brought, imports / RUN))
    before = files_in(copy)
    name = sorted(copy.iterdir())[-1] if what == "checkpoint" else copy
    with importing(folder, imports) as daemon:
        said = ctl("restore", RUN, "--from", name, server=daemon.server)
        assert (said.returncode, said.stderr) == (0, "")
        assert "is back at step 6" in said.stdout
        daemon.kill()  # what it has answered is durable
    shutil.copytree(imports, tmp_path / "as_it_was")
    assert files_in(copy) == before
    with Daemon(storage=folder) as daemon:
        assert [status["step"] for status in runs_of(daemon.server)] == [6]
        train(daemon.server, STEPS)
        daemon.drain()
    ours = checkpoints(folder)[-1]
    assert planes(ours) == planes(never_stopped)
    mine, its = known(ours), known(never_stopped)
    assert mine == its
    assert ctl("verify", folder).returncode == 0


def test_a_run_that_is_there_goes_back_to_what_was_brought(folder: Path, imports: Path, brought: Path) -> None:
    trained(folder, 8)
    shutil.copytree(brought, imports / RUN)
    with importing(folder, imports) as daemon:
        said = ctl("restore", RUN, "--from", imports / RUN, "--step", 3, server=daemon.server)
        assert said.returncode == 0, said.stderr
        assert [status["step"] for status in runs_of(daemon.server)] == [3]
        daemon.kill()
    with Daemon(storage=folder) as daemon:
        assert [status["step"] for status in runs_of(daemon.server)] == [3]


def test_a_run_of_which_all_is_damaged_is_made_good(folder: Path, imports: Path, brought: Path) -> None:
    for path in trained(folder, 2):
        (path / "run.json").write_text("{}")
    shutil.copytree(brought, imports / RUN)
    with importing(folder, imports) as daemon:
        assert runs_of(daemon.server) == []
        said = ctl("restore", RUN, "--from", imports / RUN, server=daemon.server)
        assert said.returncode == 0, said.stderr
        assert [status["step"] for status in runs_of(daemon.server)] == [6]


@pytest.mark.parametrize("lives", [True, False])
def test_another_spec_is_refused_by_its_first_difference(
    folder: Path, imports: Path, brought: Path, lives: bool
) -> None:
    trained(folder, 2, state="bf16")
    shutil.copytree(brought, imports / RUN)
    with importing(folder, imports) as daemon:
        if not lives:
            assert ctl("delete", RUN, "--keep-checkpoints", server=daemon.server).returncode == 0
        before = files_in(folder / "runs")
        said = ctl("restore", RUN, "--from", imports / RUN, server=daemon.server)
        assert said.returncode != 0 and "with another spec" in said.stderr and "state" in said.stderr
        assert files_in(folder / "runs") == before
        assert [status["step"] for status in runs_of(daemon.server)] == ([2] if lives else [])


def test_damage_is_found_before_anything_changes(folder: Path, imports: Path, brought: Path) -> None:
    newest = sorted(Path(shutil.copytree(brought, imports / RUN)).iterdir())[-1]
    [optimizer] = newest.glob("optimizer-*")
    content = bytearray(optimizer.read_bytes())
    content[-1] ^= 1
    optimizer.write_bytes(content)
    with importing(folder, imports) as daemon:
        said = ctl("restore", RUN, "--from", imports / RUN, server=daemon.server)
        assert said.returncode != 0 and optimizer.name in said.stderr and "MiB 0" in said.stderr
        assert runs_of(daemon.server) == [] and list((folder / "runs").iterdir()) == []
        said = ctl("restore", RUN, "--from", imports / RUN, "--step", 3, server=daemon.server)
        assert said.returncode == 0, said.stderr


def test_only_the_folder_that_was_named_is_read(folder: Path, imports: Path, tmp_path: Path, brought: Path) -> None:
    (imports / "link").symlink_to(brought)
    (imports / "here").mkdir()
    (imports / "here" / "000000000001-step-3").symlink_to(sorted(brought.iterdir())[0])
    (imports / "files").mkdir()
    inner = Path(shutil.copytree(brought, imports / "files" / RUN))
    for path in inner.iterdir():
        (path / "run.json").rename(tmp_path / "run.json")
        (path / "run.json").symlink_to(tmp_path / "run.json")
    wanted = {
        brought: "is not beneath the folder",
        imports / ".." / "imports" / "link": "has '..' in it",
        imports / "link": "symbolic link",
        imports / "here": "symbolic link",
        imports / "files" / RUN: "run.json",
        imports / "nowhere": "No such file",
        Path("relative"): "is not beneath the folder",
        imports: "is neither a checkpoint's folder nor a run's",
        imports / ("x" * 5000): "is longer than a path can be",
    }
    with importing(folder, imports) as daemon:
        for path, why in wanted.items():
            said = ctl("restore", RUN, "--from", path, server=daemon.server)
            assert said.returncode != 0 and why in said.stderr, (path, said.stderr)
        assert runs_of(daemon.server) == [] and list((folder / "runs").iterdir()) == []


def test_another_run_is_not_taken_for_this_one(folder: Path, imports: Path, brought: Path) -> None:
    shutil.copytree(brought, imports / "other")
    with importing(folder, imports) as daemon:
        said = ctl("restore", "other", "--from", imports / "other", server=daemon.server)
        assert said.returncode != 0 and f"is of run '{RUN}', not of 'other'" in said.stderr
        assert runs_of(daemon.server) == []


def test_a_daemon_that_was_not_told_where_from_reads_nothing(folder: Path, brought: Path) -> None:
    with Daemon(storage=folder) as daemon:
        said = ctl("restore", RUN, "--from", brought, server=daemon.server)
        assert said.returncode != 0 and "storage.import_dir" in said.stderr


def test_a_folder_to_import_from_must_be_there(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(RuntimeError, match="exit code 1"):
        Daemon(storage=folder, log=log, flags=[f"--storage.import_dir={tmp_path}/nowhere"])
    assert "storage.import_dir" in log.read_text()


def test_what_comes_back_is_the_owners_alone(folder: Path, imports: Path, brought: Path) -> None:
    copy = Path(shutil.copytree(brought, imports / RUN))
    for path in copy.rglob("*"):
        path.chmod(0o755)
    with importing(folder, imports) as daemon:
        assert ctl("restore", RUN, "--from", copy, server=daemon.server).returncode == 0
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (folder / "runs" / RUN).rglob("*") if path.is_file()}
    assert modes == {0o600}
