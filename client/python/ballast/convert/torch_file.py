"""Files of torch.save: read without running anything that is in them, written one tensor at a time.

torch.save wants all tensors in memory. What it writes is a zip archive, not compressed: a pickle in which a tensor is a
call of torch._utils._rebuild_tensor_v2 on storage N, and the bytes of storage N as the entry data/N. write_tree() makes
the same from tensors that are read when their turn comes, and torch.load reads it, mapped or not.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from ballast.convert.lazy import LazyTensor, raw_bytes
from ballast.errors import Rejected

_STORAGES: dict[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
_ALIGNMENT = 64  # of the bytes of a storage in the file, as torch's own
_ROOT = "archive"  # the folder inside the archive


# --- reading --------------------------------------------------------------------------------------------------------


def read_tree(path: Path) -> Any:
    """What was saved: dicts, lists and tuples whose tensors are LazyTensor, mapped from the file. Tensors that share
    memory there are one LazyTensor. Rejected if it is no file of torch.save, or holds what only running code brings
    back."""
    try:
        tree = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise Rejected(_why_not_data(path, str(error))) from None
    except (RuntimeError, ValueError, EOFError, KeyError) as error:
        if "mmap can only be used" in str(error):
            if not _is_pickle(path):
                raise Rejected(f"{path} is no file of torch.save: {_what_it_is(path)}") from None
            raise Rejected(
                f"{path} was saved in the form that torch had before 1.6, which cannot be mapped: load it with "
                "torch.load and save it again with torch.save"
            ) from None
        raise Rejected(f"{path} cannot be read as a file of torch.save: {_first_line(error)}") from None
    return _lazy(tree, {}, path)


def _is_pickle(path: Path) -> bool:
    """As what torch saved before 1.6 begins, with a protocol and its number."""
    with path.open("rb") as file:
        return file.read(1) == pickle.PROTO


def _what_it_is(path: Path) -> str:
    size = path.stat().st_size
    return f"its {size} bytes are neither a zip archive nor a pickle" if size else "it is empty"


def read_one(file: IO[bytes], where: str) -> Any:
    """A tensor or a plain value saved by itself, into memory. Rejected as by read_tree()."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise Rejected(_why_not_data(where, str(error))) from None
    except (RuntimeError, ValueError, EOFError, KeyError) as error:
        raise Rejected(f"{where} cannot be read as torch.save wrote it: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _why_not_data(where: object, message: str) -> str:
    named = re.search(r"GLOBAL (\S+) was not an allowed|global (\S+) ", message)
    what = next((name for name in named.groups() if name), "an object") if named else "an object"
    return (
        f"{where} holds {what}, which only running code from the file would bring back: such files are not read. "
        "Where it was made, save what state_dict() returns and nothing else: tensors, numbers and text"
    )


def _lazy(node: Any, shared: dict[tuple[Any, ...], LazyTensor], path: Path) -> Any:
    if isinstance(node, torch.Tensor):
        return _lazy_tensor(node, shared, path)
    if isinstance(node, dict):
        return {key: _lazy(value, shared, path) for key, value in node.items()}
    if type(node) in (list, tuple):
        return type(node)(_lazy(value, shared, path) for value in node)
    return node


def _lazy_tensor(tensor: torch.Tensor, shared: dict[tuple[Any, ...], LazyTensor], path: Path) -> LazyTensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise Rejected(
            f"{path} holds a {type(tensor).__name__} of layout {tensor.layout}: only whole, dense tensors are "
            "converted. If it is one rank's shard, convert the folder that torch.distributed.checkpoint wrote of all "
            "ranks"
        )
    if tensor.device.type != "cpu":
        raise Rejected(f"{path} holds a tensor on the device {tensor.device.type}: it has no values to convert")
    reordered = not tensor.is_contiguous()
    made = LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: whole_values(tensor, path), reordered=reordered)
    if tensor.numel() == 0:
        return made
    return shared.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), made)


def whole_values(tensor: torch.Tensor, where: object) -> torch.Tensor:
    """The tensor, contiguous. Rejected if some of its elements are one in memory, as expand() makes them: a file of some
    bytes could stand for any number of them."""
    held = tensor.untyped_storage().nbytes()
    if tensor.nbytes > held:
        raise Rejected(
            f"{where} holds a tensor of shape {tuple(tensor.shape)} that repeats {held} bytes: it is damaged, or was saved of "
            "what expand() returned: save it of a contiguous tensor"
        )
    return tensor.detach().contiguous()


# --- writing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Storage:
    kind: type
    key: str
    numel: int


class _Pickler(pickle.Pickler):
    """Pickles a LazyTensor as torch pickles a tensor, and keeps it for its bytes to be written."""

    def __init__(self, file: IO[bytes]):
        super().__init__(file, protocol=2)
        self.tensors: list[LazyTensor] = []

    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, obj.key, "cpu", obj.numel) if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, LazyTensor):
            return NotImplemented
        if obj.dtype not in _STORAGES:
            raise Rejected(
                f"a tensor has dtype {obj.dtype}: .pt files are written with {', '.join(map(str, _STORAGES))}"
            )
        storage = _Storage(_STORAGES[obj.dtype], str(len(self.tensors)), obj.numel)
        self.tensors.append(obj)
        stride, strides = 1, []
        for size in reversed(obj.shape):
            strides.append(stride)
            stride *= max(size, 1)
        rebuild: Any = torch._utils._rebuild_tensor_v2
        return rebuild, (storage, 0, obj.shape, tuple(reversed(strides)), False, OrderedDict())


def write_tree(path: Path, tree: Any, wrote: Callable[[int], object]) -> None:
    """Writes `tree`, whose tensors are LazyTensor, as torch.save would. One tensor is in memory at a time; wrote(n) is
    called after each, with its bytes. Equal trees make equal files. OSError as the file system's."""
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(tree)
    with path.open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _record(archive, file, "data.pkl", text.getbuffer())
        _record(archive, file, "byteorder", memoryview(sys.byteorder.encode()))
        for key, tensor in enumerate(pickler.tensors):
            _record(archive, file, f"data/{key}", raw_bytes(tensor.read()))
            wrote(tensor.nbytes)
        _record(archive, file, "version", memoryview(b"3\n"))


def _record(archive: zipfile.ZipFile, file: IO[bytes], name: str, data: memoryview) -> None:
    """One entry, with so much of an extra field before it that its bytes begin at a multiple of 64."""
    info = zipfile.ZipInfo(f"{_ROOT}/{name}")  # dated 1980, always
    large = data.nbytes > zipfile.ZIP64_LIMIT // 2
    start = file.tell() + 30 + len(info.filename) + (20 if large else 0) + 4
    padding = -start % _ALIGNMENT
    info.extra = struct.pack("<HH", 0x4246, padding) + bytes(padding)
    info.file_size = data.nbytes
    with archive.open(info, "w", force_zip64=large) as record:
        record.write(data)
