"""How tensors lie in the files of a checkpoint. It follows from the spec and run.json alone, so that what is in a
folder is compared with what must be there, and no header is believed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ballast.checkpoint.manifest import CLIENT_STATE
from ballast.checkpoint.planes import Plane
from ballast.checkpoint.spec import Spec, Tensor

# A file ends with the tensor that takes it past so many bytes of data.
SHARD_BYTES = 1 << 30


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file, as its header has it: begin and end count from where the data begin."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class DataFile:
    """planes: of each entry the tensor's name and its plane; none of client_state."""

    name: str
    entries: tuple[Entry, ...]
    planes: tuple[tuple[str, Plane], ...] = ()

    @property
    def data_bytes(self) -> int:
        return self.entries[-1].end if self.entries else 0


def model_files(spec: Spec) -> list[DataFile]:
    """The weights, or the high half of each."""
    return _number("model", _spread((tensor, tensor.group.planes[0]) for tensor in spec.tensors))


def optimizer_files(spec: Spec) -> list[DataFile]:
    """All other planes."""
    return _number(
        "optimizer", _spread((tensor, plane) for tensor in spec.tensors for plane in tensor.group.planes[1:])
    )


def client_state_file(sizes: Sequence[int]) -> DataFile | None:
    """Of the ranks' sizes; None where no rank has sent any."""
    entries, end = [], 0
    for rank, size in enumerate(sizes):
        if size > 0:
            entries.append(Entry(f"rank/{rank}", "U8", (size,), end, end + size))
            end += size
    return DataFile(CLIENT_STATE, tuple(entries)) if entries else None


def _spread(stored: Iterator[tuple[Tensor, Plane]]) -> list[list[tuple[Entry, str, Plane]]]:
    """Over files."""
    files: list[list[tuple[Entry, str, Plane]]] = []
    for tensor, plane in stored:
        if not files or files[-1][-1][0].end > SHARD_BYTES:
            files.append([])
        begin = files[-1][-1][0].end if files[-1] else 0
        files[-1].append((_entry(tensor, plane, begin), tensor.name, plane))
    return files


def _entry(tensor: Tensor, plane: Plane, begin: int) -> Entry:
    words = -(-tensor.elements // plane.per)
    shape = tensor.shape if plane.per == 1 else (words,)
    end = begin + words * plane.itemsize
    if plane == tensor.group.planes[0]:
        return Entry(tensor.name, {1: "F8_E4M3", 2: "BF16", 4: "F32"}[plane.itemsize], shape, begin, end)
    return Entry(f"{tensor.name}/{plane.name}", f"U{8 * plane.itemsize}", shape, begin, end)


def _number(kind: str, files: list[list[tuple[Entry, str, Plane]]]) -> list[DataFile]:
    """Which number there are is known at the end."""
    return [
        DataFile(
            f"{kind}-{number:05d}-of-{len(files):05d}.safetensors",
            tuple(entry for entry, _, _ in stored),
            tuple((tensor, plane) for _, tensor, plane in stored),
        )
        for number, stored in enumerate(files, 1)
    ]
