"""What a trainer brings to its run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ballast.errors import Rejected, RunRewound
from ballast.moments import Moments
from ballast.options import WEIGHTS
from ballast.saved_state import SavedState
from ballast.session import Session


class StartingState:
    """Whether the run takes its weights from this trainer, or the trainer from the run, and the state that goes to the run
    with the weights: at its first gradient, or at the next one in the middle of it.

    policy: the option `weights`; Rejected if it cannot be one.
    """

    def __init__(self, policy: Any):
        if policy not in WEIGHTS:
            raise Rejected(f"weights={policy!r}: it must be 'client', 'server', 'match' or None")
        self._policy: str | None = policy
        self._saved: SavedState | None = None
        self._waiting: dict[int, Moments] = {}

    @property
    def from_daemon(self) -> bool:
        """Whether the trainer's weights are overwritten before anything else."""
        return self._policy == "server"

    @property
    def saved(self) -> SavedState | None:
        """What waits to be taken over."""
        return self._saved

    @property
    def waiting(self) -> Mapping[int, Moments]:
        """By id(parameter), what was brought of parameters that the run does not train yet, for they are frozen: it goes to the
        run with them."""
        return self._waiting

    def bring(self, saved: SavedState | None) -> None:
        """In place of what was brought before: to go to the run at the next first gradient of a step."""
        self._saved = saved

    def take(self, session: Session) -> None:
        """After the state of an earlier process was put back: its weights go with it, unless the option `weights`, or what was
        brought, says otherwise. The first gradient compares them, on all ranks."""
        weights = session.weights
        if self._policy is None and self._saved is None and weights.loaded and not weights.settled:
            weights.pull()

    def refuse_within(self, session: Session) -> None:
        """Rejected if the open step has gradients from before a load_state_dict() of another state than the run's."""
        saved = self._saved
        if saved is None or not session.begun:
            return
        if saved.is_told(session.weights.told, session.step - 1):
            self._saved = None
            return
        raise Rejected(
            f"load_state_dict() was called in step {session.step}, which has gradients of the weights from before: drop them "
            "with zero_grad() of the optimizer (within Accelerate's accumulate(), where that does nothing, of the model), and the "
            "next backward() goes on from what was loaded",
            "FAILED_PRECONDITION",
        )

    def settle(self, session: Session) -> None:
        """Makes the state here and there the same, before the first gradient of a step. Where nothing was brought since
        the last time, nothing."""
        saved, weights = self._saved, session.weights
        brought = self._waiting if saved is None else saved.moments
        moments = {key: one for key, one in brought.items() if key in session.trained}
        _refuse_changed(moments)
        self._waiting = {key: one for key, one in brought.items() if key not in moments}
        if saved is None:
            weights.settle(self._policy, {})
        elif not weights.settled and (weights.fresh or self._policy == "client"):
            weights.settle(self._policy, moments)
        elif weights.agreed(saved.is_told(weights.told, session.step - 1)) or weights.have(moments):
            weights.settle(self._policy, {})
        elif not weights.settled and self._policy is not None:
            weights.settle(self._policy, moments)
        else:
            self._replace(session, moments)
        self._saved = None

    def _replace(self, session: Session, moments: Mapping[int, Moments]) -> None:
        try:
            session.replace(moments)
        except RunRewound:  # this trainer follows the run, whatever the run has of what was sent
            self._saved = None
            raise


def _refuse_changed(moments: Mapping[int, Moments]) -> None:
    if any(one.changed for one in moments.values()):
        raise Rejected(
            "the state that load_state_dict() was given has changed since: its tensors go to the run at the next first gradient, "
            "and another optimizer that trains on writes to them. Nothing was sent. Load a copy: "
            "load_state_dict(copy.deepcopy(state_dict))",
            "FAILED_PRECONDITION",
        )
