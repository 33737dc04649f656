"""What a checkpoint can have wrong with it. verify() returns these as values, open() raises the first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ballast.errors import Rejected

_MOST_MIBS_SAID = 8


class CheckpointError(Rejected):
    """The root. path: of the file or folder that it is about. mibs: which MiB of the file are damaged, where that is
    known."""

    def __init__(self, message: str, code: str, path: Path, mibs: Sequence[int] = ()):
        super().__init__(message, code)
        self.path = path
        self.mibs = tuple(mibs)


class Damaged(CheckpointError):
    """A file is not what the daemon wrote."""

    def __init__(self, path: Path, how: str, mibs: Sequence[int] = ()):
        super().__init__(f"{path} is damaged: {how}", "DATA_LOSS", path, mibs)


class Stray(CheckpointError):
    """Something lies in the folder that is no file of the checkpoint; or the folder lies in the wrong place."""

    def __init__(self, path: Path, what: str):
        super().__init__(f"{path} {what}", "FAILED_PRECONDITION", path)


class TooNew(CheckpointError):
    """A later version of the daemon wrote it."""

    def __init__(self, path: Path, what: str):
        super().__init__(f"{path} {what}: use the version of ballast that wrote it", "FAILED_PRECONDITION", path)


class NotACheckpoint(CheckpointError):
    """There is no checkpoint at this path."""

    def __init__(self, path: Path, what: str):
        super().__init__(f"{path} {what}", "NOT_FOUND", path)


def name_mibs(mibs: Sequence[int]) -> str:
    """ "MiB 3", "MiB 3, 4 and 9", "MiB 0, 1, 2, ... (700 of them)", counted from 0."""
    if len(mibs) > _MOST_MIBS_SAID:
        return f"MiB {', '.join(map(str, mibs[:_MOST_MIBS_SAID]))}, ... ({len(mibs)} of them)"
    *others, last = map(str, mibs)
    return f"MiB {', '.join(others)} and {last}" if others else f"MiB {last}"
