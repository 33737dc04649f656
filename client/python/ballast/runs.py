"""Runs on a daemon, from outside of an optimizer."""

from __future__ import annotations

from ballast import _core
from ballast.server_address import standing

_CONNECT_S, _RECONNECT_S = 3.0, 15.0


def delete_run(run: str, server: str | None = None, *, force: bool = False) -> int:
    """Deletes a run of a daemon. Its weights, moments and snapshots are gone for good; its name is free.

    server: as the optimizers' option; "local" is the daemon that this process has started. force: also when a trainer is
    attached, whose session then ends.
    Returns how many bytes of the daemon's memory were freed.

    Raises Rejected, with code NOT_FOUND, if there is no such run or this process has no daemon, and FAILED_PRECONDITION
    if a trainer is attached, or was lost less than the daemon's lease ago; Unavailable if no daemon answers. Thread-safe.
    """
    client = _core.Client.connect(standing(server), _CONNECT_S, _RECONNECT_S)
    try:
        return int(client.delete_run(run, force)["freed_bytes"])
    finally:
        client.close()
