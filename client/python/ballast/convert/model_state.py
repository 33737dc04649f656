"""A model's weights by name: what gives parameters their names, and 24-bit master weights their upper halves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ballast.convert import safetensors_file, torch_file
from ballast.convert.lazy import LazyTensor
from ballast.errors import Rejected

# A model's files in a folder of Trainer's or of save_pretrained's; the first that is there is taken.
FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_INSIDE = ("state_dict", "model_state_dict", "model", "module")  # where files with more than a model have it


@dataclass
class ModelState:
    """where: the files, for messages. weights: by name; none where names alone are known. order: the names of what may
    be parameters, in the model's order; None where that is not known, for safetensors sorts. listed: the order is that
    of a text file, and so the optimizer's own."""

    where: str
    weights: dict[str, LazyTensor]
    order: list[str] | None
    listed: bool

    def shape(self, name: str) -> tuple[int, ...] | None:
        weight = self.weights.get(name)
        return None if weight is None else weight.shape

    def has(self, name: str) -> bool:
        return name in self.weights if self.weights else name in (self.order or ())


def read_model(paths: Sequence[Path]) -> ModelState:
    """Of one or more paths: a file of torch.save or safetensors, an index of shards (model.safetensors.index.json), a
    folder that holds one of these; and a text file with a name a line, which then gives the order. Rejected if one
    cannot be read, or two hold the same name."""
    weights: dict[str, LazyTensor] = {}
    listed: list[str] = []
    sorted_names = False
    for file in [file for path in paths for file in _files(path)]:
        if file.suffix == ".txt":
            listed += _names(file)
            continue
        found = _weights(file)
        if twice := weights.keys() & found.keys():
            raise Rejected(f"--names: {sorted(twice)[0]} is in {file} and in a file before")
        weights.update(found)
        sorted_names = sorted_names or file.suffix == ".safetensors"
    if len(set(listed)) != len(listed):
        raise Rejected(f"--names: {next(name for name in listed if listed.count(name) > 1)} is there twice")
    order = listed or (None if sorted_names else _may_be_parameters(weights))
    return ModelState(", ".join(map(str, paths)), weights, order, bool(listed))


def _may_be_parameters(weights: dict[str, LazyTensor]) -> list[str]:
    """Of weights that are floating-point numbers, and of those that are one tensor under two names (tied) the first."""
    first: dict[int, str] = {}
    for name, weight in weights.items():
        if weight.dtype.is_floating_point:
            first.setdefault(id(weight), name)
    return list(first.values())


def model_file(folder: Path) -> Path | None:
    """A folder's model file, or index of files; None if there is none."""
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def _files(path: Path) -> Iterable[Path]:
    if path.is_dir():
        found = model_file(path)
        if found is None:
            raise Rejected(f"--names {path}: the folder holds none of {', '.join(FILES)}")
        return _files(found)
    if not path.is_file():
        raise Rejected(f"--names {path}: there is no such file")
    if path.suffix != ".json":
        return [path]
    try:
        shards = sorted(set(json.loads(path.read_text())["weight_map"].values()))  # numbered in the model's order
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Rejected(f"--names {path} is no index of a model's shards: {error!r}") from None
    for shard in shards:
        if Path(shard).name != shard or not (path.parent / shard).is_file():
            raise Rejected(f"--names {path} names {shard}, which is not in its folder")
    return [path.parent / shard for shard in shards]


def _names(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except ValueError:
        raise Rejected(f"--names {path} is no text: wanted a name a line") from None


def _weights(path: Path) -> dict[str, LazyTensor]:
    tree: Any = safetensors_file.read_tensors(path)[0] if path.suffix == ".safetensors" else torch_file.read_tree(path)
    while isinstance(tree, dict) and (
        inside := next((key for key in _INSIDE if isinstance(tree.get(key), dict)), None)
    ):
        tree = tree[inside]
    if not isinstance(tree, dict):
        raise Rejected(f"--names {path} holds {type(tree).__name__}, not a model's state_dict")
    items = tree.items()
    found = {name: value for name, value in items if isinstance(name, str) and isinstance(value, LazyTensor)}
    if not found:
        raise Rejected(f"--names {path} holds no tensors by name: give what model.state_dict() was saved to")
    return found
