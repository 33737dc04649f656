"""One checkpoint, opened: what is known of the run, and its tensors as numpy arrays."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ballast.checkpoint.contents import Contents, read_contents
from ballast.checkpoint.errors import CheckpointError, Damaged, NotACheckpoint
from ballast.checkpoint.files import check_size, open_plain, read_exactly
from ballast.checkpoint.folders import find_checkpoints, is_checkpoint
from ballast.checkpoint.layout import Entry
from ballast.checkpoint.manifest import CLIENT_STATE, Manifest, read_manifest
from ballast.checkpoint.planes import AVERAGE, MASTERS, STATES, Plane, average_planes
from ballast.checkpoint.run_state import ClientState
from ballast.checkpoint.spec import Spec, Tensor
from ballast.checkpoint.verification import verify

Array = NDArray[Any]


def open(folder: str | os.PathLike[str]) -> Checkpoint:
    """Opens the folder of one checkpoint.

    Everything is checked here but the data: what the manifest says of all files, spec.json and run.json, and the
    headers and sizes of the files with the data. Of these every byte is looked at by verify() alone.
    Raises NotACheckpoint, Damaged or TooNew, by the file's name.
    """
    path = Path(folder)
    if not is_checkpoint(path):
        raise NotACheckpoint(path, f"is no checkpoint's folder{_where_they_are(path)}")
    manifest = read_manifest(path)
    contents = read_contents(path, manifest)
    if contents.faults:
        raise contents.faults[0]
    return Checkpoint(path, manifest, contents)


def _where_they_are(path: Path) -> str:
    try:
        found = [place for place in find_checkpoints(path).places if place.state == "kept"]
    except CheckpointError:
        return ""
    return f": it holds {', '.join(str(place.folder) for place in found[-3:])}" if found else ""


class Checkpoint:
    """A run at the end of a step. Made by open(); its files stay mapped while arrays of them are in use, and must not
    change meanwhile (a daemon writes a checkpoint once, and removes it by its name)."""

    def __init__(self, folder: Path, manifest: Manifest, contents: Contents):
        self.folder = folder
        self.manifest = manifest
        self._contents = contents
        self._tensors = {tensor.name: tensor for tensor in contents.spec.tensors}
        self._places: dict[tuple[str, str], tuple[str, Entry, Plane]] = {
            (tensor, plane.name): (file.name, entry, plane)
            for file in contents.data
            for entry, (tensor, plane) in zip(file.entries, file.planes)
        }
        self._mapped: dict[str, Array] = {}

    # --- the run ----------------------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        return self.manifest.run_id

    @property
    def step(self) -> int:
        """The last one that had closed."""
        return self.manifest.step

    @property
    def generation(self) -> int:
        return self.manifest.generation

    @property
    def spec(self) -> dict[str, Any]:
        """spec.json: the run's RunSpec (proto/ballast/v1/run.proto), with Protobuf's names in JSON."""
        return self._contents.spec_values

    @property
    def run(self) -> dict[str, Any]:
        """run.json: CheckpointedRun (proto/ballast/v1/checkpoint.proto), likewise."""
        return self._contents.run_values

    def client_state(self, rank: int) -> bytes | None:
        """What the rank had kept with the run, as it sent it; None if it had sent nothing.

        IndexError: the run has no such rank.
        """
        states = self._contents.client_states
        if not 0 <= rank < len(states):
            raise IndexError(f"rank is {rank}: the run has {len(states)}")
        before = sum(state.nbytes for state in states[:rank])
        if states[rank].step == 0:
            return None
        if states[rank].nbytes == 0:
            return b""
        with open_plain(self.folder / CLIENT_STATE) as (file, _):
            file.seek(self._contents.starts[CLIENT_STATE] + before)
            return read_exactly(file, states[rank].nbytes, self.folder / CLIENT_STATE)

    @property
    def client_states(self) -> tuple[ClientState, ...]:
        """By rank: the step and size of each."""
        return self._contents.client_states

    def verify(self) -> tuple[CheckpointError, ...]:
        """Reads every byte of the folder again. What is wrong, one each; empty: the checkpoint is whole."""
        return verify(self.folder).faults

    # --- the tensors ------------------------------------------------------------------------------------------------

    @property
    def parsed_spec(self) -> Spec:
        """Of the spec how tensors are stored: each with its shape and its group's rule and formats."""
        return self._contents.spec

    def tensors(self) -> tuple[str, ...]:
        """The names, in the order of the spec."""
        return tuple(self._tensors)

    def planes(self, tensor: str) -> tuple[str, ...]:
        """The names of a tensor's planes, as in kernels/NUMERICS.md, in the order in which they are stored."""
        return tuple(plane.name for plane in self._tensor(tensor).group.planes)

    def plane(self, tensor: str, name: str) -> Array:
        """A plane's words, mapped from its file: read-only, and maybe not aligned.

        Without padding. In the tensor's shape where it has a word for each element, else flat. The dtypes are those of
        ballast.numerics: codes int8 or uint8, bf16 as uint16, its bits. KeyError: there is none of that name.
        """
        group = self._tensor(tensor).group
        if (tensor, name) not in self._places:
            raise KeyError(f"{tensor!r} has no plane {name!r}: {group} has {', '.join(self.planes(tensor))}")
        file, entry, plane = self._places[tensor, name]
        start = self._contents.starts[file]
        words = self._map(file)[start + entry.begin : start + entry.end].view(plane.dtype)
        return words.reshape(entry.shape)

    def weights(self, tensor: str) -> NDArray[np.float32]:
        """The master weights as fp32, in the tensor's shape. Needs the compiled core, as all of ballast.numerics."""
        return self._decoded(tensor, self._tensor(tensor).group.master, "weight")

    def moment(self, tensor: str, slot: str) -> NDArray[np.float32]:
        """The "momentum" or "variance" as fp32, in the tensor's shape; as weights(). KeyError: the rule has none."""
        group = self._tensor(tensor).group
        if slot not in STATES[group.state] or (tensor, slot) not in self._places:
            raise KeyError(f"{tensor!r} has no moment {slot!r}: its optimizer is {group}")
        return self._decoded(tensor, group.state, slot)

    def average(self, tensor: str, decay: float) -> NDArray[np.float32]:
        """The average of the weights with this decay, as fp32, in the tensor's shape; as weights(). KeyError: the run keeps
        none."""
        averages = self._contents.spec.averages
        if decay not in averages:
            raise KeyError(f"run {self.run_id!r} has no average with the decay {decay}: it has {list(averages)}")
        stored = average_planes(averages.index(decay))
        planes = {own.name: self.plane(tensor, plane.name) for own, plane in zip(MASTERS[AVERAGE], stored)}
        return self._decode(tensor, AVERAGE, "weight", planes, stored[0].name)

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise KeyError(f"run {self.run_id!r} has no tensor {name!r}")
        return self._tensors[name]

    def _decoded(self, tensor: str, format: str, slot: str) -> NDArray[np.float32]:
        stored = MASTERS[format] if slot == "weight" else STATES[format][slot]
        planes = {plane.name: self.plane(tensor, plane.name) for plane in stored}
        return self._decode(tensor, format, slot, planes, stored[0].name)

    def _decode(self, tensor: str, format: str, slot: str, planes: dict[str, Array], first: str) -> NDArray[np.float32]:
        from ballast import numerics  # the compiled core, which nothing else here needs

        try:
            encoded = numerics.from_planes(format, slot, self._tensor(tensor).shape, planes)
        except ValueError as error:
            file = self._places[tensor, first][0]
            raise Damaged(self.folder / file, f"{slot} of {tensor!r} cannot be decoded: {error}") from None
        return numerics.decode(encoded)

    def _map(self, name: str) -> Array:
        """A whole file as bytes."""
        if name not in self._mapped:
            with open_plain(self.folder / name) as (file, size):
                check_size(self.folder / name, size, self._size_of(name))
                mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            self._mapped[name] = np.frombuffer(mapped, np.uint8)
        return self._mapped[name]

    def _size_of(self, name: str) -> int:
        return next(file.nbytes for file in self.manifest.files if file.name == name)
