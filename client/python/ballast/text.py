"""Strings that go to a daemon, which are UTF-8 there."""

from __future__ import annotations

from typing import Any

from ballast.errors import Rejected


def text(option: str, given: Any) -> str:
    """The option as it is. Rejected if it is no string, or has a surrogate, as what os.fsdecode() makes of a name's odd bytes."""
    if not isinstance(given, str):
        raise Rejected(f"{option}={given!r}: it must be a string")
    try:
        given.encode()
    except UnicodeEncodeError:
        raise Rejected(
            f"{option}={given!r}: it holds a surrogate, which is no text; write it in valid Unicode"
        ) from None
    return given
