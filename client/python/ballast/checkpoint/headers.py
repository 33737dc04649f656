"""Headers of safetensors files: eight bytes with the length of a JSON object, the object and blanks, then the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ballast.checkpoint.errors import Damaged
from ballast.checkpoint.fields import parse_object
from ballast.checkpoint.files import check_size, open_plain, read_exactly
from ballast.checkpoint.layout import DataFile, Entry

MOST_HEADER = 100_000_000  # bytes; readers of the format refuse more
_PAGE = 4096  # data begin on a multiple of it
_METADATA = {"format": "pt"}  # which Hugging Face's loaders ask for


def check_header(path: Path, wanted: DataFile, nbytes: int) -> int:
    """Where the data begin, in a file of so many bytes. Damaged if its header or size is not what `wanted` leads to."""
    with open_plain(path) as (file, size):
        check_size(path, size, nbytes)
        if size < 8:
            raise Damaged(path, f"it has {size} bytes, and a safetensors file at least 8")
        length = int.from_bytes(read_exactly(file, 8, path), "little")
        if length > min(MOST_HEADER, size - 8):
            raise Damaged(
                path, f"its header would have {length} bytes: it has {size}, and a header {MOST_HEADER} at most"
            )
        if (8 + length) % _PAGE:
            raise Damaged(path, f"its data begin at {8 + length}, no multiple of {_PAGE}")
        text = read_exactly(file, length, path)
    if text[:1] != b"{" or text.rstrip(b" ")[-1:] != b"}":
        raise Damaged(path, "its header is no object of JSON with blanks behind it")
    _compare(parse_object(text, path), wanted, path)
    if 8 + length + wanted.data_bytes != size:
        raise Damaged(path, f"it has {size} bytes: its header leads to {8 + length + wanted.data_bytes}")
    return 8 + length


def _compare(header: dict[str, Any], wanted: DataFile, path: Path) -> None:
    metadata = header.pop("__metadata__", None)
    if metadata != _METADATA:
        raise Damaged(path, f"its header's __metadata__ is {str(metadata)[:80]}: wanted {_METADATA}")
    for (key, found), entry in zip(header.items(), wanted.entries):
        if key != entry.key:
            raise Damaged(path, f"its header has {key[:200]!r} where spec.json and run.json lead to {entry.key!r}")
        if not _same(found, entry):
            said = json.dumps(found)[:200]
            raise Damaged(path, f"its header has {key!r} as {said}: spec.json and run.json lead to {_as_json(entry)}")
    if len(header) != len(wanted.entries):
        raise Damaged(
            path, f"its header has {len(header)} tensors: spec.json and run.json lead to {len(wanted.entries)}"
        )


def _same(found: Any, entry: Entry) -> bool:
    """Compared as text: to Python, 1, 1.0 and true are equal."""
    return isinstance(found, dict) and json.dumps(found, sort_keys=True) == _as_json(entry)


def _as_json(entry: Entry) -> str:
    made = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.begin, entry.end]}
    return json.dumps(made, sort_keys=True)
