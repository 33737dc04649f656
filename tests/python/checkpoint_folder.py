"""Checkpoints as a daemon writes them, made from proto/CHECKPOINTS.md alone: no code of Ballast's is used. For tests.

    sketch = Sketch(tensors=[Sketched("layer.weight", (3, 5), "adamw/split24/companded8")])
    write_checkpoint(tmp_path / "000000000001-step-5", sketch)

A test that wants a folder that is wrong in itself, with all its hashes right, changes what content_of() returns, and
seals that.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20

# Of each format the planes: (name, bytes of a word, elements a word is for).
MASTERS = {
    "fp32": [("weight", 4, 1)],
    "bf16": [("weight", 2, 1)],
    "split24": [("weight.hi", 2, 1), ("weight.lo", 1, 1)],
    "split32": [("weight.hi", 2, 1), ("weight.lo", 2, 1)],
    "flash24": [("weight.hi", 2, 1), ("weight.lo", 1, 1)],
    "flash32": [("weight.hi", 2, 1), ("weight.lo", 2, 1)],
    "mcf": [("weight.hi", 2, 1), ("weight.lo", 2, 1)],
    "mcf8": [("weight.hi", 1, 1), ("weight.lo", 1, 1)],
}
CODES = {"fp32": (4, None), "bf16": (2, None), "companded8": (1, (2, 32)), "flash8": (1, (2, 32))}
CODES |= {"dynamic8": (1, (4, 256)), "mcf": (2, None)}
ONE_MOMENT = ("sgd", "sgdw", "lion", "muon")


@dataclass
class Sketched:
    """A tensor. optimizer: "rule/master/state". planes: bytes by name; those that are not given are made up."""

    name: str
    shape: tuple[int, ...] = (4,)
    optimizer: str = "adamw/split24/companded8"
    planes: dict[str, bytes] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def stored(self) -> list[tuple[str, int, int]]:
        """(name, bytes of a word, elements a word is for), in the order in which they are stored."""
        rule, master, state = self.optimizer.split("/")
        found = list(MASTERS[master])
        for moment in ["momentum"] if rule in ONE_MOMENT else ["momentum", "variance"]:
            size, scale = CODES[state]
            found.append((moment, size, 1))
            if scale:
                found.append((f"{moment}.scale", *scale))
        if state == "mcf":
            found.append(("variance.lo", 2, 1))
        return found

    def plane(self, name: str) -> bytes:
        """Its words. Those made up are other ones in each plane; whatever numbers they are taken for are finite."""
        words, size = next((-(-self.elements // per), size) for plane, size, per in self.stored() if plane == name)
        if name in self.planes:
            assert len(self.planes[name]) == words * size
            return self.planes[name]
        made = np.random.default_rng(list(f"{self.name}/{name}".encode())).integers(1, 60, words * size, np.uint8)
        return made.tobytes()


@dataclass
class Sketch:
    """A run. client_states: bytes by rank; None: the rank has sent nothing. shard_bytes: a file of data ends with the
    tensor that takes it past so many."""

    tensors: list[Sketched]
    run_id: str = "r1"
    step: int = 5
    client_states: list[bytes | None] = field(default_factory=lambda: [b"loader at 7", None, b"x"])
    clips_tensors: bool = False
    shard_bytes: int = 1 << 30


def small() -> Sketch:
    """Odd shapes, two optimizers, a scalar, two ranks of three with client_state."""
    return Sketch(
        [
            Sketched("layer.weight", (3, 33)),
            Sketched("layer.bias", (33,)),
            Sketched("scale", (), "lion/fp32/fp32"),
            Sketched('wörter/\\"', (2, 2, 2), "collage_plus/mcf/mcf"),
        ]
    )


# --- contents -------------------------------------------------------------------------------------------------------


def content_of(sketch: Sketch) -> dict[str, bytes]:
    """Every file but manifest.json and SHA256SUMS, by name."""
    files = {"spec.json": as_json(spec_of(sketch)), "run.json": as_json(run_of(sketch))}
    models, others = [], []
    for tensor in sketch.tensors:
        (first, size, _), *rest = tensor.stored()
        dtype = {4: "F32", 2: "BF16", 1: "F8_E4M3"}[size]
        models.append((tensor.name, dtype, list(tensor.shape), tensor.plane(first)))
        for name, size, per in rest:
            shape = list(tensor.shape) if per == 1 else [-(-tensor.elements // per)]
            others.append((f"{tensor.name}/{name}", f"U{8 * size}", shape, tensor.plane(name)))
    weight_map = {}
    for kind, entries in (("model", models), ("optimizer", others)):
        shards = spread(entries, sketch.shard_bytes)
        for number, shard in enumerate(shards, 1):
            name = f"{kind}-{number:05d}-of-{len(shards):05d}.safetensors"
            files[name] = safetensors_of(shard)
            weight_map |= {entry[0]: name for entry in shard} if kind == "model" else {}
    total = sum(len(data) for _, _, _, data in models)
    files["model.safetensors.index.json"] = as_json({"metadata": {"total_size": total}, "weight_map": weight_map})
    states = [(f"rank/{r}", "U8", [len(s)], s) for r, s in enumerate(sketch.client_states) if s]
    if states:
        files["client_state.safetensors"] = safetensors_of(states)
    return files


def spread(entries: list[Any], shard_bytes: int) -> list[list[Any]]:
    shards: list[list[Any]] = [[]]
    for entry in entries:
        if sum(len(data) for _, _, _, data in shards[-1]) > shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    return shards


def safetensors_of(entries: list[Any], metadata: dict[str, str] | None = None) -> bytes:
    """(name, dtype, shape, bytes) each."""
    header: dict[str, Any] = {"__metadata__": metadata or {"format": "pt"}}
    end = 0
    for name, dtype, shape, data in entries:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    return with_header(header, b"".join(data for _, _, _, data in entries))


def with_header(header: Any, data: bytes) -> bytes:
    return with_header_text(as_json(header), data)


def with_header_text(text: bytes, data: bytes) -> bytes:
    text += b" " * (-(8 + len(text)) % 4096)
    return len(text).to_bytes(8, "little") + text + data


def header_of(file: bytes) -> tuple[Any, bytes]:
    """A file's header, and its data: what with_header() is given."""
    length = int.from_bytes(file[:8], "little")
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def as_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def spec_of(sketch: Sketch) -> dict[str, Any]:
    optimizers = list(dict.fromkeys(tensor.optimizer for tensor in sketch.tensors))
    groups = [dict(zip(("rule", "master", "state"), o.split("/"))) | {"hyper": {"lr": 0.001}} for o in optimizers]
    tensors = []
    for tensor in sketch.tensors:
        entry: dict[str, Any] = {"name": tensor.name, "shape": [str(size) for size in tensor.shape], "dtype": "fp32"}
        if not tensor.shape:
            del entry["shape"]
        if group := optimizers.index(tensor.optimizer):
            entry["group"] = group
        tensors.append(entry)
    spec = {"runId": sketch.run_id, "tensors": tensors, "groups": groups, "ranks": len(sketch.client_states)}
    return spec | ({"tensorClip": {"absolute": 1}} if sketch.clips_tensors else {})


