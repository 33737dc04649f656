"""The index of a torch.distributed.checkpoint folder, its file .metadata: read without running anything that is in it.

It is a pickle, and torch reads it with pickle.load, which would run what somebody put there. Here only the classes
that an index is made of are looked up. Layout: torch/distributed/checkpoint, metadata and filesystem (torch 2.2 to
2.13).
"""

from __future__ import annotations

import collections
import math
import pickle
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ballast.errors import Rejected

INDEX = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"  # where torch 2.2 has some of them
_CLASSES = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_OLDER, "TensorProperties"),
    (_OLDER, "MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, where: Path):
        super().__init__(file)
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return getattr(import_module(module), name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.split(".")[0] == "pathlib" and name in ("PosixPath", "PurePosixPath"):
            return PurePosixPath
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        raise Rejected(
            f"{self._where} holds {module}.{name}, which only running code from the file would bring back: it is not "
            "read. Save the folder with torch.distributed.checkpoint's own FileSystemWriter"
        )


def read_index(folder: Path) -> Any:
    """The folder's torch Metadata. Rejected if it has none, or one that is damaged or holds anything else."""
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            index = _Unpickler(file, path).load()
    except FileNotFoundError:
        raise Rejected(f"{folder} has no {INDEX}: it is no finished folder of torch.distributed.checkpoint") from None
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise Rejected(f"{path} is damaged: {error!r}") from None
    if not isinstance(getattr(index, "state_dict_metadata", None), dict) or not isinstance(index.storage_data, dict):
        raise Rejected(f"{path} is no index of torch.distributed.checkpoint")
    return index


def place_of(index: Any, fqn: str, offsets: Sequence[int] | None, folder: Path) -> tuple[Path, int, int]:
    """(file, first byte, bytes) of an item. Rejected if it is missing, outside the folder or was transformed."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    info = index.storage_data.get(MetadataIndex(fqn, offsets))
    if info is None:
        raise Rejected(f"{folder / INDEX} does not say where {fqn} is: the folder is damaged")
    if getattr(info, "transform_descriptors", None):
        raise Rejected(
            f"{folder}: {fqn} was saved through {', '.join(map(str, info.transform_descriptors))}: only folders saved "
            "without extensions are converted"
        )
    path = folder / str(info.relative_path)
    if path.parent != folder or path.name in ("", ".", ".."):
        raise Rejected(f"{folder / INDEX} says that {fqn} is in {info.relative_path}, which is not in the folder")
    if not path.is_file() or info.offset < 0 or info.length < 0 or info.offset + info.length > path.stat().st_size:
        raise Rejected(f"{folder}: {path.name} is missing, or shorter than the index says: the folder is damaged")
    return path, info.offset, info.length


def check_chunks(entry: Any, fqn: str, folder: Path) -> None:
    """Rejected unless the chunks are in the tensor, and each of its elements is in one."""
    total = 0
    for chunk in entry.chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(entry.size) and all(
            0 <= first and 0 <= size and first + size <= whole
            for first, size, whole in zip(chunk.offsets, chunk.sizes, entry.size)
        )
        total += math.prod(chunk.sizes) if inside else -1
        if not inside:
            raise Rejected(f"{folder / INDEX}: a chunk of {fqn} lies outside the tensor: the folder is damaged")
    if _overlap(entry.chunks):
        raise Rejected(f"{folder / INDEX}: two chunks of {fqn} overlap: the folder is damaged")
    if total != math.prod(entry.size):
        raise Rejected(
            f"{folder / INDEX}: the chunks of {fqn} hold {total} of its {math.prod(entry.size)} elements: a rank's "
            "part is missing"
        )


def _overlap(chunks: Sequence[Any]) -> bool:
    """Whether two of them have an element in common. In the order of a dimension in which they differ, so that of the usual
    shards only neighbours are compared."""
    boxes = [
        [(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes)]
        for chunk in chunks
        if math.prod(chunk.sizes) > 0
    ]
    if len(boxes) < 2:
        return False
    along = max(range(len(boxes[0])), key=lambda d: len({box[d][0] for box in boxes}), default=None)
    if along is None:
        return True  # a number, twice
    boxes.sort(key=lambda box: box[along][0])
    reaching: list[list[tuple[int, int]]] = []  # to where the next one begins
    for box in boxes:
        reaching = [other for other in reaching if other[along][1] > box[along][0]]
        if any(all(a < d and c < b for (a, b), (c, d) in zip(box, other)) for other in reaching):
            return True
        reaching.append(box)
    return False
