"""manifest.json and SHA256SUMS: what a checkpoint is of, and every other file in its folder.

What is read may be damaged or of a stranger's making: everything that later code relies on is checked here.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from ballast.checkpoint.crc32c import MIB
from ballast.checkpoint.errors import Damaged, TooNew
from ballast.checkpoint.fields import MOST_JSON, Fields, parse_object
from ballast.checkpoint.files import read_whole

FORMAT = 1
MANIFEST, SUMS = "manifest.json", "SHA256SUMS"
SPEC, RUN, CLIENT_STATE, INDEX = "spec.json", "run.json", "client_state.safetensors", "model.safetensors.index.json"

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_SHA256 = re.compile("[0-9a-f]{64}")
_RUN_ID = re.compile("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)", re.ASCII)


@dataclass(frozen=True)
class File:
    """crc32c: of each MiB in turn; the last may be shorter."""

    name: str
    nbytes: int
    sha256: str
    crc32c: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """As CheckpointManifest in proto/ballast/v1/checkpoint.proto."""

    run_id: str
    spec_sha256: str
    step: int
    generation: int
    written_at: str
    version: str
    revision: str
    files: tuple[File, ...]

    @property
    def nbytes(self) -> int:
        """Of all files that it lists."""
        return sum(file.nbytes for file in self.files)

    def file(self, name: str) -> File | None:
        return next((file for file in self.files if file.name == name), None)


def read_manifest(folder: Path) -> Manifest:
    """Damaged if one of the two files is, or if they do not agree; TooNew if the folder is of a later format."""
    path, sums_path = folder / MANIFEST, folder / SUMS
    text = read_whole(path, MOST_JSON)
    sums = read_whole(sums_path, MOST_JSON)
    own_line = f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n"
    if not sums.startswith(own_line.encode()):
        raise Damaged(path, f"it, or {SUMS}: its SHA-256, {own_line[:64]}, is not what that says")
    values = parse_object(text, path)
    fields = Fields(values, path)
    format = fields.integer("format")
    if format > FORMAT:
        version = str(values.get("version"))[:80]
        raise TooNew(path, f"is of format {format}, written by version {version!r}; read is {FORMAT}")
    if format < FORMAT:
        raise Damaged(path, "it has no format")
    manifest = _manifest(fields)
    wanted = own_line + "".join(f"{file.sha256}  {file.name}\n" for file in manifest.files)
    if sums != wanted.encode():
        raise Damaged(sums_path, f"it is not what {MANIFEST} leads to")
    return manifest


def _manifest(fields: Fields) -> Manifest:
    manifest = Manifest(
        run_id=_matching(fields, "runId", _RUN_ID, "a run's name: a-z, 0-9 and -"),
        spec_sha256=_matching(fields, "specSha256", _SHA256, "64 lower-case hexadecimal digits"),
        step=fields.integer("step"),
        generation=fields.integer("generation"),
        written_at=_matching(fields, "writtenAt", _UTC, "a time in UTC, as 2026-01-31T12:00:00Z"),
        version=_printable(fields, "version"),
        revision=_printable(fields, "revision"),
        files=tuple(_file(entry) for entry in fields.messages("files")),
    )
    if manifest.step == 0:
        raise fields.wrong("step", "is 0: no step is")
    names = [file.name for file in manifest.files]
    if any(after <= before for before, after in zip(names, names[1:])):
        raise fields.wrong("files", "are not in the order of their names")
    for name in (SPEC, RUN):
        if name not in names:
            raise fields.wrong("files", f"has no {name}")
    return manifest


def _file(fields: Fields) -> File:
    name = _matching(fields, "name", _PLAIN_NAME, "a plain file name")
    if name in (MANIFEST, SUMS):
        raise fields.wrong("name", f"is {name!r}: a manifest does not have that file")
    nbytes, checksums = fields.integer("bytes"), fields.integers("crc32c", 1 << 32)
    if len(checksums) != -(-nbytes // MIB):
        raise fields.wrong("crc32c", f"has {len(checksums)} checksums for {nbytes} bytes of {name}")
    sha256 = _matching(fields, "sha256", _SHA256, "64 lower-case hexadecimal digits")
    return File(name, nbytes, sha256, tuple(checksums))


def _matching(fields: Fields, name: str, pattern: re.Pattern[str], wanted: str) -> str:
    value = fields.text(name)
    if not pattern.fullmatch(value):
        raise fields.wrong(name, f"is {value[:80]!r}: wanted {wanted}")
    return value


def _printable(fields: Fields, name: str) -> str:
    """Of what is shown to people: nothing that a terminal would act on."""
    value = fields.text(name)
    if not value.isprintable() or len(value) > 100:
        raise fields.wrong(name, f"is {value[:80]!r}: wanted a line of text")
    return value
