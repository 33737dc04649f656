"""Folders of torch.distributed.checkpoint: FSDP's, and Accelerate's and Trainer's under FSDP.

Read chunk by chunk from where the index says; written as one rank would, one tensor after the other: dcp.save itself
keeps all tensors of a file until the file is done. What it flattens, it names by the keys from the root, joined by
dots.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from ballast.convert import torch_file
from ballast.convert.dcp_index import INDEX, check_chunks, place_of, read_index
from ballast.convert.lazy import LazyTensor
from ballast.convert.tree import Deferred, from_paths
from ballast.errors import Rejected

_FILE = "__0_0.distcp"
_VERSION = "1.0.0"  # of the layout, as torch 2.13 writes it


# --- reading --------------------------------------------------------------------------------------------------------


def read_tree(folder: Path) -> Any:
    """What was saved, as nested dicts and lists: tensors as LazyTensor, the rest as Deferred. A tensor that was
    sharded is put together when it is read: then it and one chunk are in memory. Rejected if the folder is damaged or
    unsafe."""
    index = read_index(folder)
    paths = index.planner_data if isinstance(index.planner_data, dict) else {}
    leaves: dict[tuple[str | int, ...], Any] = {}
    for fqn, entry in index.state_dict_metadata.items():
        try:
            leaves[tuple(paths.get(fqn, (fqn,)))] = _leaf(folder, index, fqn, entry)
        except (AttributeError, TypeError, ValueError) as error:
            raise Rejected(f"{folder / INDEX}: what it says of {fqn} is damaged: {error!r}") from None
    return from_paths(leaves, str(folder / INDEX))


def _leaf(folder: Path, index: Any, fqn: str, entry: Any) -> LazyTensor | Deferred:
    if not hasattr(entry, "chunks"):
        return Deferred(partial(_read_item, folder, index, fqn, None))
    check_chunks(entry, fqn, folder)
    read = partial(_read_tensor, folder, index, fqn)
    return LazyTensor(tuple(entry.size), entry.properties.dtype, read, sharded=len(entry.chunks) > 1)


def _read_item(folder: Path, index: Any, fqn: str, offsets: Any) -> Any:
    path, first, length = place_of(index, fqn, offsets, folder)
    with path.open("rb") as file:
        return torch_file.read_one(io.BufferedReader(_Window(file, first, length)), f"{path}: {fqn}")


def _read_tensor(folder: Path, index: Any, fqn: str) -> torch.Tensor:
    entry = index.state_dict_metadata[fqn]
    whole: torch.Tensor | None = None
    for chunk in entry.chunks:
        part = _read_item(folder, index, fqn, chunk.offsets)
        if not isinstance(part, torch.Tensor) or part.shape != chunk.sizes or part.dtype != entry.properties.dtype:
            raise Rejected(f"{folder}: a chunk of {fqn} is not of the shape and dtype that {INDEX} says")
        if part.dtype in (torch.int8, torch.uint8) and not part.is_contiguous():
            raise Rejected(
                f"{folder}: {fqn} has 8-bit codes in an order of memory that is not their shape's (channels last)"
            )
        part = torch_file.whole_values(part, f"{folder}: {fqn}")
        if len(entry.chunks) == 1:
            return part
        if whole is None:
            whole = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        whole[tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes))] = part
    return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu") if whole is None else whole


class _Window(io.RawIOBase):
    """Some bytes of a file as a file."""

    def __init__(self, file: io.BufferedReader, first: int, length: int):
        super().__init__()
        self._file, self._first, self._length, self._at = file, first, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = min(len(view), max(0, self._length - self._at))
        self._file.seek(self._first + self._at)
        read = self._file.readinto(view[:count])
        self._at += read
        return read


# --- writing --------------------------------------------------------------------------------------------------------


def write_tree(folder: Path, tree: dict[str, Any], wrote: Callable[[int], object]) -> None:
    """Writes nested dicts and lists, tensors as LazyTensor, into an empty folder, so that dcp.load of dicts that are
    nested alike finds them. One tensor is in memory at a time; wrote(n) is called after each, with its bytes. OSError
    as the file system's."""
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    with (folder / _FILE).open("wb") as file:
        for path, leaf in _leaves(tree, ()):
            fqn = ".".join(map(str, path))
            if fqn in paths:
                raise Rejected(f"two values would be named {fqn} in {folder}: rename one of the parameters")
            first, paths[fqn] = file.tell(), path
            if isinstance(leaf, LazyTensor):
                size, zeros = torch.Size(leaf.shape), torch.Size([0] * len(leaf.shape))
                chunk = metadata.ChunkStorageMetadata(offsets=zeros, sizes=size)
                properties = metadata.TensorProperties(dtype=leaf.dtype)
                entries[fqn] = metadata.TensorStorageMetadata(properties, size, [chunk])
                key = metadata.MetadataIndex(fqn, zeros)
                _save(_whole(leaf.read()), file)
                wrote(leaf.nbytes)
            else:
                entries[fqn], key = metadata.BytesStorageMetadata(), metadata.MetadataIndex(fqn)
                _save(leaf, file)
            storage[key] = _StorageInfo(_FILE, first, file.tell() - first)
    known = {"version": _VERSION, "storage_meta": getattr(metadata, "StorageMeta", lambda: None)()}
    here = {field.name for field in fields(metadata.Metadata)}
    rest: dict[str, Any] = {name: value for name, value in known.items() if name in here}
    index = metadata.Metadata(entries, planner_data=paths, storage_data=storage, **rest)
    (folder / INDEX).write_bytes(pickle.dumps(index))


def _save(value: Any, file: IO[bytes]) -> None:
    """torch.save, but OSError as the file system's: torch closes its archive, which fails too, and raises that."""
    try:
        torch.save(value, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Alone in its storage, for torch.save writes all of a storage: what maps a file has the file's."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _leaves(node: Any, path: tuple[str | int, ...]) -> list[tuple[tuple[str | int, ...], Any]]:
    """(path, value) as torch flattens: dicts, and lists that hold dicts, lists or tensors that are to be flattened."""
    if isinstance(node, dict):
        return [leaf for key, value in node.items() for leaf in _leaves(value, (*path, str(key)))]
    if isinstance(node, list) and any(isinstance(value, (dict, LazyTensor)) for value in node):
        return [leaf for place, value in enumerate(node) for leaf in _leaves(value, (*path, place))]
    return [(path, node)]
