"""Where checkpoints are: the folder of a daemon's storage, of a run, of one checkpoint (proto/CHECKPOINTS.md)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ballast.checkpoint.errors import NotACheckpoint
from ballast.checkpoint.manifest import MANIFEST, SUMS

_NAME = re.compile(r"(?P<state>discarded-|writing-|deleting-|)(?P<number>\d{12,20})-step-(?P<step>\d{1,20})", re.ASCII)
_STATES = {"": "kept", "discarded-": "discarded", "writing-": "writing", "deleting-": "deleting"}
_REMOVED = ".removed-"
_NOT_CHECKED = {
    "writing": "was not published (a daemon was stopped while it wrote, or is writing): not checked",
    "deleting": "is being removed: not checked",
}


@dataclass(frozen=True)
class Place:
    """A checkpoint's folder.

    state: "kept" or "discarded". number, step: as its name says; 0 where it says none. run: the run's name, where the
        folder lies in a daemon's storage; else empty.
    """

    folder: Path
    state: str = "kept"
    number: int = 0
    step: int = 0
    run: str = ""


@dataclass
class Found:
    """places: by run, and then by number. notes: what was seen besides, a line each."""

    places: list[Place] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def parse_name(folder: Path, run: str = "") -> Place | None:
    """Of the folder's name; None: it is no checkpoint's. The state may be "writing" or "deleting", too."""
    match = _NAME.fullmatch(folder.name)
    if not match:
        return None
    place = Place(folder, _STATES[match["state"]], int(match["number"]), int(match["step"]), run)
    return place if f"{match['state']}{place.number:012d}-step-{place.step}" == folder.name else None


def is_checkpoint(folder: Path) -> bool:
    """Whether it is the folder of a published checkpoint, whatever is left in it."""
    place = parse_name(folder.absolute())
    if place is None:
        return os.path.lexists(folder / MANIFEST) or os.path.lexists(folder / SUMS)
    return place.state in ("kept", "discarded") and folder.is_dir()


def find_checkpoints(folder: Path) -> Found:
    """The checkpoint that `folder` is, or those of a run's folder, or of a daemon's.

    Links under the folder are not followed, as by the daemon. NotACheckpoint: it is no folder or cannot be listed.
    """
    if not folder.is_dir():
        raise NotACheckpoint(folder, "is no folder" if folder.exists() else "does not exist")
    own = parse_name(folder.absolute())
    if is_checkpoint(folder):
        return Found([replace(own, folder=folder) if own else Place(folder)])
    if own is not None:
        return Found(notes=[f"{folder} {_NOT_CHECKED[own.state]}"])
    found, runs = Found(), folder / "runs"
    if runs.is_dir() and not runs.is_symlink():
        for run in _folders(runs, found):
            if run.name.startswith(_REMOVED):
                found.notes.append(f"{run} is of a run that was deleted, and is being removed: not checked")
            else:
                _add_run(run, run.name, found)
    else:
        _add_run(folder, "", found)
    return found


def _add_run(folder: Path, run: str, found: Found) -> None:
    places = [place for entry in _folders(folder, found) if (place := parse_name(entry, run))]
    for place in sorted(places, key=lambda place: (place.number, place.folder.name)):
        if place.state in _NOT_CHECKED:
            found.notes.append(f"{place.folder} {_NOT_CHECKED[place.state]}")
        else:
            found.places.append(place)


def _folders(folder: Path, found: Found) -> Iterator[Path]:
    """Those in it, by name; a link is noted."""
    try:
        with os.scandir(folder) as listed:
            entries = sorted(listed, key=lambda entry: entry.name)
    except OSError as error:
        raise NotACheckpoint(folder, f"cannot be listed: {error.strerror}") from None
    for entry in entries:
        if entry.is_symlink():
            found.notes.append(f"{entry.path} is a symbolic link, which a daemon does not follow: not checked")
        elif entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)