def run_of(sketch: Sketch) -> dict[str, Any]:
    count, step = len(sketch.tensors), str(sketch.step)
    run: dict[str, Any] = {"step": step, "generation": "3", "updates": [step] * count, "updatedIn": [step] * count}
    run["lastLr"] = [0.001] * count
    run["result"] = {"step": step, "outcome": "STEP_OUTCOME_APPLIED", "gradNorm": 0.25, "clipCoefficient": 1}
    run["record"] = {"step": step, "loss": 2.5}
    run["clientStateSteps"] = ["0" if state is None else step for state in sketch.client_states]
    run["clientStateBytes"] = [str(len(state or b"")) for state in sketch.client_states]
    run["detector"] = {"rms": [{}], "curvature": [{}]}
    return run | ({"norms": [{"average": 1.5, "steps": "4"}] * count} if sketch.clips_tensors else {})


# --- the folder -----------------------------------------------------------------------------------------------------


@functools.cache
def _crc_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [one >> 1 ^ (0x82F63B78 if one & 1 else 0) for one in table]
    return table


def crc32c(data: bytes) -> int:
    """Byte by byte, as the textbook has it."""
    table, register = _crc_table(), 0xFFFFFFFF
    for byte in data:
        register = table[(register ^ byte) & 255] ^ register >> 8
    return register ^ 0xFFFFFFFF


def manifest_of(sketch: Sketch, files: dict[str, bytes]) -> dict[str, Any]:
    entries = []
    for name, data in sorted(files.items()):
        checksums = [crc32c(data[begin : begin + MIB]) for begin in range(0, len(data), MIB)]
        sha256 = hashlib.sha256(data).hexdigest()
        entries.append({"name": name, "bytes": str(len(data)), "sha256": sha256, "crc32c": checksums})
    return {
        "format": 1,
        "runId": sketch.run_id,
        "specSha256": "5" * 64,
        "step": str(sketch.step),
        "generation": "3",
        "writtenAt": "2026-11-23T18:44:02+00:00",
        "version": "0.1.0",
        "revision": "6dced01",
        "files": entries,
    }


def seal(folder: Path, files: dict[str, bytes], manifest: dict[str, Any]) -> Path:
    """Writes the files, manifest.json and SHA256SUMS: whatever the manifest says, the hashes are right."""
    folder.mkdir(parents=True)
    text = as_json(manifest)
    lines = [f"{hashlib.sha256(text).hexdigest()}  manifest.json\n"]
    lines += [f"{entry['sha256']}  {entry['name']}\n" for entry in manifest["files"] if isinstance(entry, dict)]
    for name, data in {**files, "manifest.json": text, "SHA256SUMS": "".join(lines).encode()}.items():
        (folder / name).write_bytes(data)
    return folder


def write_checkpoint(folder: Path, sketch: Sketch) -> Path:
    files = content_of(sketch)
    return seal(folder, files, manifest_of(sketch, files))
