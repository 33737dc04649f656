"""OUT, all or nothing: written under another name beside it, and renamed when it is whole."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ballast.convert.dcp_index import INDEX
from ballast.errors import Rejected

# A folder that holds one of these is a checkpoint, and no folder of something else that --overwrite would delete.
_MARKS = (INDEX, "optimizer.pt", "optimizer.bin")


def check_free(out: Path, overwrite: bool) -> None:
    """Rejected unless `out` can be made: its folder exists, and there is nothing there that is not to be replaced."""
    if not out.parent.is_dir():
        raise Rejected(f"{out}: there is no folder {out.parent}: make it first")
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise Rejected(f"{out} exists: choose another name, or give --overwrite to replace it")
    if out.is_symlink():
        raise Rejected(f"{out} is a symbolic link: give the file that it leads to, or another name")
    if out.is_dir() and not any((out / mark).is_file() for mark in _MARKS):
        raise Rejected(
            f"{out} is a folder that holds no checkpoint ({', '.join(_MARKS)}): --overwrite does not delete it"
        )


@contextmanager
def replacing(out: Path, overwrite: bool) -> Iterator[Path]:
    """A name for the file or folder to be made. At the end of the `with` block it becomes `out`; after an exception, an
    interrupt too, nothing is left of it, and what `out` was stays. Rejected as by check_free()."""
    check_free(out, overwrite)
    short = os.fsencode(out.name)[:100].decode(errors="ignore")  # a name has 255 bytes at most
    partial = out.with_name(f".{short}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        _flush(partial)
        check_free(out, overwrite)
        _put(partial, out)
    finally:
        _delete(partial)


def _put(partial: Path, out: Path) -> None:
    if not (out.is_dir() or (partial.is_dir() and out.exists())):
        os.replace(partial, out)
    else:  # a folder cannot replace another in one step: the old one steps aside until the new one is there
        aside = partial.with_suffix(".replaced")
        os.rename(out, aside)
        try:
            os.rename(partial, out)
        except BaseException:
            os.rename(aside, out)
            raise
        _delete(aside)
    _sync(out.parent)


def _flush(made: Path) -> None:
    """To the disk, before the name says that it is whole."""
    for path in sorted(made.rglob("*")) if made.is_dir() else [made]:
        if path.is_file():
            _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
