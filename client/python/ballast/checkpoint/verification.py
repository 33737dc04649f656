"""Whether a checkpoint is whole, to the last byte."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ballast.checkpoint.contents import read_contents
from ballast.checkpoint.errors import CheckpointError, Damaged, Stray, name_mibs
from ballast.checkpoint.files import differing_mibs, sha256_of
from ballast.checkpoint.folders import parse_name
from ballast.checkpoint.manifest import MANIFEST, RUN, SPEC, SUMS, File, Manifest, read_manifest

_THREADS = 4  # that read and hash: one alone is slower than a disk


@dataclass(frozen=True)
class Verdict:
    """manifest: None if that is damaged; then nothing else was looked at."""

    folder: Path
    manifest: Manifest | None
    faults: tuple[CheckpointError, ...]


def verify(folder: Path, run: str = "") -> Verdict:
    """Reads every byte, and looks at each file even if another one is damaged.

    run: whose folder it lies in, if that is known.

    A file is right if its SHA-256 is: the CRC-32C of each MiB is computed only of a file whose SHA-256 is wrong, to say
    which MiB are damaged. The hash of the spec (specSha256) is of its canonical form in Protobuf's encoding, and is
    left to the daemon; spec.json itself has a SHA-256, as all files have.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as fault:
        return Verdict(folder, None, (fault,))
    faults = [*_misplaced(folder, run, manifest), *_strays(folder, manifest)]
    damaged = _check_files(folder, manifest)
    faults += damaged
    names = {fault.path.name for fault in damaged}
    if not names & {SPEC, RUN}:
        try:
            faults += read_contents(folder, manifest, names).faults
        except CheckpointError as fault:
            faults.append(fault)
    return Verdict(folder, manifest, tuple(faults))


def _misplaced(folder: Path, run: str, manifest: Manifest) -> list[CheckpointError]:
    place = parse_name(folder.absolute())
    faults: list[CheckpointError] = []
    if place is not None and place.step != manifest.step:
        faults.append(Stray(folder, f"is of step {manifest.step}: its name says {place.step}; give it its own"))
    if run and run != manifest.run_id:
        faults.append(Stray(folder, f"is of run {manifest.run_id!r}: give the folder that it lies in that name"))
    return faults


def _strays(folder: Path, manifest: Manifest) -> list[CheckpointError]:
    known = {MANIFEST, SUMS, *(file.name for file in manifest.files)}
    try:
        others = sorted(set(os.listdir(folder)) - known)
    except OSError as error:
        return [Damaged(folder, f"it cannot be listed: {error.strerror}")]
    return [Stray(folder / name, "is no file of this checkpoint: move it away") for name in others]


def _check_files(folder: Path, manifest: Manifest) -> list[CheckpointError]:
    threads = ThreadPoolExecutor(_THREADS)
    try:
        found = threads.map(lambda file: _check_bytes(folder / file.name, file), manifest.files)
        return [fault for fault in found if fault is not None]
    finally:
        threads.shutdown(cancel_futures=True)  # Ctrl-C does not wait for the files that nobody has begun


def _check_bytes(path: Path, file: File) -> CheckpointError | None:
    try:
        if sha256_of(path, file.nbytes) == file.sha256:
            return None
        mibs = differing_mibs(path, file.crc32c)
    except CheckpointError as fault:
        return fault
    if not mibs:
        return Damaged(path, "its SHA-256 is not what the manifest says, though every MiB has its CRC-32C")
    has = "has not its" if len(mibs) == 1 else "have not their"
    return Damaged(path, f"{name_mibs(mibs)} of it {has} CRC-32C", mibs)
