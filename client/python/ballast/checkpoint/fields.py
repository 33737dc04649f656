"""JSON as Protobuf writes it, read strictly: 64-bit numbers may be strings, and what is 0 or empty is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ballast.checkpoint.errors import Damaged

MOST_JSON = 10**9  # bytes of a file
_UNSIGNED = re.compile("[0-9]{1,20}")


def parse_object(text: bytes, path: Path) -> dict[str, Any]:
    """Damaged if it is not one object of JSON in UTF-8, or names something twice."""
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except RecursionError:
        raise Damaged(path, "its JSON is nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are such
        raise Damaged(path, f"it is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise Damaged(path, "it is no object of JSON")
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"{name!r} is there twice")
        made[name] = value
    return made


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


class Fields:
    """The fields of one message. Every reader raises Damaged, with the field's name, where it has another type."""

    def __init__(self, values: Mapping[str, Any], path: Path, at: str = ""):
        self._values = values
        self._path = path
        self._at = at

    def wrong(self, name: str, how: str) -> Damaged:
        return Damaged(self._path, f"{self._at}{name} {how}")

    def has(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str) -> str:
        value = self._values.get(name, "")
        if not isinstance(value, str):
            raise self.wrong(name, "is no text")
        return value

    def integer(self, name: str, below: int = 1 << 64) -> int:
        return self._integer(self._values.get(name, 0), name, below)

    def integers(self, name: str, below: int = 1 << 64) -> list[int]:
        return [self._integer(value, name, below) for value in self._list(name)]

    def numbers(self, name: str) -> list[float]:
        values = self._list(name)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise self.wrong(name, f"has {str(value)[:80]!r}, which is no number")
        return [float(value) for value in values]

    def count(self, name: str) -> int:
        """How many a list has."""
        return len(self._list(name))

    def message(self, name: str) -> Fields:
        value = self._values.get(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, "is no message")
        return Fields(value, self._path, f"{self._at}{name}.")

    def messages(self, name: str) -> list[Fields]:
        values = self._list(name)
        for number, value in enumerate(values):
            if not isinstance(value, dict):
                raise self.wrong(f"{name}[{number}]", "is no message")
        return [Fields(value, self._path, f"{self._at}{name}[{number}].") for number, value in enumerate(values)]

    def _list(self, name: str) -> list[Any]:
        value = self._values.get(name, [])
        if not isinstance(value, list):
            raise self.wrong(name, "is no list")
        return value

    def _integer(self, value: Any, name: str, below: int) -> int:
        if isinstance(value, str) and _UNSIGNED.fullmatch(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
            raise self.wrong(name, f"is {str(value)[:40]!r}: wanted a whole number, at least 0 and below {below}")
        return value
