"""Checkpoints of which every byte has its checksum, and whose files do not fit together: `ballastctl verify` says so, and the
daemon refuses them. And folders that are checkpoints by their names alone."""

from __future__ import annotations

import hashlib
import json
import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ballast

from checkpoint_folder import crc32c, header_of, seal, with_header_text
from daemon import ROOT, Daemon
from durable import RUN as DURABLE, ctl, files_in, runs_of, train, trained

RUN = "golden"
MODEL, OPTIMIZER = "model-00001-of-00001.safetensors", "optimizer-00001-of-00001.safetensors"
Files = dict[str, bytes]
Manifest = dict[str, Any]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder, in a daemon's, with one checkpoint that is good."""
    return Path(shutil.copytree(ROOT / "tests" / "checkpoints" / "format-1" / RUN, tmp_path / "runs" / RUN))


def only(run: Path) -> Path:
    [checkpoint] = run.iterdir()
    return checkpoint


def change(checkpoint: Path, how: Callable[[Files, Manifest], None]) -> None:
    """Changes what the files hold, and makes all hashes right again."""
    files = files_in(checkpoint)
    manifest = json.loads(files.pop("manifest.json"))
    del files["SHA256SUMS"]
    how(files, manifest)

    manifest["files"] = [
        {
            "name": name,
            "bytes": str(len(data)),
            "sha256": hashlib.sha256(data).hexdigest(),
            "crc32c": [crc32c(data[at : at + (1 << 20)]) for at in range(0, len(data), 1 << 20)],
        }
        for name, data in sorted(files.items())
    ]
    shutil.rmtree(checkpoint)
    seal(checkpoint, files, manifest)


def in_json(name: str, how: Callable[[Any], Any]) -> Callable[[Files, Manifest], None]:
    def changed(files: Files, _: Manifest) -> None:
        value = json.loads(files[name])
        how(value)
        files[name] = json.dumps(value).encode()

    return changed


def in_header(name: str, old: bytes, new: bytes) -> Callable[[Files, Manifest], None]:
    def changed(files: Files, _: Manifest) -> None:
        length = int.from_bytes(files[name][:8], "little")
        text = files[name][8 : 8 + length].rstrip(b" ")
        assert old in text
        files[name] = with_header_text(text.replace(old, new, 1), header_of(files[name])[1])

    return changed


def longer(name: str) -> Callable[[Files, Manifest], None]:
    def changed(files: Files, _: Manifest) -> None:
        files[name] += b"\0" * 4

    return changed


def without(name: str) -> Callable[[Files, Manifest], None]:
    return lambda files, _: files.pop(name) and None


