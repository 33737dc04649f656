"""What the daemon says of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ballast import _core


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


def status_of(client: _core.Client, run: str) -> Mapping[str, Any]:
    """Of the run, as the list of runs says, which has no specs: they may take megabytes."""
    found: Mapping[str, Any]
    for found in client.list_runs()["runs"]:
        if found["run_id"] == run:
            return found
    found = client.get_run(run)["status"]  # or it says why there is none
    return found
