"""Checkpoints that are not what a daemon wrote: ballast.checkpoint says so, and names the file and the MiB."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ballast.checkpoint
from ballast.checkpoint import CheckpointError, Damaged, Stray
from ballast.checkpoint.__main__ import main
from ballast.checkpoint.errors import name_mibs
from ballast.checkpoint.headers import check_header
from ballast.checkpoint.layout import DataFile
from ballast.checkpoint.verification import verify
from checkpoint_folder import MIB, Sketch, Sketched, small, write_checkpoint

NAME = "000000000001-step-5"
MODEL, OPTIMIZER = "model-00001-of-00001.safetensors", "optimizer-00001-of-00001.safetensors"
CLIENT_STATE = "client_state.safetensors"
FILES = ["SHA256SUMS", "manifest.json", "spec.json", "run.json", "model.safetensors.index.json"]
FILES += [MODEL, OPTIMIZER, CLIENT_STATE]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that is good, and stays so."""
    return write_checkpoint(tmp_path_factory.mktemp("whole") / NAME, small())


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / NAME))


def faults_of(folder: Path, run: str = "") -> tuple[CheckpointError, ...]:
    return verify(folder, run).faults


@contextmanager
def changed(path: Path, at: int, bits: int) -> Iterator[None]:
    """One byte of the file, and back."""
    with path.open("r+b", buffering=0) as file:
        was = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([was[0] ^ bits]), at)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), was, at)


# --- damage on the disk ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 0x20, 0x80])
@pytest.mark.parametrize("name", ["manifest.json", "SHA256SUMS"])
def test_every_byte_of_the_manifest_and_the_sums_counts(name: str, bits: int, folder: Path) -> None:
    for at in range((folder / name).stat().st_size):
        with changed(folder / name, at, bits):
            found = faults_of(folder)
            assert [type(fault) for fault in found] == [Damaged], at
            assert "manifest.json" in str(found[0]) and "SHA256SUMS" in str(found[0]) and found[0].path.parent == folder
            with pytest.raises(Damaged):
                ballast.checkpoint.open(folder)
    assert faults_of(folder) == ()


@pytest.mark.parametrize("bits", [1, 0x04, 0x80])
@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, CLIENT_STATE])
def test_every_byte_of_a_header_counts_without_its_checksum(name: str, bits: int, folder: Path) -> None:
    path, wanted = folder / name, layout_of(folder)[name]
    start = check_header(path, wanted, path.stat().st_size)
    for at in range(start):
        with changed(path, at, bits), pytest.raises(Damaged, match=name):
            check_header(path, wanted, path.stat().st_size)
    assert check_header(path, wanted, path.stat().st_size) == start == 4096


