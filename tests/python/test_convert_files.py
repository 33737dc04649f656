"""What ballast.convert reads and writes as files: nothing is run, nothing is left half done."""

from __future__ import annotations

import io
import json
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ballast
from ballast.convert import VerifyFailed, convert, torch_file
from ballast.convert.__main__ import main
from ballast.convert.lazy import constant
from ballast.convert.progress import Progress
from checkpoints import assert_same, loaded, need_safetensors, save_dcp, saved


class Payload:
    """What a pickle may do where code from it is run: here, make a file."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self._path,))


# --- nothing is run -------------------------------------------------------------------------------------------------


def test_a_file_that_wants_code_run_is_refused(tmp_path: Path) -> None:
    _, optimizer, _ = saved(tmp_path / "in")
    state = {**optimizer.state_dict(), "args": Payload(tmp_path / "harm")}
    torch.save(state, tmp_path / "bad.pt")
    with pytest.raises(
        ballast.Rejected, match=r"bad\.pt holds .*, which only running code .* are not read\. .*state_dict\(\)"
    ):
        convert(tmp_path / "bad.pt", tmp_path / "out.pt", "torch")
    assert not (tmp_path / "harm").exists() and not (tmp_path / "out.pt").exists()


def test_an_index_that_wants_code_run_is_refused(tmp_path: Path) -> None:
    model, optimizer, _ = saved(tmp_path / "in")
    folder = save_dcp(tmp_path / "dcp", model, optimizer)
    index = dcp.FileSystemReader(folder).read_metadata()
    index.planner_data = Payload(tmp_path / "harm")
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ballast.Rejected, match=r"\.metadata holds pathlib.*, which only running code"):
        convert(folder, tmp_path / "out.pt", "torch")
    assert not (tmp_path / "harm").exists()


def test_a_value_that_wants_code_run_is_refused_if_it_is_the_optimizers(tmp_path: Path) -> None:
    model, optimizer, _ = saved(tmp_path / "in")
    for group in optimizer.param_groups:
        group["note"] = Payload(tmp_path / "harm")
    folder = save_dcp(tmp_path / "dcp", model, optimizer)
    with pytest.raises(ballast.Rejected, match=r"optimizer\.param_groups\.0\.note holds .*which only running code"):
        convert(folder, tmp_path / "out.pt", "torch")
    del optimizer.param_groups[0]["note"]
    state = {
        "optimizer": dcp.state_dict.get_optimizer_state_dict(model, optimizer),
        "loader": Payload(tmp_path / "harm"),
    }
    dcp.save(state, checkpoint_id=tmp_path / "other", no_dist=True)
    convert(tmp_path / "other", tmp_path / "out.pt", "torch")
    assert not (tmp_path / "harm").exists()
    assert_same(optimizer.state_dict(), loaded(tmp_path / "out.pt"))


def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    model, optimizer, _ = saved(tmp_path / "in")
    folder = save_dcp(tmp_path / "dcp", model, optimizer)
    index = dcp.FileSystemReader(folder).read_metadata()
    for info in index.storage_data.values():
        info.relative_path = "../in/optimizer.pt"
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ballast.Rejected, match=r"is in \.\./in/optimizer\.pt, which is not in the folder"):
        convert(folder, tmp_path / "out.pt", "torch")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("in.pt", b"PK\x03\x04 and no more", "cannot be read as a file of torch.save"),
        ("in.pt", b"", "in.pt is no file of torch.save: it is empty"),
        ("in.pt", b"some text", "its 9 bytes are neither a zip archive nor a pickle"),
        ("in.txt", b"some text", "neither a file of torch.save nor safetensors"),
        ("in/.metadata", b"\x80\x04N.", "is no index of torch.distributed.checkpoint"),
        ("in/.metadata", b"\x80\x04", r"\.metadata is damaged"),
        ("in/scheduler.pt", b"", r"neither \.metadata .* nor optimizer\.pt"),
        ("in/manifest.json", b"", r"is a checkpoint of a daemon.*ballast\.checkpoint\.open"),
    ],
)
def test_what_is_no_checkpoint_is_refused_by_name(file: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(content)
    source = (tmp_path / file).parent if "/" in file else tmp_path / file
    with pytest.raises(ballast.Rejected, match=said):
        convert(source, tmp_path / "out.pt", "torch")


def test_torchs_older_form_is_refused_with_the_way_out(tmp_path: Path) -> None:
    _, optimizer, _ = saved(tmp_path / "in")
    torch.save(optimizer.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ballast.Rejected, match="form that torch had before 1.6.*save it again with torch.save"):
        convert(tmp_path / "old.pt", tmp_path / "out.pt", "torch")


# --- the files themselves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [zipfile.ZIP64_LIMIT, 64], ids=["small", "as beyond 4 GiB"])
def test_a_written_file_is_a_sound_archive_of_aligned_tensors(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", limit)
    _, optimizer, source = saved(tmp_path / "in")
    convert(source, tmp_path / "out.pt", "torch")
    with zipfile.ZipFile(tmp_path / "out.pt") as archive, (tmp_path / "out.pt").open("rb") as file:
        assert archive.testzip() is None
        for entry in archive.infolist():
            file.seek(entry.header_offset + 26)
            name, extra = struct.unpack("<HH", file.read(4))
            assert entry.compress_type == zipfile.ZIP_STORED
            assert (entry.header_offset + 30 + name + extra) % 64 == 0
    for mapped in (False, True):
        assert_same(optimizer.state_dict(), torch.load(tmp_path / "out.pt", mmap=mapped))
    convert(source, tmp_path / "again.pt", "torch")
    assert (tmp_path / "again.pt").read_bytes() == (tmp_path / "out.pt").read_bytes()


@pytest.mark.parametrize("dtype", list(torch_file._STORAGES), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
def test_every_dtype_and_shape_comes_back(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    values = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    lazy = constant(values)
    torch_file.write_tree(tmp_path / "t.pt", {"a": [lazy], "b": lazy, "c": (1, "x", None)}, lambda nbytes: None)
    came = torch.load(tmp_path / "t.pt", weights_only=True)
    assert came["c"] == (1, "x", None)
    for one in (came["a"][0], came["b"]):
        assert (one.dtype, one.shape, one.stride()) == (values.dtype, values.shape, values.stride())
        assert torch.equal(one, values)
    assert came["a"][0].data_ptr() == came["b"].data_ptr()  # one tensor stays one


def test_safetensors_are_as_the_format_says(tmp_path: Path) -> None:
    need_safetensors()
    from safetensors import safe_open

    model, optimizer, source = saved(tmp_path / "in")
    convert(source, tmp_path / "out.safetensors", "safetensors", names=[tmp_path / "in" / "pytorch_model.bin"])
    content = (tmp_path / "out.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0 and header.pop("__metadata__")["format"] == "pt"
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert ends[0][0] == 0 and ends[-1][1] == len(content) - 8 - length
    assert all(a[1] == b[0] for a, b in zip(ends, ends[1:]))
    with safe_open(tmp_path / "out.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(header)
        for name, parameter in model.named_parameters():
            assert torch.equal(file.get_tensor(f"state.{name}.exp_avg"), optimizer.state[parameter]["exp_avg"])


def test_safetensors_of_others_are_refused(tmp_path: Path) -> None:
    need_safetensors()
    from safetensors.torch import save_file

    save_file({"state.w.exp_avg": torch.ones(3)}, tmp_path / "in.safetensors")
    with pytest.raises(ballast.Rejected, match="holds no param_groups: of safetensors files only those"):
        convert(tmp_path / "in.safetensors", tmp_path / "out.pt", "torch")
    (tmp_path / "bad.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    with pytest.raises(ballast.Rejected, match="bad.safetensors cannot be read as safetensors"):
        convert(tmp_path / "bad.safetensors", tmp_path / "out.pt", "torch")


def test_the_package_that_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, source = saved(tmp_path / "in")
    convert(source, tmp_path / "out.safetensors", "safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ballast.Rejected, match=r"pip install safetensors \(or ballast-optim\[convert\]\)"):
        convert(tmp_path / "out.safetensors", tmp_path / "out.pt", "torch")


# --- all or nothing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["torch", "dcp"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_what_ends_in_the_middle_leaves_nothing(
    to: str, error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "in")
    calls = iter(range(1000))

    def stop(nbytes: int) -> None:
        if next(calls) == 3:
            raise error

    monkeypatch.setattr(Progress, "advance", lambda self, nbytes: stop(nbytes))
    with pytest.raises(BaseException) as caught:
        convert(tmp_path / "in", tmp_path / "out", to)
    assert caught.type is (error if isinstance(error, type) else OSError)
    assert next(calls) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("to", ["torch", "dcp", "safetensors", "hf-trainer"])
def test_a_full_disk_leaves_nothing_and_is_told(to: str, tmp_path: Path) -> None:
    """Files of this process may have 2 KiB at most: a write fails in the middle, as on a full disk."""
    saved(tmp_path / "in")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))  # noqa: E731
    command = [sys.executable, "-B", "-m", "ballast.convert", tmp_path / "in", tmp_path / "out", "--to", to]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.endswith("out: File too large\n"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_disk_that_is_full_in_the_middle_of_a_tensor_is_told(tmp_path: Path) -> None:
    """In a folder of torch.distributed.checkpoint, whose tensors torch itself writes."""
    weight = torch.nn.Parameter(torch.zeros(1 << 17))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([("weight", weight)])
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "in")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))  # noqa: E731
    command = [sys.executable, "-B", "-m", "ballast.convert", tmp_path / "in", tmp_path / "out", "--to", "dcp"]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.endswith("out: File too large\n"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_file_beside_that_cannot_be_copied_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_bytes(bytes(1 << 18))
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))  # noqa: E731
    command = [sys.executable, "-B", "-m", "ballast.convert", tmp_path / "in", tmp_path / "out", "--to", "hf-trainer"]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True)
    assert done.returncode == 1 and "tokenizer.json of IN could not be copied: " in done.stderr, done.stderr
    assert "File too large" in done.stderr and [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_leaves_nothing_and_is_told(name: str, tmp_path: Path) -> None:
    """Sent by the program to itself while it writes."""
    saved(tmp_path / "in")
    program = (
        "import os, runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from ballast.convert import torch_file\n"
        f"torch_file.raw_bytes = lambda tensor: os.kill(os.getpid(), signal.{name})\n"
        f"sys.argv[1:] = [{str(tmp_path / 'in')!r}, {str(tmp_path / 'out.pt')!r}, '--to', 'torch']\n"
        "runpy.run_module('ballast.convert', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True)
    assert done.returncode == 130 and "interrupted; there is no OUT" in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_out_that_exists_is_kept_unless_it_may_be_replaced(tmp_path: Path) -> None:
    model, optimizer, source = saved(tmp_path / "in")
    out = tmp_path / "out"
    out.write_text("mine")
    with pytest.raises(ballast.Rejected, match="out exists: .*--overwrite"):
        convert(source, out, "torch")
    assert out.read_text() == "mine"
    given = [tmp_path / "in" / "pytorch_model.bin"]
    for to in ("torch", "dcp", "dcp", "hf-trainer", "torch"):  # files over folders, folders over files
        convert(source, out, to, names=given, overwrite=True, verify=True)
    assert_same(optimizer.state_dict(), loaded(out))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("name", [f"{'m' * 250}.pt", f"{chr(0x6A21) * 80}.pt"])
def test_an_out_may_have_the_longest_name_there_is(name: str, tmp_path: Path) -> None:
    _, optimizer, source = saved(tmp_path / "in")
    convert(source, tmp_path / name, "torch", verify=True)
    assert_same(optimizer.state_dict(), loaded(tmp_path / name))


def test_a_folder_of_something_else_is_never_deleted(tmp_path: Path) -> None:
    _, _, source = saved(tmp_path / "in")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_text("mine")
    with pytest.raises(
        ballast.Rejected, match="photos is a folder that holds no checkpoint .*--overwrite does not delete"
    ):
        convert(source, tmp_path / "photos", "torch", overwrite=True)
    assert (tmp_path / "photos" / "one.jpg").read_text() == "mine"
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    with pytest.raises(ballast.Rejected, match="link is a symbolic link"):
        convert(source, tmp_path / "link", "torch", overwrite=True)


def test_out_is_not_in_or_around_in(tmp_path: Path) -> None:
    _, _, source = saved(tmp_path / "in")
    for out in (source, tmp_path / "in"):
        with pytest.raises(ballast.Rejected, match="is IN, or holds it"):
            convert(source, out, "torch", overwrite=True)
    with pytest.raises(ballast.Rejected, match="lies in IN, whose files are copied"):
        convert(tmp_path / "in", tmp_path / "in" / "out", "hf-trainer")
    with pytest.raises(ballast.Rejected, match="there is no folder .*gone: make it first"):
        convert(source, tmp_path / "gone" / "out.pt", "torch")


def test_a_result_that_differs_is_found_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, source = saved(tmp_path / "in")
    right = torch_file.raw_bytes
    tensors = iter(range(1000))

    def wrong(tensor: torch.Tensor) -> memoryview:
        return right(tensor if next(tensors) != 4 else tensor + 1e-7)

    monkeypatch.setattr(torch_file, "raw_bytes", wrong)
    with pytest.raises(
        VerifyFailed, match="verify: exp_avg: 9 tensors, wanted to the bit: largest difference .*BEYOND"
    ):
        convert(source, tmp_path / "out.pt", "torch", verify=True)
    assert next(tensors) == 27 and not (tmp_path / "out.pt").exists()


# --- the command line -----------------------------------------------------------------------------------------------


def test_the_exit_status_says_what_became_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, source = saved(tmp_path / "in")
    assert main([str(source), str(tmp_path / "out.pt"), "--to", "bitsandbytes", "--verify"]) == 0
    told = capsys.readouterr().out
    assert "9 parameters, " in told and "from torch (torch's) to bitsandbytes" in told
    assert "verified exp_avg: 9 tensors, wanted up to 0.0071 of a block's largest: equal" in told
    assert main([str(source), str(tmp_path / "out.pt"), "--to", "torch"]) == 1
    assert "out.pt exists" in capsys.readouterr().err
    for wrong in (["--to", "floppy"], [], ["--to", "dcp", "--out-part", "a..b"], ["--to", "torch", "--state1", "x"]):
        with pytest.raises(SystemExit) as ended:
            main([str(source), str(tmp_path / "other.pt"), *wrong])
        assert ended.value.code == 2
        assert "usage: python -m ballast.convert" in capsys.readouterr().err


def test_help_needs_no_torch_and_names_every_format() -> None:
    program = "import sys; sys.modules['torch'] = None\nfrom ballast.convert.__main__ import main\nmain({})"
    done = subprocess.run([sys.executable, "-c", program.format(["--help"])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for word in ("torch", "safetensors", "dcp", "hf-trainer", "flashoptim", "bitsandbytes", "exit status", "--names"):
        assert word in done.stdout
    done = subprocess.run(
        [sys.executable, "-c", program.format(["a", "b", "--to", "torch"])], capture_output=True, text=True
    )
    assert "ballast.convert needs torch 2.4 or later" in done.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_every_ten_seconds_where_nobody_watches() -> None:
    stream, seconds = io.StringIO(), iter([0.0, 4.0, 10.0, 10.0, 19.0, 25.0, 25.0])
    progress = Progress("write", 4 << 20, stream, lambda: next(seconds))
    for _ in range(4):
        progress.advance(1 << 20)
    progress.close()
    assert stream.getvalue() == "write: 50 % of 4 MiB\nwrite: 100 % of 4 MiB\n"


def test_progress_is_tqdms_bar_where_somebody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []

    class Bar:
        def __init__(self, **options: Any):
            steps.append(options["total"])

        def update(self, nbytes: int) -> None:
            steps.append(nbytes)

        def close(self) -> None:
            steps.append("closed")

    monkeypatch.setitem(sys.modules, "tqdm", type("tqdm", (), {"tqdm": Bar}))
    progress = Progress("write", 8, Terminal())
    progress.advance(8)
    progress.close()
    assert steps == [8, 8, "closed"]
    monkeypatch.setitem(sys.modules, "tqdm", None)
    Progress("write", 8, Terminal()).advance(8)  # lines, where it is not installed
