"""Runs on a daemon, from outside of an optimizer."""

from __future__ import annotations

import os
import time

from ballast import _core
from ballast.errors import Rejected
from ballast.progress import Patience
from ballast.server_address import standing
from ballast.text import text
from ballast.tls import Tls, connect

_CONNECT_S, _RECONNECT_S = 3.0, 15.0
# How long a trainer that was lost may keep its place: the daemon's lease, 10 s unless it is configured otherwise.
_LEASE_WAIT_S = 12.0
# How long the daemon may take a trainer for alive whose process has ended, or whose machine is gone.
_UNHEARD_S = 10.0
_PAUSE_S = 0.25


def delete_run(
    run: str,
    server: str | None = None,
    *,
    force: bool = False,
    keep_checkpoints: bool = False,
    tls: Tls | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> int:
    """Deletes a run of a daemon. Its weights, moments, snapshots and checkpoints are gone for good; its name is free.

    server, tls, token_file: as the optimizers' options; "local" is the daemon that this process has started. force: also
    when a trainer is attached, whose session then ends, and on fewer daemons than the run is on. keep_checkpoints: those stay
    on the daemon's disk, and `ballastctl restore` brings the run back.
    Returns how many bytes of the daemon's memory were freed.

    Raises Rejected, with code NOT_FOUND, if there is no such run or this process has no daemon, and FAILED_PRECONDITION
    if a trainer is attached, was lost less than the daemon's lease ago, or may come back after a rewind, or if the run is
    on more daemons than `server` names; INVALID_ARGUMENT if the name is no text; Unavailable if no daemon answers.
    Thread-safe.
    """
    name = text("run", run)
    client = connect(standing(server), _CONNECT_S, _RECONNECT_S, tls, token_file)
    try:
        return int(client.delete_run(name, force, keep_checkpoints)["freed_bytes"])
    finally:
        client.close()


def clear(client: _core.Client, run: str, known_alive: bool) -> None:
    """Deletes the run if there is one, to start over. Of a trainer that was lost the lease is awaited; Rejected if one is
    connected, which goes on: at once where it is known_alive, else after a while in which it may turn out to be lost.
    """
    connected_until = time.monotonic() + (0.0 if known_alive else _UNHEARD_S)
    deadline = time.monotonic() + _LEASE_WAIT_S
    patience = Patience(
        lambda: f"waiting for the trainer of run '{run}', in case it has just ended, and for its lease", 1
    )
    while True:
        try:
            client.delete_run(run)
            return
        except Rejected as refused:
            if refused.code == "NOT_FOUND":
                return
            if refused.code != "FAILED_PRECONDITION":
                raise
            now = time.monotonic()
            connected = _connected(client, run)
            if connected:
                deadline = now + _LEASE_WAIT_S  # the lease begins when it is lost
            if now > (connected_until if connected else deadline):
                raise Rejected(
                    f"start_over=True: run '{run}' cannot be deleted, for somebody trains in it: {refused}. Stop that "
                    f"trainer, give another run, or delete it all the same: ballast.delete_run('{run}', force=True)",
                    refused.code,
                ) from refused
        patience.look()
        time.sleep(_PAUSE_S)


def _connected(client: _core.Client, run: str) -> bool:
    """Whether a trainer is connected, and not lost. Each rank has a line that says so."""
    lines = [line for status in client.list_runs()["runs"] if status["run_id"] == run for line in status["ranks"]]
    return any(", connected" in line for line in lines)