# What is changed, in which file it is found, and whether it is one that a daemon reads.
WRONG: dict[str, tuple[Callable[[Files, Manifest], None], str, bool]] = {
    "another spec": (in_json("spec.json", lambda s: s.update(seed="77")), "spec.json", True),
    "the manifest's run": (lambda _, m: m.update(runId="another"), "spec.json", True),
    "the manifest's step": (lambda _, m: m.update(step="3"), "is of step 3", True),
    "another step": (in_json("run.json", lambda r: r.update(step="3")), "run.json", True),
    "another result": (in_json("run.json", lambda r: r["result"].update(step="3")), "run.json", True),
    "a tensor's count missing": (in_json("run.json", lambda r: r["updates"].pop()), "run.json", True),
    "a count of the future": (in_json("run.json", lambda r: r["updatedIn"].__setitem__(0, "99")), "run.json", True),
    "a rank too many": (in_json("run.json", lambda r: r["clientStateSteps"].append("0")), "run.json", True),
    "client state's size": (
        in_json("run.json", lambda r: r["clientStateBytes"].__setitem__(0, "1")),
        "client_state.safetensors",
        True,
    ),
    "no client state": (without("client_state.safetensors"), "client_state.safetensors", True),
    "no weights": (without(MODEL), MODEL, True),
    "no moments": (without(OPTIMIZER), "no optimizer file has a plane of", True),
    "longer weights": (longer(MODEL), MODEL, True),
    "longer moments": (longer(OPTIMIZER), OPTIMIZER, True),
    "a blank in the header": (in_header(MODEL, b'"dtype":', b'"dtype": '), MODEL, True),
    "another type": (in_header(MODEL, b'"BF16"', b'"F16"'), MODEL, True),
    "another plane's type": (in_header(OPTIMIZER, b'"U8"', b'"I8"'), OPTIMIZER, True),
    "another tensor's plane": (in_header(OPTIMIZER, b',"', b',"x'), OPTIMIZER, True),
    "an index of another file": (
        in_json("model.safetensors.index.json", lambda i: i["weight_map"].update({k: "x" for k in i["weight_map"]})),
        "model.safetensors.index.json",
        False,
    ),
    "no index": (without("model.safetensors.index.json"), "model.safetensors.index.json", False),
    "a file of weights too many": (
        lambda files, _: files.update({"model-00001-of-00002.safetensors": files[MODEL]}),
        "model-00001-of-00002",
        False,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_do_not_fit_are_told_by_verify_and_refused_by_the_daemon(
    name: str, run: Path, tmp_path: Path
) -> None:
    how, file, is_read = WRONG[name]
    change(only(run), how)
    before = files_in(run)
    said = ctl("verify", run)
    assert said.returncode == 1 and file in said.stdout, said.stdout + said.stderr
    with Daemon(storage=tmp_path, log=tmp_path.parent / f"{tmp_path.name}.log") as daemon:
        assert bool(runs_of(daemon.server)) != is_read
        daemon.kill()
    assert files_in(run) == before


def test_one_that_is_sealed_anew_is_good(run: Path) -> None:
    change(only(run), lambda files, manifest: None)
    said = ctl("verify", run)
    assert said.returncode == 0, said.stdout


def test_a_folder_that_has_lost_its_manifest_is_damaged(run: Path) -> None:
    whole = only(run)
    lost = Path(shutil.copytree(whole, run / "000000000099-step-9"))
    for name in ("manifest.json", "SHA256SUMS"):
        (lost / name).unlink()
    empty = run / "discarded-000000000098-step-8"
    empty.mkdir()
    said = ctl("verify", run)
    assert said.returncode == 1
    for folder in (lost, empty):
        assert f"{folder}: damaged" in said.stdout
    assert f"{whole}: good" in said.stdout


def test_a_link_is_no_checkpoint_and_another_name_is_told(run: Path, tmp_path: Path) -> None:
    whole = only(run)
    aside = whole.rename(tmp_path / whole.name)
    whole.symlink_to(aside)
    said = ctl("verify", run)
    assert said.returncode == 1 and "it is no folder" in said.stdout
    whole.unlink()
    aside.rename(run / "000000000099-step-9")
    said = ctl("verify", run)
    assert said.returncode == 1 and "has the name of step 9, and is of step 4" in said.stdout


def in_spec(**later: str) -> Callable[[Files, Manifest], None]:
    """Another spec, by its hash as well."""

    def changed(files: Files, manifest: Manifest) -> None:
        in_json("spec.json", lambda spec: spec.update(later))(files, manifest)
        manifest.update(specSha256="0" * 64)

    return changed


LATER = {
    "a field of the spec": in_spec(laterField="1"),
    "a word of the spec": in_spec(commit="COMMIT_MODE_LATER"),
    "a field of the run": in_json("run.json", lambda r: r["result"].update(laterField={"a": 1})),
}


@pytest.mark.parametrize("name", LATER)
def test_what_a_later_version_wrote_is_not_damaged_and_no_older_one_takes_its_place(name: str, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    newest = trained(storage, 2, 4)[-1]
    change(newest, LATER[name])
    before = files_in(storage / "runs")
    said = ctl("verify", newest)
    assert said.returncode == 1 and "cannot be read" in said.stdout and "a later one wrote it" in said.stdout
    with Daemon(storage=storage) as daemon:
        assert runs_of(daemon.server) == []
        with urllib.request.urlopen(daemon.metrics_url) as metrics:
            assert f'{{reason="version",run_id="{DURABLE}"}} 1' in metrics.read().decode()
        with pytest.raises(ballast.Rejected, match=f"{newest.name}.*a later one wrote it"):
            train(daemon.server, 5)
        daemon.drain()
    assert files_in(storage / "runs") == before
