"""The programs ballastd and ballastctl: those that a wheel carries (deploy/wheel.sh), else those on PATH."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from ballast.errors import Rejected

# Where a wheel has them.
_CARRIED = Path(__file__).with_name("bin")
# How this module's entry points, which pip puts on PATH, name it.
_OURS = b"ballast.programs"


def find(name: str) -> str:
    """The program's path. Rejected, with how to install it, if there is none."""
    for path in (_CARRIED / name, *_on_path(name)):
        if os.path.isfile(path) and os.access(path, os.X_OK) and not _is_entry_point(path):
            return str(path)
    raise Rejected(
        f"there is no {name}: this package was installed without it, and PATH has none. Install the wheel that carries "
        "it (deploy/wheel.sh makes it from a checkout), or build it (deploy/setup.sh build dev ballastd ballastctl) "
        "and put its folder on PATH",
        "NOT_FOUND",
    )


def ballastd() -> NoReturn:
    """The entry point of that name."""
    _become("ballastd")


def ballastctl() -> NoReturn:
    """The entry point of that name."""
    _become("ballastctl")


def _become(name: str) -> NoReturn:
    try:
        program = find(name)
    except Rejected as error:
        sys.exit(f"{name}: {error}")
    os.execv(program, [program, *sys.argv[1:]])


def _on_path(name: str) -> Iterator[Path]:
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        yield Path(folder or ".") / name


def _is_entry_point(path: Path) -> bool:
    """Whether it is one of the two above, which would find itself."""
    with path.open("rb") as file:
        head = file.read(1024)
    return head.startswith(b"#!") and _OURS in head
