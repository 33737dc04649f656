"""A session's run that goes by another description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ballast import _core
from ballast.binding import Binding
from ballast.errors import AnotherDescription, Rejected, RunRewound
from ballast.moments import Moments
from ballast.rank import Rank
from ballast.rank_zero import RUN_CHANGED, await_change, await_upload
from ballast.replaced import Amended
from ballast.settings import Description
from ballast.uploads import refuse_nonfinite_added
from ballast.weights import Weights

if TYPE_CHECKING:
    from typing_extensions import Self


class Amending:
    """Of Session: how the run is given another description, and how it comes that it has an earlier one again."""

    description: Description
    weights: Weights
    _client: _core.Client
    _rank: Rank
    _run: str
    _bindings: Sequence[Binding]
    _spec_sha256: str
    _known: dict[str, Description]
    _attached: bool
    _untaken: bool
    _amended: Amended | None

    if TYPE_CHECKING:

        @property
        def step(self) -> int: ...

        def _by(self, description: Description, spec_sha256: str | None = None) -> Self:
            """A session that goes on from this one, by another description. spec_sha256: as of Session."""

        def _attach_anew(self) -> None: ...

    def amend(self, description: Description, moments: Mapping[int, Moments]) -> Self:
        """Between two steps, by every rank with the same description, which begins with the tensors of this one: the run
        goes on by it, and what it has of them stays. Rank 0 asks for it, and uploads the weights that the others have
        here, with these moments by id(parameter). This one is over; returns the session since, which is to complete().

        Where it was interrupted it may be called again. Rejected, and nothing is sent, if a weight that is added is not finite.
        """
        refuse_nonfinite_added(description.tensors[len(self._bindings) :], self._run)
        if self._attached and not self._ended_by(description.spec):
            self.description = description
            return self
        self._attached = False
        session = self._after(description)
        session._amended = Amended(self.weights, self.step, session._bindings[len(self._bindings) :], moments)
        return session

    def _ended_by(self, spec: str) -> bool:
        """Has the run go by this description, and returns whether that has ended the session: not where the run had it
        already, in other words."""
        if self._rank.number == 0:
            if self._client.amend_run(spec)["amended"]:
                return True
        elif not self._has(spec):
            self.weights.await_end(*RUN_CHANGED)
            one = "," not in self._client.server
            await_change(self._client, self._rank, self._spec_sha256, whole=lambda: one or self._has(spec))
            return True
        if not self.weights.outdated:
            return False
        self.weights.await_end("has changed the run", "make that change")
        return True

    def _has(self, spec: str) -> bool:
        """Whether the run has this description."""
        try:
            self._client.create_run(spec)
        except Rejected as error:
            if error.code != "FAILED_PRECONDITION":
                raise
            return False
        return True

    def _after(self, description: Description) -> Self:
        try:
            return self._by(description)
        except Rejected as error:
            if self._rank.number == 0:
                raise
            raise Rejected(
                f"rank {self._rank.number} changes run '{self._run}' otherwise than rank 0 (add_param_group(), requires_grad_(), "
                f"options of param_groups), and every rank is to make the same change before the same step: {error}",
                "FAILED_PRECONDITION",
            ) from error

    def complete(self) -> None:
        """After amend(): what was added has the same weights here and there. Otherwise nothing. RunRewound, which this trainer
        is to follow, if the run has gone on, or back, without it."""
        amended = self._amended
        if amended is None:
            return
        if not self._attached:  # which was interrupted
            self._attach_anew()
        brought = self.weights.bring(amended.added, amended.moments)
        if brought.ended:
            self._attach_anew()
        self._untaken = not self.weights.go_on(amended, brought)
        self._amended = None
        if self._untaken:
            raise RunRewound(
                f"run '{self._run}' has other weights, at step {self.step - 1}, than rank {self._rank.number} had before its "
                "description was changed: it has gone on without this rank, or back",
                step=self.step - 1,
            )

    def _await_added(self) -> bool:
        """Where the run lacks weights of what rank 0 has added: waits until it has uploaded them, which ends the session, and
        returns True."""
        if self.weights.loaded or self._rank.number == 0:
            return False
        await_upload(self._rank, self.weights.loaded_there)
        return True

    def by_present(self) -> Self | None:
        """After a rewind: the session by the description that the run has now, which is to rejoin(): this one, or one by a
        description that it had before in this training. The daemon was started anew, with a checkpoint of then; or another rank
        has made the change once more. None: the run has none that is known here."""
        while True:
            there: str = self._client.get_run(self._run)["spec_sha256"]
            if there == self._spec_sha256:
                return self
            if there not in self._known:
                return None
            with suppress(AnotherDescription):  # since this was looked at
                session = self._by(self._known[there], there)
                session._untaken = True
                return session
