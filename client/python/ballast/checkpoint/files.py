"""Files of a folder that may be damaged or of a stranger's making: ordinary ones alone, never by way of a link, and no
more of them in memory than is said."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from ballast.checkpoint.crc32c import MIB, crc32c
from ballast.checkpoint.errors import Damaged

_READ_BYTES = 4 * MIB


@contextmanager
def open_plain(path: Path) -> Iterator[tuple[FileIO, int]]:
    """The file and its size. Damaged if it is missing, no ordinary file, or cannot be read: then also of errors that
    come while it is open."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise Damaged(path, "it is no ordinary file")
        # O_NONBLOCK: what has become a pipe since then does not hold anybody up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise Damaged(path, "it is no ordinary file")
            yield file, found.st_size
    except FileNotFoundError:
        raise Damaged(path, "it is missing") from None
    except OSError as error:
        raise Damaged(path, f"it cannot be read: {error.strerror}") from None


def read_exactly(file: FileIO, count: int, path: Path) -> bytes:
    """So many bytes. Damaged if there are fewer."""
    pieces, missing = [], count
    while missing > 0:
        piece = file.read(missing)
        if not piece:
            raise Damaged(path, f"it ends {missing} bytes before it should")
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def read_whole(path: Path, most: int) -> bytes:
    """Damaged if it has more bytes than that."""
    with open_plain(path) as (file, size):
        if size > most:
            raise Damaged(path, f"it has {size} bytes, and such a file {most} at most")
        return read_exactly(file, size, path)


def sha256_of(path: Path, wanted_bytes: int) -> str:
    """Of the whole file, in hexadecimal. Damaged if its size is another one."""
    with open_plain(path) as (file, size):
        check_size(path, size, wanted_bytes)
        digest, buffer = hashlib.sha256(), bytearray(_READ_BYTES)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            digest.update(view[:count])
        return digest.hexdigest()


def check_size(path: Path, size: int, wanted: int) -> None:
    if size != wanted:
        missing = range(size // MIB, -(-wanted // MIB)) if size < wanted else ()
        raise Damaged(path, f"it has {size} bytes, and had {wanted}", missing)


def differing_mibs(path: Path, wanted: tuple[int, ...]) -> list[int]:
    """Which MiB of the file have another CRC-32C."""
    with open_plain(path) as (file, size):
        blocks = (read_exactly(file, min(MIB, size - begin), path) for begin in range(0, size, MIB))
        return [mib for mib, (block, checksum) in enumerate(zip(blocks, wanted)) if crc32c(block) != checksum]
