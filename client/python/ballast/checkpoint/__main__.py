"""python -m ballast.checkpoint: see --help."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ballast.checkpoint.checkpoint import open as open_checkpoint
from ballast.checkpoint.errors import CheckpointError, NotACheckpoint
from ballast.checkpoint.folders import Found, Place, find_checkpoints, is_checkpoint
from ballast.checkpoint.listing import describe, list_places, table_of, text_of
from ballast.checkpoint.verification import Verdict, verify

EPILOG = """\
DIR is the folder of one checkpoint, of a run, or a daemon's storage.dir. No daemon is needed, nor torch; what one has
written is read whether it runs or not. proto/CHECKPOINTS.md says what is in such a folder.

  show     of one checkpoint what it holds; of more a table. Of the weights and moments nothing is read: what a table
           calls damaged has a damaged manifest, or a file that is missing or has another size
  verify   reads every byte. A file is right if its SHA-256 is; where it is not, the CRC-32C of each MiB is compared,
           and the damaged ones are named, counted from 0. Not checked is specSha256, which is of the spec as Protobuf
           encodes it

Folders that were not published (writing-...) or are being removed (deleting-...) are named and not checked. What was
set aside (discarded-...) is checked like any other.

exit status: 0 done, and all is well; 1 a checkpoint is damaged, or of a later version; 2 the command line is wrong, or
there is no checkpoint in DIR; 130 interrupted.
"""


def parser() -> argparse.ArgumentParser:
    """The command line's."""
    made = argparse.ArgumentParser(
        prog="python -m ballast.checkpoint",
        description="Looks into the checkpoints that a daemon has written to its disk, and checks them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in (("show", "tell what DIR holds"), ("verify", "check every byte of it")):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("folder", type=Path, metavar="DIR", help="of a checkpoint, of a run, or a storage.dir")
        command.add_argument("--json", action="store_true", help="print JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    options = parser().parse_args(arguments)
    try:
        found = find_checkpoints(options.folder)
        if not found.places:
            for note in found.notes:
                print(note, file=sys.stderr)
            wanted = "there is none in it; wanted: the folder of a checkpoint, of a run, or a daemon's storage.dir"
            raise NotACheckpoint(options.folder, f"is no checkpoint's folder, and {wanted}")
        return (_show if options.command == "show" else _verify)(options.folder, found, options.json)
    except NotACheckpoint as error:
        print(f"ballast.checkpoint: {error}", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"ballast.checkpoint: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ballast.checkpoint: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads on: `show DIR | head`
        return 1
    except OSError as error:
        print(f"ballast.checkpoint: {error.filename or options.folder}: {error.strerror}", file=sys.stderr)
        return 2


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


# --- show -----------------------------------------------------------------------------------------------------------


def _show(folder: Path, found: Found, as_json: bool) -> int:
    if is_checkpoint(folder):
        facts = describe(open_checkpoint(folder))
        if as_json:
            _print_json(facts)
        else:
            print(*text_of(facts), sep="\n")
        return 0
    rows = list_places(found.places)
    if as_json:
        _print_json({"checkpoints": rows, "notes": found.notes})
    else:
        print(*table_of(rows), *found.notes, sep="\n")
    return 0


# --- verify ---------------------------------------------------------------------------------------------------------


def _verify(folder: Path, found: Found, as_json: bool) -> int:
    verdicts: list[tuple[Place, Verdict]] = []
    for place in found.places:
        verdict = verify(place.folder, place.run)
        if verdict.faults and not place.folder.exists():
            found.notes.append(f"{place.folder} is gone: the daemon has removed it, or given it another name")
            continue
        verdicts.append((place, verdict))
        if not as_json:
            print(*_lines(place, verdict), sep="\n", flush=True)  # the next one may take minutes
    if as_json:
        _print_json({"checkpoints": [_as_dict(*pair) for pair in verdicts], "notes": found.notes})
    elif found.notes:
        print(*found.notes, sep="\n")
    return 1 if any(verdict.faults for _, verdict in verdicts) else 0


def _said(verdict: Verdict) -> list[str]:
    said = [str(fault) for fault in verdict.faults]
    if manifest := verdict.manifest:
        size = f"{len(manifest.files)} files, {manifest.nbytes} bytes"
        written = f"written {manifest.written_at} by ballastd {manifest.version}"
        said.append(f"run {manifest.run_id}, step {manifest.step}, {size}, {written}")
    return said


def _lines(place: Place, verdict: Verdict) -> list[str]:
    word = "damaged" if verdict.faults else "good"
    aside = ", discarded: its steps were undone" if place.state == "discarded" else ""
    return [f"{place.folder}: {word}{aside}", *(f"  {line}" for line in _said(verdict))]


def _as_dict(place: Place, verdict: Verdict) -> dict[str, Any]:
    faults = [{"path": str(fault.path), "mibs": list(fault.mibs), "text": str(fault)} for fault in verdict.faults]
    return {
        "folder": str(place.folder),
        "state": place.state,
        "good": not verdict.faults,
        "faults": faults,
        "said": _said(verdict),
    }


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # whatever names the disk has
    sys.exit(main())