def layout_of(folder: Path) -> dict[str, DataFile]:
    return {file.name: file for file in ballast.checkpoint.open(folder)._contents.data}


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("manifest.json", "SHA256SUMS")])
def test_a_byte_of_any_file_counts(name: str, folder: Path) -> None:
    size = (folder / name).stat().st_size
    for at in {0, 7, 8, 9, size // 3, size // 2, size - 1}:
        with changed(folder / name, at, 2):
            (fault,) = faults_of(folder)
            assert isinstance(fault, Damaged) and (fault.path, fault.mibs) == (folder / name, (0,))
            assert "MiB 0 of it has not its CRC-32C" in str(fault)
    assert faults_of(folder) == ()


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_length_is_named(name: str, folder: Path) -> None:
    text = (folder / name).read_bytes()
    for length in sorted({0, 1, 7, 8, 9, len(text) // 2, min(4096, len(text) - 1), len(text) - 1, len(text) + 1}):
        (folder / name).write_bytes(text[:length] + b" " * (length - len(text)))
        found = faults_of(folder)
        assert found and all(isinstance(fault, Damaged) for fault in found), length
        assert name in str(found[0])
        if name not in ("manifest.json", "SHA256SUMS"):
            assert f"it has {length} bytes, and had {len(text)}" in str(found[0])
            assert found[0].mibs == ((0,) if length < len(text) else ())
        with pytest.raises(Damaged, match=name):
            ballast.checkpoint.open(folder)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its model has 2 MiB and a bit, its optimizer 1 MiB and more."""
    sketch = Sketch([Sketched("w", (1 << 20, 1), "lion/bf16/companded8")], client_states=[None])
    return write_checkpoint(tmp_path_factory.mktemp("large") / NAME, sketch)


@pytest.mark.parametrize("mibs", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_the_mib_is_named(mibs: tuple[int, ...], large: Path) -> None:
    size = (large / MODEL).stat().st_size
    assert 2 * MIB < size < 2 * MIB + 5000
    with (large / MODEL).open("r+b") as file:
        whole = file.read()
        for mib in mibs:
            at = min(size - 1, mib * MIB + 5000)
            file.seek(at)
            file.write(bytes([whole[at] ^ 64]))
        file.flush()
        (fault,) = faults_of(large)
        assert (fault.path, fault.mibs) == (large / MODEL, mibs)
        said = {1: f"MiB {mibs[0]} of it has", 2: "MiB 0 and 2 of it have", 3: "MiB 0, 1 and 2 of it have"}
        assert said[len(mibs)] in str(fault)
        file.seek(0)
        file.write(whole)
    assert faults_of(large) == ()


def test_many_mibs_are_counted() -> None:
    assert name_mibs(range(700)) == "MiB 0, 1, 2, 3, 4, 5, 6, 7, ... (700 of them)"


def test_all_files_are_looked_at(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (MODEL, "run.json"):
        (folder / name).write_bytes(b"x" + (folder / name).read_bytes()[1:])
    (folder / OPTIMIZER).unlink()
    assert {fault.path.name for fault in faults_of(folder)} == {MODEL, OPTIMIZER, "run.json"}
    assert main(["verify", str(folder)]) == 1
    text = capsys.readouterr().out
    assert f"{folder}: damaged" in text and f"{folder / OPTIMIZER} is damaged: it is missing" in text
    assert f"{folder / MODEL} is damaged: MiB 0 of it has not its CRC-32C" in text
    assert main(["verify", "--json", str(folder)]) == 1
    (said,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert not said["good"] and {"path": str(folder / MODEL), "mibs": [0]}.items() <= said["faults"][0].items()
    assert main(["show", str(folder)]) == 1


def test_one_damaged_checkpoint_does_not_hide_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(folder.parent / "000000000002-step-6", Sketch([Sketched("w")], step=6))
    (folder / "manifest.json").unlink()
    (folder / "SHA256SUMS").unlink()
    assert main(["verify", str(folder.parent)]) == 1
    text = capsys.readouterr().out
    assert "manifest.json is damaged: it is missing" in text and "step-6: good" in text
    assert main(["verify", str(folder)]) == 1


def test_what_is_no_file_of_it(folder: Path) -> None:
    (folder / "notes.txt").write_text("")
    (folder / "more").mkdir()
    found = faults_of(folder)
    assert [(type(fault), fault.path.name) for fault in found] == [(Stray, "more"), (Stray, "notes.txt")]
    assert "is no file of this checkpoint: move it away" in str(found[0])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_ordinary_file(kind: str, name: str, folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / name, tmp_path / "moved")
    make: dict[str, Callable[[Path], Any]] = {
        "link": lambda path: path.symlink_to(tmp_path / "moved"),
        "folder": lambda path: path.mkdir(),
        "pipe": lambda path: os.mkfifo(path),
    }
    make[kind](folder / name)
    found = faults_of(folder)
    assert [(type(fault), fault.path.name) for fault in found] == [(Damaged, name)]
    assert "it is no ordinary file" in str(found[0])
    with pytest.raises(Damaged, match=f"{name} is damaged: it is no ordinary file"):
        ballast.checkpoint.open(folder)


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, *arguments: Any) -> int:
        if Path(path).name == MODEL:
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    (fault,) = faults_of(folder)
    assert str(fault) == f"{folder / MODEL} is damaged: it cannot be read: Permission denied"


@pytest.mark.parametrize("name", ["manifest.json", "SHA256SUMS", "run.json"])
def test_no_memory_is_taken_for_a_file_that_is_too_large(name: str, folder: Path) -> None:
    os.truncate(folder / name, 10**9 + 1)
    with pytest.raises(
        Damaged, match=f"{name} is damaged: it has 1000000001 bytes, and such a file 1000000000 at most"
    ):
        ballast.checkpoint.open(folder)


@pytest.mark.parametrize(
    ("length", "said"), [(1 << 60, "its header would have"), (100_003_832, "a header 100000000 at")]
)
def test_no_memory_is_taken_for_a_header_that_is_too_large(length: int, said: str, folder: Path) -> None:
    size = 200_000_000
    os.truncate(folder / MODEL, size)
    with (folder / MODEL).open("r+b") as file:
        file.write(length.to_bytes(8, "little"))
    with pytest.raises(Damaged, match=said):
        check_header(folder / MODEL, DataFile(MODEL, ()), size)


def test_a_folder_in_another_place(folder: Path) -> None:
    other = folder.rename(folder.parent / "000000000001-step-6")
    (fault,) = faults_of(other)
    assert isinstance(fault, Stray) and "is of step 5: its name says 6" in str(fault)
    assert faults_of(other.rename(folder.parent / "copy")) == ()
    (fault,) = faults_of(folder.parent / "copy", run="r2")
    assert "is of run 'r1': give the folder that it lies in that name" in str(fault)
