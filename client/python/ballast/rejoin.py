"""A member of a run that comes back to it: in the place of an earlier process, and when the run is rewound."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ballast.errors import Rejected, RunRewound
from ballast.membership import Membership
from ballast.session import Session


class Returning(Membership):
    """What ballast.Optimizer is for who comes back."""

    def connect(self) -> bool:
        """Creates the run, or joins it, now instead of at the first gradient. Rejected if its description differs.

        Returns whether registered client state of an earlier process was put back: the loop then goes on after the
        step() in which it was taken.
        """
        with self._lock:
            session = self._joined()
            if not self._states or self._restored:
                return False
            self._restored = True
            return self._restore(session)

    def register_client_state(self, name: str, get: Any, set: Callable[[Any], object] | None = None) -> None:
        """State of the trainer that the daemon keeps with each step, at most 1 MiB in all, for the process that takes
        this rank after this one: of the data loader, the LR scheduler, random numbers, a GradScaler.

            optimizer.register_client_state("scheduler", scheduler)
            optimizer.register_client_state("rng", torch.get_rng_state, torch.set_rng_state)
            if optimizer.connect():  # an earlier process's was put back, lr and other options of param_groups too
                if not optimizer.step_was_skipped:  # as this loop does after step(), in which the state was taken
                    scheduler.step()

        get: an object with state_dict() and load_state_dict(), or a function that returns the state: containers, numbers,
            strings, bytes and tensors. Called in step().
        set: the function that puts it back. Called in connect(), so register first.
        """
        with self._lock:
            if self._restored or self._step_values:
                raise Rejected(
                    f"client state '{name}': what run '{self._rank.run}' has kept was put back already, or a step was "
                    "made without it; register before connect() and the first gradient",
                    "FAILED_PRECONDITION",
                )
            self._states.add(name, get, set)

    def _restore(self, session: Session) -> bool:
        if not session.client_state:
            return False
        self._put_back(session)
        return True

    def _put_back(self, session: Session) -> dict[str, Any] | None:
        if not session.client_state or not self._states:
            return None
        last = session.last_result
        self._put_back_skipped = session.steps_since_state == 0 and last is not None and last.skipped
        pieces = self._states.restore(session.client_state, self.load_state_dict)
        if lacking := self._states.lacking(pieces):
            warnings.warn(f"run '{self._rank.run}' has no client state named {', '.join(lacking)}", stacklevel=3)
        if session.steps_since_state:
            warnings.warn(
                f"the client state of run '{self._rank.run}' is {session.steps_since_state} steps older than its weights: "
                "those steps ended without this rank",
                stacklevel=3,
            )
        return pieces

    def rewind(self, steps: int | None = None, *, to: int | None = None) -> int:
        """Takes the run back to a snapshot, and this trainer with it: its weights, and what is registered with
        register_client_state, are those of that step. Returns it; the next step is the one after. The other ranks' calls
        raise RunRewound. The run needs snapshots (option `snapshots`).

        steps: so many steps before the last one, or the nearest snapshot before that. to: this very step. Neither: the
            latest snapshot. A step that is open is discarded.

        Raises Rejected, naming the steps kept, if there is no such snapshot.
        """
        if steps is not None and to is not None:
            raise Rejected(f"rewind(steps={steps}, to={to}): give one of them")
        for name, value in (("steps", steps), ("to", to)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise Rejected(f"rewind({name}={value!r}): it must be a whole number of at least 0")
        with self._lock:
            self._joined()
            self._connected().rewind(self._rank.run, to, steps, "trainer")
            return self._follow(RunRewound("")).step

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Within it the run may turn out to have been rewound. RunRewound is raised when this trainer has followed."""
        try:
            yield
        except RunRewound as rewound:
            if not rewound.followed:
                self._follow(rewound)
            raise

    def _follow(self, rewound: RunRewound) -> RunRewound:
        session = self._joined()
        self._dead_backward = torch._C._current_graph_task_id()
        session.rejoin()
        for entry in self._parameters:
            entry.parameter.grad = None
        self._step_values = []
        self._restored = self._restored or bool(self._states)
        rewound.step = session.step - 1
        rewound.client_state = self._put_back(session)
        rewound.followed = True
        return rewound
