"""What the daemon says of a run."""

from __future__ import annotations

from typing import Any


class Status(dict[str, Any]):
    """A dict whose keys can be read as attributes too: status["bytes"]["weights"] is status.bytes.weights."""

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"no '{key}' here; there are {', '.join(self)}") from None


def readable(value: Any) -> Any:
    """The same with every dict, however deep, as a Status."""
    if isinstance(value, dict):
        return Status((key, readable(item)) for key, item in value.items())
    if isinstance(value, list):
        return [readable(item) for item in value]
    return value
