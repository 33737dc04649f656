"""A trainer's way into a run, and out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ballast import _core
from ballast.errors import AnotherDescription, Rejected
from ballast.moments import Moments
from ballast.open_optimizers import close_unreachable, held_beside
from ballast.progress import say
from ballast.rank import Rank, launched, seconds
from ballast.rank_zero import await_followed
from ballast.result import StepResult
from ballast.runs import clear
from ballast.server_address import serving
from ballast.session import Session
from ballast.settings import Description
from ballast.spec import with_follow, with_ranks
from ballast.status import status_of
from ballast.tls import connect


class Membership:
    """The connection to the daemon, from connect() to leave(), and on it a session of the run, from join() on.

    One thread at a time; what is only looked at, by any.
    """

    def __init__(self, rank: Rank):
        self._rank = rank
        self._client: _core.Client | None = None
        self._session: Session | None = None
        self._left: Session | None = None
        self._to_amend: Session | None = None  # of a run that readers do not follow as they are to
        self._started_over = False
        self.last_result: StepResult | None = None  # of the last step before leave()
        self.restored = ""  # the checkpoint that the daemon has read the run back from, as Joined has it

    def connect(self, options: Mapping[str, Any]) -> None:
        """As the options server, tls, token_file, connect_timeout and reconnect_timeout say. Unavailable if no daemon
        answers, or none of this process's own can be started; Rejected if one of its own will not do."""
        connect_s = seconds("connect_timeout", options.get("connect_timeout", 3.0))
        reconnect_s = seconds("reconnect_timeout", options.get("reconnect_timeout", 15.0))
        server = serving(options.get("server"), self._rank.run, self._rank.world, self._rank.world_given)
        self._client = connect(server, connect_s, reconnect_s, options.get("tls"), options.get("token_file"))

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
            clear(client, self._rank.run, known_alive=held_beside(self._rank, client) is not None)
            self._started_over = True  # what is there from now on is this trainer's own
        if description.sharded:
            description = replace(description, spec=self._spec_there(description.spec))
        try:
            self._session = Session(client, self._rank, description, wait_s=0.0)
        except Rejected as refused:
            held = refused.code == "ALREADY_EXISTS"
            forgotten = held and close_unreachable()  # an optimizer of this process held the rank, perhaps
            explained = self._explained(refused)
            if not held or (explained is not refused and not forgotten):
                raise explained from None
            self._session = Session(client, self._rank, description)
        self.note_restored()
        return self._session

    def _explained(self, refused: Rejected) -> Rejected:
        """Why the rank is held, by another optimizer of this process, or by another process where a launcher has started several
        and each took itself for the only one; `refused` itself where neither is known."""
        held = self._explained_beside(refused)
        if held.code != "ALREADY_EXISTS" or self._rank.world_given or launched() == 1:
            return held
        return Rejected(
            f"{held}. {launched()} processes were launched (WORLD_SIZE), and torch.distributed was not initialized when the "
            "optimizer was made, so each is rank 0 of 1: call init_process_group() before, or give rank= and world=; or give each "
            "process a run of its own",
            held.code,
        )

    def _explained_beside(self, refused: Rejected) -> Rejected:
        """The same, and which other optimizer of this process was given the run's name, if one was."""
        looks_for = refused.code in ("ALREADY_EXISTS", "FAILED_PRECONDITION")
        other = held_beside(self._rank, self.connected()) if looks_for else None
        if other is None:
            return refused
        return Rejected(
            f"{refused}. Another optimizer of this process, that of '{other}', is in run '{self._rank.run}': where both are to train, "
            "give each a run= of its own; where that one is done with, close() it",
            refused.code,
        )

    def rejoin(self) -> Session:
        """After a rewind: the rank again. Returns the session since: another, where the run was taken back to before an amendment."""
        assert self._session is not None, "join() comes first"
        while True:
            try:
                self._session.rejoin()
                return self._session
            except AnotherDescription:
                other = self._session.by_present()
                if other is None:
                    raise
                self._session = other

    def note_restored(self) -> None:
        """After the rank was taken: sees whether the daemon has read the run back from its disk, and tells people once."""
        assert self._session is not None, "join() comes first"
        if self._session.step == 1:
            return
        status = status_of(self.connected(), self._rank.run)
        durability = status["durability"]  # None: the daemon has no storage
        before, self.restored = self.restored, "" if durability is None else durability["restored"]
        if self.restored not in ("", before) and self._rank.number == 0:
            last = self._session.step - 1
            say(f"run '{self._rank.run}' goes on after step {last}: the daemon has read it back from {self.restored}")

    def spec_there(self, refusal: Rejected) -> dict[str, Any] | None:
        """After join() was refused: what the daemon has the run of that name with, as ballast.v1.RunSpec; None where that was
        not why."""
        if refusal.code != "FAILED_PRECONDITION":
            return None
        if not self._is_there():  # on the daemon's disk alone: the refusal has said why it stays there
            return None
        try:
            spec: dict[str, Any] = self.connected().get_run(self._rank.run)["spec"]
        except Rejected:  # of several daemons one has no part of it: likewise
            return None
        return spec

    def join_to_follow(self, description: Description, follow: Mapping[str, Any] | None) -> Session:
        """Joins a run that is as described, but that its readers are as `follow` says, and lets them be as described: rank 0
        amends it, and the others wait for that. Rejected, and the run is as it was, if it differs in anything else, or cannot be
        amended now."""
        client, rank = self.connected(), self._rank
        if description.sharded:
            description = replace(description, spec=self._spec_there(description.spec))
        there = replace(description, spec=with_follow(description.spec, follow))
        if rank.number > 0:
            await_followed(client, rank, there.spec)
            return self.join(description)
        if self._to_amend is None:  # else that was interrupted, or refused
            self._to_amend = self.join(there)
        self._session = None  # until the run is as described
        dropped = client.amend_run(description.spec)["snapshots_dropped"]
        self._to_amend = None
        gone = f"; its snapshots are gone: {', '.join(map(str, dropped))}" if dropped else ""
        say(f"run '{rank.run}' goes on with the follow= of this optimizer{gone}")
        return self.join(description)

    def amend(self, description: Description, moments: Mapping[int, Moments]) -> Session:
        """As Session.amend, of the session that there is."""
        assert self._session is not None, "join() comes first"
        self._session = self._session.amend(description, moments)
        return self._session

    def _spec_there(self, spec: str) -> str:
        """With as many ranks as the run has memory for, if it exists: fewer or more may go on with it than began it."""
        client, rank = self.connected(), self._rank
        try:
            most = int(client.get_run(rank.run)["spec"]["ranks"])
        except Rejected as refused:  # whether a run can be made all the same, creating it tells
            if refused.code not in ("NOT_FOUND", "FAILED_PRECONDITION"):
                raise
            return spec
        if rank.world > most:
            raise Rejected(
                f"run '{rank.run}' has memory for {most} ranks, and world={rank.world}: create it with max_world={rank.world} "
                "or more, or go on in another run with the optimizer's state_dict()",
                "FAILED_PRECONDITION",
            )
        return with_ranks(spec, most)

    def spec_to_go_on(self) -> dict[str, Any] | None:
        """Of a run that is there, as ballast.v1.RunSpec; None: it is on the daemon's disk alone, and is read back when it is
        joined. Rejected, and nothing is created, if it is neither."""
        client, run = self.connected(), self._rank.run
        try:
            spec: dict[str, Any] = client.get_run(run)["spec"]
            return spec
        except Rejected as refused:
            if refused.code != "NOT_FOUND":
                raise
            if _is_on_disk(client, run):
                return None
            raise Rejected(
                f"{refused}. weights='server' goes on with a run that is there: leave it out to begin one, or, where the script is to "
                "do either, register the trainer's state (register_client_state) and call connect() in its place",
                refused.code,
            ) from None

    def _is_there(self) -> bool:
        """Whether the daemon has a run of that name."""
        return any(status["run_id"] == self._rank.run for status in self.connected().list_runs()["runs"])

    def leave(self) -> None:
        """Out of the run. The connection is to be closed once nothing calls it; then let_go() comes."""
        if self._session is not None:
            self.last_result = self._session.last_result
        self._left = self._session or self._to_amend or self._left  # weights are written into its memory until then
        self._client = self._session = self._to_amend = None

    def let_go(self) -> None:
        if self._left is not None:
            self._left.weights.let_go()
        self._left = None


def _is_on_disk(client: _core.Client, run: str) -> bool:
    try:
        return bool(client.list_checkpoints(run)["checkpoints"])
    except Rejected:  # the daemon has no storage, or nothing of that name there
        return False
