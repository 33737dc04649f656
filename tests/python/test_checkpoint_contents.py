"""Checkpoints whose hashes are all right, and which are wrong in themselves: another's, or a fault of a writer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

import ballast.checkpoint
from ballast.checkpoint import CheckpointError, Damaged, TooNew
from ballast.checkpoint.__main__ import main
from ballast.checkpoint.verification import verify
from checkpoint_folder import Sketch, Sketched, as_json, content_of, header_of, manifest_of, safetensors_of, seal, small
from checkpoint_folder import with_header, with_header_text, write_checkpoint

MODEL, OPTIMIZER = "model-00001-of-00001.safetensors", "optimizer-00001-of-00001.safetensors"
CLIENT_STATE, INDEX = "client_state.safetensors", "model.safetensors.index.json"
Change = Callable[[Any], Any]


def refused(folder: Path, said: str, kind: type[CheckpointError] = Damaged) -> None:
    """By open() and by verify(), in the same words."""
    with pytest.raises(kind, match=said) as raised:
        ballast.checkpoint.open(folder)
    assert str(raised.value) in [str(fault) for fault in verify(folder).faults]
    assert main(["verify", str(folder)]) == 1


# --- the manifest ---------------------------------------------------------------------------------------------------

MANIFESTS: dict[str, tuple[Change, str]] = {
    "no format": (lambda m: m.pop("format"), "manifest.json is damaged: it has no format"),
    "a run's name": (lambda m: m.update(runId="../r1"), "runId is '../r1': wanted a run's name"),
    "the spec's hash": (lambda m: m.update(specSha256="5" * 63), "specSha256 is '5+': wanted 64 lower-case"),
    "no step": (lambda m: m.pop("step"), "step is 0: no step is"),
    "a step that is text": (lambda m: m.update(step="five"), "step is 'five': wanted a whole number"),
    "a step in other digits": (lambda m: m.update(step="٣"), "step is '٣': wanted a whole number"),
    "a negative step": (lambda m: m.update(step=-1), "step is '-1': wanted a whole number"),
    "a step that is true": (lambda m: m.update(step=True), "step is 'True': wanted a whole number"),
    "another step": (lambda m: m.update(step="6"), "run.json is damaged: step is 5, and the manifest's 6"),
    "another generation": (lambda m: m.update(generation="4"), "run.json .* generation is 3, and the manifest's 4"),
    "another run": (
        lambda m: m.update(runId="r2"),
        "spec.json is damaged: it is of run 'r1', and the manifest of 'r2'",
    ),
    "a time": (lambda m: m.update(writtenAt="yesterday"), "writtenAt is 'yesterday': wanted a time in UTC"),
    "a version for terminals": (lambda m: m.update(version="\x1b[2J"), "version is .* wanted a line of text"),
    "a version that is none": (lambda m: m.update(version=1), "version is no text"),
    "files that are none": (lambda m: m.update(files={}), "files is no list"),
    "a file that is none": (lambda m: m["files"].insert(0, 7), r"files\[0\] is no message"),
    "an order": (lambda m: m["files"].reverse(), "files are not in the order of their names"),
    "a file twice": (lambda m: m["files"].append(m["files"][-1]), "files are not in the order of their names"),
    "no spec": (lambda m: m["files"].pop(), "files has no spec.json"),
    "a name upwards": (lambda m: m["files"][0].update(name="../spec.json"), r"files\[0\].name is '../spec.json': want"),
    "an absolute name": (lambda m: m["files"][0].update(name="/etc/passwd"), "wanted a plain file name"),
    "a hidden name": (lambda m: m["files"][0].update(name=".x"), "wanted a plain file name"),
    "no name": (lambda m: m["files"][0].update(name=""), "wanted a plain file name"),
    "itself": (lambda m: m["files"][0].update(name="SHA256SUMS"), "a manifest does not have that file"),
    "a file's hash": (lambda m: m["files"][0].update(sha256="A" * 64), r"files\[0\].sha256 is 'A+': wanted 64"),
    "a file's checksums": (lambda m: m["files"][0].update(crc32c=[]), "crc32c has 0 checksums for 4108 bytes"),
    "a file's checksum": (lambda m: m["files"][0].update(crc32c=[1 << 32]), "crc32c is '4294967296': wanted"),
    "a size": (lambda m: m["files"][0].update(bytes=str(1 << 70)), "bytes is .* wanted a whole number"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_says_what_cannot_be(case: str, tmp_path: Path) -> None:
    change, said = MANIFESTS[case]
    files = content_of(small())
    manifest = manifest_of(small(), files)
    change(manifest)
    refused(seal(tmp_path / "copy", files, manifest), said)


def test_a_later_format_is_refused_by_its_number(tmp_path: Path) -> None:
    """Whatever else such a manifest may have."""
    files = content_of(small())
    manifest = {"format": 2, "version": [9], "files": [], "more": [1]}
    refused(seal(tmp_path / "copy", files, manifest), "is of format 2, written by version .*9.*; read is 1", TooNew)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[]", "it is no object of JSON"),
        (b"{", "it is no JSON"),
        (b'{"format":1,"format":1}', "'format' is there twice"),
        (b'{"format":NaN}', "NaN is no JSON"),
        (b'{"format":"\xff"}', "it is no JSON"),
        (b'{"format":' + b"9" * 5000 + b"}", "it is no JSON|format is"),
        (b'{"a":' * 200_000, "nested too deeply"),
    ],
)
def test_a_manifest_that_is_no_json(text: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoint_folder.as_json", lambda value: text)
    refused(seal(tmp_path / "copy", {}, {"files": []}), f"manifest.json is damaged: .*{said}")


def test_the_sums_have_every_file_in_order(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "copy", small())
    first, second, third, *rest = (folder / "SHA256SUMS").read_text().splitlines(keepends=True)
    for lines in ([first, third, second, *rest], [first, second, *rest], [first, second, third, *rest, third]):
        (folder / "SHA256SUMS").write_text("".join(lines))
        refused(folder, "SHA256SUMS is damaged: it is not what manifest.json leads to")


# --- spec.json and run.json -----------------------------------------------------------------------------------------

SPECS: dict[str, tuple[Change, str]] = {
    "no tensors": (lambda s: s.pop("tensors"), "spec.json is damaged: tensors is empty"),
    "a name twice": (lambda s: s["tensors"][1].update(name="layer.weight"), "tensors has a name twice"),
    "no name": (lambda s: s["tensors"][1].pop("name"), r"tensors\[1\].name is empty"),
    "a name that is none": (lambda s: s["tensors"][1].update(name=["x"]), r"tensors\[1\].name is no text"),
    "a group": (lambda s: s["tensors"][2].update(group=9), r"tensors\[2\].group is 9, and there are 3 groups"),
    "a size of 0": (lambda s: s["tensors"][0].update(shape=["0"]), r"tensors\[0\].shape is \(0,\): wanted 1 to 2"),
    "too many elements": (lambda s: s["tensors"][0].update(shape=[1 << 30, 1 << 30]), "wanted 1 to 2.40 elements"),
    "too many dimensions": (lambda s: s["tensors"][0].update(shape=[1] * 33), r"tensors\[0\].shape is"),
    "ranks": (lambda s: s.update(ranks=0), "ranks is 0"),
    "too many ranks": (lambda s: s.update(ranks=65), "ranks is '65': wanted a whole number"),
    "another number of ranks": (
        lambda s: s.update(ranks=2),
        "run.json .* clientStateSteps has 3 entries: the spec .* 2",
    ),
    "clipped tensors": (lambda s: s.update(tensorClip={}), "run.json .* norms has 0 entries: the spec leads to 4"),
    "another shape": (lambda s: s["tensors"][0].update(shape=["33", "3"]), f"{MODEL} .* 'layer.weight' as"),
    "other formats": (lambda s: s["groups"][0].update(master="split32"), f"{OPTIMIZER} .* 'layer.weight/weight.lo' as"),
    "another order": (lambda s: s["tensors"].reverse(), f"{MODEL} .* has 'layer.weight' where .* lead to 'wörter"),
    "one tensor less": (lambda s: s["tensors"].pop(), "run.json .* updates has 4 entries: the spec leads to 3"),
}
RUNS: dict[str, tuple[Change, str]] = {
    "updates": (lambda r: r["updates"].pop(), "run.json is damaged: updates has 3 entries: the spec leads to 4"),
    "an update": (lambda r: r["updates"].append("x"), "updates is 'x': wanted a whole number"),
    "updatedIn": (lambda r: r["updatedIn"].append("1"), "updatedIn has 5 entries"),
    "a later update": (lambda r: r["updatedIn"].__setitem__(0, "6"), "updatedIn names a step after 5"),
    "lastLr": (lambda r: r["lastLr"].pop(), "lastLr has 3 entries"),
    "norms": (lambda r: r.update(norms=[{}] * 4), "norms has 4 entries: the spec leads to 0"),
    "the result's step": (lambda r: r["result"].update(step="4"), "result.step is 4, and the manifest's 5"),
    "a result that is none": (lambda r: r.update(result=[]), "result is no message"),
    "a tensor past the last": (lambda r: r["result"].update(tensorsNotApplied=[4]), "has a number past the last of 4"),
    "layers": (lambda r: r["detector"]["rms"].pop(), "detector.curvature has 1 entries, and rms 0"),
    "ranks": (lambda r: r["clientStateBytes"].pop(), "clientStateBytes has 2 entries: the spec leads to 3"),
    "a later client_state": (
        lambda r: r["clientStateSteps"].__setitem__(0, "6"),
        "clientStateSteps names a step after 5",
    ),
    "a client_state of no step": (
        lambda r: r["clientStateSteps"].__setitem__(0, "0"),
        r"Bytes\[0\] is 11, and it is of no",
    ),
    "a client_state's size": (lambda r: r["clientStateBytes"].__setitem__(0, "12"), f"{CLIENT_STATE} .* 'rank/0' as"),
    "another rank's client_state": (
        lambda r: r["clientStateBytes"].__setitem__(1, "1"),
        "clientStateBytes.1. is 1, and",
    ),
}


@pytest.mark.parametrize(("name", "case"), [("spec.json", c) for c in SPECS] + [("run.json", c) for c in RUNS])
def test_a_spec_or_a_run_that_the_other_files_contradict(name: str, case: str, tmp_path: Path) -> None:
    change, said = (SPECS if name == "spec.json" else RUNS)[case]
    files = content_of(small())
    value = json.loads(files[name])
    change(value)
    files[name] = as_json(value)
    refused(seal(tmp_path / "copy", files, manifest_of(small(), files)), said)


def test_lr_is_not_there_before_the_first_applied_step(tmp_path: Path) -> None:
    files = content_of(small())
    run = json.loads(files["run.json"])
    del run["lastLr"]
    files["run.json"] = as_json(run)
    assert verify(seal(tmp_path / "copy", files, manifest_of(small(), files))).faults == ()


def test_norms_are_there_where_tensors_are_clipped(tmp_path: Path) -> None:
    sketch = Sketch([Sketched("a"), Sketched("b")], clips_tensors=True)
    assert verify(write_checkpoint(tmp_path / "copy", sketch)).faults == ()


@pytest.mark.parametrize("name", ["rule", "master", "state"])
def test_an_optimizer_that_is_not_known_yet(name: str, tmp_path: Path) -> None:
    files = content_of(small())
    spec = json.loads(files["spec.json"])
    spec["groups"][1][name] = "shampoo"
    files["spec.json"] = as_json(spec)
    folder = seal(tmp_path / "copy", files, manifest_of(small(), files))
    refused(folder, "spec.json has the optimizer .*shampoo.*: use the version of ballast that wrote it", TooNew)


# --- the files of data ----------------------------------------------------------------------------------------------


def edited(name: str, change: Change) -> dict[str, bytes]:
    """The content, the header of one file changed."""
    files = content_of(small())
    header, data = header_of(files[name])
    changed = change(header) or header
    files[name] = with_header(changed, data)
    return files


WORDS = [b"null", b"[]", b"{}", b"-1", b"1e400", b"true", b'"\\ud800"', b'""', b"0", b"99999999999999999999", b"[[0]]"]

FIRST = "layer.weight"
HEADERS: dict[str, tuple[Change, str]] = {
    "a dtype": (lambda h: h[FIRST].update(dtype="F16"), "'layer.weight' as .*F16.*lead to .*BF16"),
    "a shape": (lambda h: h[FIRST].update(shape=[99]), "'layer.weight' as"),
    "a size that is no whole number": (lambda h: h[FIRST].update(shape=[3.0, 33]), "'layer.weight' as"),
    "a gap": (lambda h: h["layer.bias"].update(data_offsets=[200, 266]), "'layer.bias' as .*200, 266"),
    "an overlap": (lambda h: h["layer.bias"].update(data_offsets=[0, 66]), "'layer.bias' as"),
    "past the end": (lambda h: h["layer.bias"].update(data_offsets=[198, 1 << 40]), "'layer.bias' as"),
    "one field more": (lambda h: h[FIRST].update(more=1), "'layer.weight' as"),
    "one field less": (lambda h: h[FIRST].pop("shape") and None, "'layer.weight' as"),
    "no message": (lambda h: h.update({FIRST: 7}), "'layer.weight' as 7"),
    "a tensor less": (lambda h: h.pop(FIRST) and None, "has 'layer.bias' where .* lead to 'layer.weight'"),
    "the last tensor less": (lambda h: h.popitem() and None, "has 3 tensors: .* lead to 4"),
    "a tensor more": (lambda h: h.update(more=h[FIRST]), "has 5 tensors: .* lead to 4"),
    "another order": (lambda h: dict(reversed(h.items())), "where spec.json and run.json lead to"),
    "no metadata": (lambda h: h.pop("__metadata__") and None, "__metadata__ is None"),
    "other metadata": (lambda h: h["__metadata__"].update(format="tf"), "__metadata__ is .*tf.*: wanted"),
    "a list": (lambda h: [h], "its header is no object of JSON"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_the_spec_does_not_lead_to(case: str, tmp_path: Path) -> None:
    change, said = HEADERS[case]
    files = edited(MODEL, change)
    refused(seal(tmp_path / "copy", files, manifest_of(small(), files)), f"{MODEL} is damaged: .*{said}")


def repadded(file: bytes, blanks: bytes) -> bytes:
    """The same file, with so much more behind its header."""
    length = int.from_bytes(file[:8], "little") + len(blanks)
    return length.to_bytes(8, "little") + file[8 : length - len(blanks) + 8] + blanks + file[length - len(blanks) + 8 :]


@pytest.mark.parametrize(
    ("blanks", "said"),
    [
        (b" ", "its data begin at 4097, no multiple of 4096"),
        (b"\n" * 4096, "no object of JSON with blanks behind it"),
        (b"{}" * 2048, "it is no JSON"),
    ],
)
def test_what_pads_a_header(blanks: bytes, said: str, tmp_path: Path) -> None:
    files = content_of(small())
    files[MODEL] = repadded(files[MODEL], blanks)
    refused(seal(tmp_path / "copy", files, manifest_of(small(), files)), said)


@pytest.mark.parametrize("more", [b"\0", b"\0" * 4096])
def test_bytes_behind_the_data(more: bytes, tmp_path: Path) -> None:
    files = content_of(small())
    files[OPTIMIZER] += more
    folder = seal(tmp_path / "copy", files, manifest_of(small(), files))
    refused(folder, f"{OPTIMIZER} is damaged: it has .* bytes: its header leads to")


def test_a_header_that_names_a_tensor_twice(tmp_path: Path) -> None:
    files = content_of(small())
    header, data = header_of(files[MODEL])
    text = json.dumps(header, ensure_ascii=False).replace('"layer.bias"', '"layer.weight"')
    files[MODEL] = with_header_text(text.encode(), data)
    refused(seal(tmp_path / "copy", files, manifest_of(small(), files)), "'layer.weight' is there twice")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda i: i["weight_map"].update(scale=OPTIMIZER), "its weight_map is not what spec.json leads to"),
        (lambda i: i["weight_map"].pop("scale"), "its weight_map is not what spec.json leads to"),
        (lambda i: i.pop("weight_map"), "its weight_map is not what spec.json leads to"),
        (lambda i: i["metadata"].update(total_size=7), "its metadata is not .*'total_size': 284"),
    ],
)
def test_the_index_names_every_weight(change: Change, said: str, tmp_path: Path) -> None:
    files = content_of(small())
    index = json.loads(files[INDEX])
    change(index)
    files[INDEX] = as_json(index)
    refused(seal(tmp_path / "copy", files, manifest_of(small(), files)), f"{INDEX} is damaged: {said}")


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, INDEX, CLIENT_STATE])
def test_a_file_that_must_be_listed(name: str, tmp_path: Path) -> None:
    files = content_of(small())
    del files[name]
    refused(
        seal(tmp_path / "copy", files, manifest_of(small(), files)), f"it lists no {name}, and spec.json and run.json"
    )


def test_a_file_that_must_not_be_listed(tmp_path: Path) -> None:
    files = content_of(Sketch([Sketched("w")], client_states=[None])) | {"notes.txt": b""}
    files[CLIENT_STATE] = safetensors_of([("rank/0", "U8", [1], b"x")])
    folder = seal(tmp_path / "copy", files, manifest_of(Sketch([]), files))
    faults = [str(fault) for fault in verify(folder).faults]
    assert len(faults) == 2
    assert all(f"it lists {name}, and spec.json" in fault for name, fault in zip((CLIENT_STATE, "notes.txt"), faults))


def test_a_checksum_that_was_never_right(tmp_path: Path) -> None:
    """SHA-256 decides; the CRC-32C is only asked where that is wrong. So it is a daemon that finds this one."""
    files = content_of(small())
    manifest = manifest_of(small(), files)
    manifest["files"][1]["crc32c"] = [7]
    folder = seal(tmp_path / "copy", files, manifest)
    assert verify(folder).faults == ()
    manifest["files"][1] |= {"sha256": "0" * 64, "crc32c": manifest_of(small(), files)["files"][1]["crc32c"]}
    (fault,) = verify(seal(tmp_path / "other", files, manifest)).faults
    assert "its SHA-256 is not what the manifest says, though every MiB has its CRC-32C" in str(fault)


@pytest.mark.parametrize("name", ["manifest.json", "spec.json", "run.json", INDEX, MODEL])
def test_whatever_the_bytes_are_the_answer_is_an_answer(name: str, tmp_path: Path) -> None:
    """Words of JSON put in the place of others, and every hash made right again: never another exception."""
    random, answers = Random(7), set()
    for round in range(60):
        files = content_of(small())
        text = files[name] if name in files else as_json(manifest_of(small(), files))
        words = [match.span() for match in re.finditer(rb'"[^"]*"|[0-9.]+', text[:4096])]
        begin, end = random.choice(words)
        text = text[:begin] + random.choice(WORDS) + text[end:]
        files |= {name: text} if name in files else {}
        manifest = manifest_of(small(), files)
        folder = seal(tmp_path / f"{round}", files, manifest)
        if name not in files:
            line = f"{hashlib.sha256(text).hexdigest()}  {name}"
            sums = (folder / "SHA256SUMS").read_text().splitlines()
            (folder / "SHA256SUMS").write_text("\n".join([line, *sums[1:], ""]))
            (folder / name).write_bytes(text)
        faults = verify(folder).faults
        answers.add(bool(faults))
        if not faults:
            ballast.checkpoint.open(folder)
    assert True in answers
