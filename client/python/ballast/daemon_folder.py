"""The folder of a daemon of a process's own: its sockets, and its log."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

_PREFIX = "ballast-"
_NAME = re.compile(rf"{_PREFIX}\d+-[a-z0-9_]{{8}}")  # the process's number, and what mkdtemp adds
_LOG, _UNLOCKED, _KEPT = "ballastd.log", "unlocked.log", "kept"


class DaemonFolder:
    """Made by the constructor in the folder `parent`, for this user alone. path: its own. log: the log's.

    A process that is killed cannot remove it; whoever makes the next one there does, of those that hold a log and nothing
    else, which nobody has open: their daemon has ended in order, which takes its sockets away, and nobody called keep().
    """

    def __init__(self, parent: str):
        for folder in Path(parent).glob(f"{_PREFIX}*"):
            if _NAME.fullmatch(folder.name):
                _remove_left(folder)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        self.log = self.path / _LOG

    def open_log(self) -> BinaryIO:
        """To write. It is locked for as long as somebody has it open, and has its name when it is."""
        unlocked = self.path / _UNLOCKED
        log = unlocked.open("wb")
        fcntl.flock(log, fcntl.LOCK_SH)
        unlocked.rename(self.log)
        return log

    def keep(self) -> None:
        """Somebody was told of the log."""
        (self.path / _KEPT).touch()

    def remove(self) -> None:
        shutil.rmtree(self.path)


def _remove_left(folder: Path) -> None:
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid() or os.listdir(folder) != [_LOG]:
            return
        with (folder / _LOG).open("rb") as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    except OSError:  # somebody has the log open, or removes the folder just now
        return
