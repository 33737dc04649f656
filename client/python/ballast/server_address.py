"""Which daemon is meant: one that is named, or one of this process's own."""

from __future__ import annotations

import os
from typing import Any

from ballast import local_daemon
from ballast.errors import Rejected
from ballast.rank import launched
from ballast.text import text

LOCAL = "local"


def address_of(server: Any) -> str:
    """The option `server` as it is meant: itself, else $BALLAST_SERVER, else "local". Rejected if it is no string."""
    if server is not None and not isinstance(server, str):
        raise Rejected(f"server={server!r}: it must be a string, 'host:port', 'unix:path' or 'local'")
    return text("server", server or os.environ.get("BALLAST_SERVER") or LOCAL)


def serving(server: Any, run: str, world: int, world_given: bool) -> str:
    """The address of a daemon for a rank of `run`: of the one that is named, or of this process's, started if need be.

    world: of the run; world_given: by an option or by torch.distributed. Rejected where one process's daemon would have
    to serve the others' ranks.
    """
    address = address_of(server)
    if address != LOCAL:
        return address
    ranks = world if world_given else max(world, launched())
    if ranks > 1:
        raise Rejected(
            f"server={LOCAL!r} starts a daemon for one process alone, and run '{run}' has {ranks} ranks: start one for "
            "all, with `ballastd` (for ranks on other hosts with --listen 0.0.0.0:7700 and TLS), and give every rank "
            "server='host:7700', or BALLAST_SERVER=host:7700 in its environment",
            "FAILED_PRECONDITION",
        )
    return local_daemon.start()


def standing(server: Any) -> str:
    """The same for who only asks: nothing is started. Rejected if this process has no daemon and none is named."""
    address = address_of(server)
    return local_daemon.running() if address == LOCAL else address
