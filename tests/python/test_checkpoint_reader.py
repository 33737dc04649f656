"""ballast.checkpoint reads what proto/CHECKPOINTS.md describes: every plane, and what other programs read as well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

import ballast.checkpoint
from ballast import numerics
from ballast.checkpoint import crc32c as fast
from ballast.checkpoint import layout, planes
from ballast.checkpoint.__main__ import main
from checkpoint_folder import MIB, Sketch, Sketched, crc32c, small, write_checkpoint
from checkpoints import need_safetensors

GOLDEN = Path(__file__).parents[1] / "checkpoints" / "format-1" / "golden" / "000000000001-step-4"
NAME = "000000000001-step-5"

# Everything but what weights() and moment() decode with.
ALONE = """
import sys

class Alone:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "safetensors", "google") or name == "ballast._core":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Alone())
from ballast.checkpoint.__main__ import main

assert main(["show", sys.argv[1]]) == 0
sys.exit(main(["verify", sys.argv[1]]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "runs" / "r1" / NAME, small())


# --- what is in it --------------------------------------------------------------------------------------------------


def test_every_plane_is_the_words_that_were_stored(folder: Path) -> None:
    opened = ballast.checkpoint.open(folder)
    assert opened.tensors() == tuple(tensor.name for tensor in small().tensors)
    for tensor in small().tensors:
        assert opened.planes(tensor.name) == tuple(name for name, _, _ in tensor.stored())
        for name, size, per in tensor.stored():
            plane = opened.plane(tensor.name, name)
            assert plane.tobytes() == tensor.plane(name), (tensor.name, name)
            assert plane.dtype.itemsize == size
            assert plane.shape == (tensor.shape if per == 1 else (-(-tensor.elements // per),))
            assert not plane.flags.writeable


def test_what_is_known_of_the_run(folder: Path) -> None:
    opened = ballast.checkpoint.open(folder)
    assert (opened.run_id, opened.step, opened.generation) == ("r1", 5, 3)
    assert opened.spec["groups"][0]["rule"] == "adamw"
    assert opened.run["record"]["loss"] == 2.5
    assert [opened.client_state(rank) for rank in range(3)] == [b"loader at 7", None, b"x"]
    assert opened.verify() == ()
    with pytest.raises(IndexError, match="rank is 3: the run has 3"):
        opened.client_state(3)
    with pytest.raises(KeyError, match="no tensor 'other'"):
        opened.plane("other", "weight")
    with pytest.raises(KeyError, match="no plane 'variance': lion/fp32/fp32 has weight, momentum"):
        opened.plane("scale", "variance")


def test_a_checkpoint_without_client_state(tmp_path: Path) -> None:
    opened = ballast.checkpoint.open(
        write_checkpoint(tmp_path / NAME, Sketch([Sketched("w")], client_states=[None, b""]))
    )
    assert opened.client_state(0) is None
    assert opened.client_state(1) == b""
    assert opened.verify() == ()


def test_tensors_over_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sketch = Sketch([Sketched(f"layer.{i}", (40, 7)) for i in range(5)], shard_bytes=600)
    monkeypatch.setattr(layout, "SHARD_BYTES", 600)
    opened = ballast.checkpoint.open(write_checkpoint(tmp_path / NAME, sketch))
    names = [file.name for file in opened.manifest.files]
    assert "model-00003-of-00003.safetensors" in names and "optimizer-00006-of-00006.safetensors" in names
    assert opened.verify() == ()
    for tensor in sketch.tensors:
        for name, _, _ in tensor.stored():
            assert opened.plane(tensor.name, name).tobytes() == tensor.plane(name)


@pytest.mark.parametrize(
    "kernel", numerics.kernels(), ids=lambda kernel: f"{kernel.rule}-{kernel.master}-{kernel.state}"
)
def test_weights_and_moments_are_decoded(kernel: numerics.Kernel, tmp_path: Path) -> None:
    values = np.linspace(-1, 1, 41 * 7, dtype=np.float32).reshape(41, 7)
    slots = {"weight": kernel.master, "momentum": kernel.state, "variance": kernel.state}
    encoded = {
        slot: numerics.encode(np.abs(values) if slot == "variance" else values, f, slot) for slot, f in slots.items()
    }
    sketched = Sketched("w", values.shape, f"{kernel.rule}/{kernel.master}/{kernel.state}")
    for name, size, per in sketched.stored():
        words = encoded[name.split(".")[0]].planes[name][: -(-values.size // per)]
        assert words.dtype.itemsize == size
        sketched.planes[name] = words.tobytes()
    opened = ballast.checkpoint.open(write_checkpoint(tmp_path / NAME, Sketch([sketched])))
    assert opened.planes("w") == kernel.planes
    np.testing.assert_array_equal(opened.weights("w"), numerics.decode(encoded["weight"]))
    np.testing.assert_array_equal(opened.moment("w", "momentum"), numerics.decode(encoded["momentum"]))
    if "variance" in kernel.planes:
        np.testing.assert_array_equal(opened.moment("w", "variance"), numerics.decode(encoded["variance"]))
    else:
        with pytest.raises(KeyError, match="no moment 'variance'"):
            opened.moment("w", "variance")


def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    sketched = Sketched("w", (2,), "adamw/fp32/fp32", {"weight": np.array([1, np.inf], np.float32).tobytes()})
    opened = ballast.checkpoint.open(write_checkpoint(tmp_path / NAME, Sketch([sketched])))
    with pytest.raises(ballast.checkpoint.Damaged, match="model-00001.*weight of 'w' cannot be decoded.*not finite"):
        opened.weights("w")


def test_the_planes_are_those_of_the_compiled_core() -> None:
    kinds: dict[str, dict[str, Any]] = {"master": {}, "state": {}}
    for form in numerics.formats():
        if form.kind in kinds:
            kinds[form.kind][form.name] = {
                slot: [(plane.name, np.dtype(plane.dtype), plane.itemsize, plane.per) for plane in stored]
                for slot, stored in form.planes.items()
            }
    told = {name: {"weight": stored} for name, stored in planes.MASTERS.items()}
    for here, there in ((told, kinds["master"]), (planes.STATES, kinds["state"])):
        assert {
            name: {
                slot: [(p.name, np.dtype(p.dtype), p.itemsize, p.per) for p in stored] for slot, stored in slots.items()
            }
            for name, slots in here.items()
        } == there
    assert set(planes.MOMENTS) == set(numerics.rules())


# --- read by other programs, and written by the daemon --------------------------------------------------------------


def test_the_safetensors_package_reads_the_same_words(folder: Path) -> None:
    need_safetensors()
    from safetensors.torch import load_file

    opened = ballast.checkpoint.open(folder)
    loaded = {}
    for file in folder.glob("*.safetensors"):
        loaded |= load_file(file)
    for tensor in small().tensors:
        for number, (name, _, _) in enumerate(tensor.stored()):
            theirs = loaded.pop(f"{tensor.name}/{name}" if number else tensor.name)
            ours = opened.plane(tensor.name, name)
            assert tuple(theirs.shape) == ours.shape
            assert theirs.reshape(-1).view(torch.uint8).numpy().tobytes() == ours.tobytes()
    assert {name: state.numpy().tobytes() for name, state in loaded.items()} == {
        "rank/0": b"loader at 7",
        "rank/2": b"x",
    }


def test_torch_distributed_checkpoint_reads_the_same_words(folder: Path) -> None:
    need_safetensors()
    if not hasattr(dcp, "HuggingFaceStorageReader"):
        pytest.skip(f"torch {torch.__version__} has no HuggingFaceStorageReader")
    opened = ballast.checkpoint.open(folder)
    dtypes = {"<f4": torch.float32, "<u2": torch.bfloat16}
    state = {}
    for tensor in opened.parsed_spec.tensors:
        first, *rest = tensor.group.planes
        state[tensor.name] = torch.zeros(tensor.shape, dtype=dtypes[first.dtype])
        for plane in rest:
            like = opened.plane(tensor.name, plane.name)
            state[f"{tensor.name}/{plane.name}"] = torch.zeros(
                like.shape, dtype=getattr(torch, f"uint{8 * plane.itemsize}")
            )
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    for tensor in opened.parsed_spec.tensors:
        for number, plane in enumerate(tensor.group.planes):
            theirs = state[f"{tensor.name}/{plane.name}" if number else tensor.name]
            assert (
                theirs.reshape(-1).view(torch.uint8).numpy().tobytes()
                == opened.plane(tensor.name, plane.name).tobytes()
            )


def test_a_checkpoint_of_a_daemon_is_read() -> None:
    """tests/checkpoints/format-1: four steps of AdamW by version 0.1.0, with a client_state."""
    opened = ballast.checkpoint.open(GOLDEN)
    assert opened.verify() == ()
    assert (opened.run_id, opened.step, len(opened.tensors())) == ("golden", 4, 6)
    for name in opened.tensors():
        weights, variance = opened.weights(name), opened.moment(name, "variance")
        assert np.isfinite(weights).all() and np.abs(weights).max() > 0
        assert (variance >= 0).all() and variance.max() > 0 and np.isfinite(opened.moment(name, "momentum")).all()
    state = opened.client_state(0)
    assert state is not None and len(state) == 1837
    for file in opened.manifest.files:
        assert (fast.crc32c((GOLDEN / file.name).read_bytes()),) == file.crc32c


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 255, 256, 257, 511, 513, 4096, 12345, MIB // 4 + 1])
def test_crc32c(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    assert fast.crc32c(data) == crc32c(data)


def test_crc32c_of_published_vectors() -> None:
    """RFC 3720, B.4, and the check value of the catalogue of CRCs."""
    assert fast.crc32c(b"123456789") == 0xE3069283
    assert fast.crc32c(bytes(32)) == 0x8A9136AA
    assert fast.crc32c(bytes([255] * 32)) == 0x62A8AB43
    with pytest.raises(ValueError, match="at most 1048576"):
        fast.crc32c(bytes(MIB + 1))


# --- the program ----------------------------------------------------------------------------------------------------


def test_it_needs_neither_torch_nor_the_core(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ALONE, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{folder}: good" in done.stdout


def said(arguments: list[Any], capsys: pytest.CaptureFixture[str], status: int = 0) -> str:
    assert main([str(argument) for argument in arguments]) == status
    out, err = capsys.readouterr()
    return err if status == 2 else out


@pytest.mark.parametrize("level", [0, 1, 2])
def test_verify_of_a_checkpoint_a_run_and_a_daemons_storage(
    level: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Sketch([Sketched("w")], run_id="r2")
    write_checkpoint(folder.parents[1] / "r2" / "discarded-000000000003-step-5", other)
    storage = folder.parents[2]
    text = said(["verify", [folder, folder.parent, storage][level]], capsys)
    assert f"{folder}: good\n  run r1, step 5, 6 files" in text
    assert ("discarded-000000000003-step-5: good, discarded: its steps were undone" in text) == (level == 2)


def test_folders_that_are_no_checkpoints_are_named_and_not_checked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("writing-000000000002-step-9", "deleting-000000000001-step-1", "000000000001-step-x", "notes"):
        (folder.parent / name).mkdir()
    (folder.parents[1] / ".removed-1-r9").mkdir()
    (folder.parent / "000000000009-step-9").symlink_to(folder)
    text = said(["verify", folder.parents[2]], capsys)
    assert "writing-000000000002-step-9 was not published" in text
    assert "deleting-000000000001-step-1 is being removed" in text
    assert ".removed-1-r9 is of a run that was deleted" in text
    assert "000000000009-step-9 is a symbolic link" in text
    assert text.count("good") == 1 and "notes" not in text and "step-x" not in text


def test_a_missing_or_foreign_folder_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("show", "verify"):
        assert "does not exist" in said([command, tmp_path / "none"], capsys, 2)
        assert "wanted: the folder of a checkpoint, of a run" in said([command, tmp_path], capsys, 2)
    (tmp_path / "writing-000000000002-step-9").mkdir()
    assert "was not published" in said(["verify", tmp_path], capsys, 2)
    assert "was not published" in said(["verify", tmp_path / "writing-000000000002-step-9"], capsys, 2)
    with pytest.raises(ballast.checkpoint.NotACheckpoint, match="is no checkpoint's folder"):
        ballast.checkpoint.open(tmp_path)
    with pytest.raises(SystemExit) as wrong:
        main(["prove", str(tmp_path)])
    assert wrong.value.code == 2


def test_open_of_a_run_names_its_checkpoints(folder: Path) -> None:
    with pytest.raises(ballast.checkpoint.NotACheckpoint, match=f"it holds {folder}"):
        ballast.checkpoint.open(folder.parent)


def test_show_of_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(["show", folder], capsys)
    assert "run r1, step 5, generation 3\nwritten 2026-11-23T18:44:02+00:00 by ballastd 0.1.0 (6dced01)" in text
    assert "141 parameters in 4 tensors" in text
    assert "adamw/split24/companded8: 132," in text and "collage_plus/mcf/mcf: 8, 10 bytes each" in text
    assert "last result APPLIED, loss 2.5, grad norm 0.25" in text
    assert "client_state of rank 2: 1 bytes, of step 5" in text and "run.json" in text
    facts = json.loads(said(["show", "--json", folder], capsys))
    # Adam's of 99 and of 33 elements: 2 + 1 + 2 bytes each, and two scales for 32; fp32 twice; mcf five words of 2.
    stored = 5 * 132 + 2 * 2 * (4 + 2) + 2 * 4 + 10 * 8
    assert facts["bytes_per_parameter"] == round(stored / 141, 4)
    assert facts["client_state"] == [{"rank": 0, "bytes": 11, "step": 5}, {"rank": 2, "bytes": 1, "step": 5}]
    assert sum(file["bytes"] for file in facts["files"]) == ballast.checkpoint.open(folder).manifest.nbytes


def test_show_of_many(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, step in (("000000000003-step-7", 7), ("000000000004-step-8", 8), ("discarded-000000000002-step-6", 6)):
        write_checkpoint(folder.parent / name, Sketch([Sketched("w")], step=step))
    (folder.parent / "000000000004-step-8" / "run.json").unlink()
    rows = json.loads(said(["show", "--json", folder.parents[2]], capsys))["checkpoints"]
    assert [(row["number"], row["step"], row["state"].split(":")[0]) for row in rows] == [
        (1, 5, "kept"),
        (2, 6, "discarded"),
        (3, 7, "newest"),
        (4, 8, "damaged"),
    ]
    assert rows[0]["bytes"] == sum(f.stat().st_size for f in folder.glob("*.*s*") if f.name != "manifest.json")
    text = said(["show", folder.parent], capsys).splitlines()
    assert text[0].split() == ["run", "number", "step", "written", "bytes", "state"]
    assert text[3].split()[:3] == ["r1", "3", "7"] and text[3].endswith("newest")
    assert "run.json is damaged: it is missing" in text[4]
