"""Coming back to a run: in the place of an earlier process, and when the run is rewound."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ballast import _core
from ballast.client_state import ClientStates
from ballast.errors import Rejected, RunRewound
from ballast.membership import Membership
from ballast.session import Session
from ballast.step_end import StepEnd, ends_between

# Optimizer.load_state_dict, of the optimizer whose state was kept with the registered one's.
Load = Callable[[dict[str, Any]], object]


class Rejoin:
    """The client state that is registered, whether it was put back, and what a rewind has made void.

    Knows no optimizer: who comes back gives its session and what loads its state_dict with each call. One thread at a
    time.
    """

    def __init__(self, run: str):
        self._run = run
        self._states = ClientStates()
        self._asked = False  # what the daemon kept of them was asked for
        self._ends: list[StepEnd | None] = []
        self._dead_backward = -1

    # --- client state -----------------------------------------------------------------------------------------------

    def register(self, name: str, get: Any, set: Callable[[Any], object] | None, late: bool) -> None:
        """As Optimizer.register_client_state; `late`: a step was begun already, which Rejected tells of."""
        if self._asked or late:
            raise Rejected(
                f"client state '{name}': what run '{self._run}' has kept was put back already, or a step was "
                "made without it; register before connect() and the first gradient",
                "FAILED_PRECONDITION",
            )
        self._states.add(name, get, set)

    def collect(self, state_dict: Callable[[], Any]) -> bytes:
        """What is registered as it is now, and the optimizer's state_dict. Empty if nothing is registered."""
        return self._states.collect(state_dict)

    def require_asked(self) -> None:
        """Rejected if state is registered, and what the daemon has of it was never asked for."""
        if self._states and not self._asked:
            raise Rejected(
                "client state is registered: call connect() before the loop, so that an earlier process's is put back "
                "before the first batch",
                "FAILED_PRECONDITION",
            )

    def put_back_once(self, session: Session, client: _core.Client, load: Load) -> dict[str, Any] | None:
        """Puts an earlier process's back, the first time that it is called. Returns the pieces by name; None: there are none,
        or they were put back before."""
        if not self._states or self._asked:
            return None
        self._asked = True
        return self._put_back(session, client, load)

    @property
    def skipped(self) -> bool:
        """Whether the step that the state put back was taken in changed no weight."""
        return bool(self._ends) and self._ends[0] is not None and self._ends[0].skipped

    @property
    def ends(self) -> list[StepEnd | None]:
        """Of the step that the state put back was taken in, and of those that have closed since; None: it is not known."""
        return self._ends

    def _put_back(self, session: Session, client: _core.Client, load: Load) -> dict[str, Any] | None:
        """Returns the pieces by name; None if there is nothing, here or there."""
        if not session.client_state or not self._states:
            return None
        self._ends = self._ends_since(session, client)
        pieces = self._states.restore(session.client_state, load)
        if lacking := self._states.lacking(pieces):
            warnings.warn(f"run '{self._run}' has no client state named {', '.join(lacking)}", stacklevel=4)
        if missed := self._ends[1:]:
            self._follow(missed)
        return pieces

    def _follow(self, missed: list[StepEnd | None]) -> None:
        """Of the steps that ended without this rank, which the loop cannot know of: their steps of LR schedulers."""
        changed = [end for end in missed if end is None or not end.skipped]
        for _ in changed:
            self._states.step_schedulers()
        of_them = "it ended" if len(missed) == 1 else "those steps ended"
        what = "and changed no weight"
        if changed:
            what = (
                f"and {len(changed)} changed weights. LR schedulers that are registered as objects were stepped as often; what "
                "else counts steps, a data loader say, is to be moved on by hand: Optimizer.ends_since_state"
            )
        warnings.warn(
            f"the client state of run '{self._run}' is {len(missed)} step{'s' * (len(missed) > 1)} older than the run: "
            f"{of_them} without this rank, {what}",
            stacklevel=5,
        )

    def _ends_since(self, session: Session, client: _core.Client) -> list[StepEnd | None]:
        last = session.last_result
        end = None if last is None else StepEnd(last.outcome, last.reason)
        if session.steps_since_state == 0:
            return [end]
        newest = session.step - 1
        return [*ends_between(client, self._run, newest - session.steps_since_state, newest - 1), end]

    # --- rewinds ----------------------------------------------------------------------------------------------------

    def take_rank(self, membership: Membership) -> Session:
        """After a rewind: the rank again, with the weights of the step that the run is back at. Returns the session since."""
        self._dead_backward = torch._C._current_graph_task_id()
        return membership.rejoin()

    def finish(self, rewound: RunRewound, session: Session, client: _core.Client, load: Load) -> None:
        """After take_rank(): puts the client state of that step back, and tells `rewound` all that was done."""
        self._asked = self._asked or bool(self._states)
        rewound.step = session.step - 1
        rewound.client_state = self._put_back(session, client, load)
        rewound.followed = True

    @property
    def in_dead_backward(self) -> bool:
        """Whether the caller is in the backward() that was under way when the run was rewound, perhaps on another
        thread: its gradients are those of a step that is gone."""
        backward = torch._C._current_graph_task_id()
        return backward != -1 and backward == self._dead_backward
