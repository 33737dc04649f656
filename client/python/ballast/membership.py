"""A trainer's way into a run, and out of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ballast import _core
from ballast.errors import Rejected
from ballast.open_optimizers import close_unreachable
from ballast.rank import Rank, seconds
from ballast.runs import clear
from ballast.server_address import serving
from ballast.session import Session
from ballast.settings import Description


class Membership:
    """The connection to the daemon, from connect() to leave(), and on it a session of the run, from join() on.

    One thread at a time; what is only looked at, by any.
    """

    def __init__(self, rank: Rank):
        self._rank = rank
        self._client: _core.Client | None = None
        self._session: Session | None = None
        self._started_over = False

    def connect(self, options: Mapping[str, Any]) -> None:
        """As the options server, connect_timeout and reconnect_timeout say. Unavailable if no daemon answers, or none of
        this process's own can be started; Rejected if one of its own will not do."""
        connect_s = seconds("connect_timeout", options.get("connect_timeout", 3.0))
        reconnect_s = seconds("reconnect_timeout", options.get("reconnect_timeout", 15.0))
        server = serving(options.get("server"), self._rank.run, self._rank.world, self._rank.world_given)
        self._client = _core.Client.connect(server, connect_s, reconnect_s)

    @property
    def open(self) -> bool:
        return self._client is not None

    @property
    def session(self) -> Session | None:
        """None before join(), and after leave()."""
        return self._session

    def connected(self) -> _core.Client:
        """Rejected after leave()."""
        if self._client is None:
            raise Rejected(f"this optimizer of run '{self._rank.run}' is closed: make a new one", "FAILED_PRECONDITION")
        return self._client

    def join(self, description: Description) -> Session:
        """Creates the run, or joins it as the rank. Rejected if the daemon has it with another description, or if it is to
        be started over and somebody trains in it."""
        client = self.connected()
        if self._rank.start_over and not self._started_over:
            clear(client, self._rank.run)
            self._started_over = True  # what is there from now on is this trainer's own
        try:
            self._session = Session(client, self._rank, description)
        except Rejected as refused:
            if refused.code != "ALREADY_EXISTS" or not close_unreachable():
                raise
            self._session = Session(client, self._rank, description)  # by an optimizer that was forgotten
        return self._session

    def leave(self) -> None:
        """Out of the run. The connection is to be closed once nothing calls it."""
        self._client = self._session = None
