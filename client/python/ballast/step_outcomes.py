"""What became of a trainer's steps."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ballast.errors import RunRewound
from ballast.hooks import TorchHooks
from ballast.hyperparameters import Hyperparameters
from ballast.membership import Membership
from ballast.rejoin import Rejoin
from ballast.result import StepResult
from ballast.sent_gradients import SentGradients
from ballast.session import Session


class StepOutcomes:
    """Of Steps: the end of the last one, which is waited for, and that a rewind or Ctrl-C may come instead."""

    lock: threading.RLock
    hooks: TorchHooks
    _sent: SentGradients
    _rewound: RunRewound | None
    _membership: Membership
    _rejoin: Rejoin
    _hyperparameters: Hyperparameters
    _overlap: bool
    _empty: bool
    _left: bool
    _untold: StepResult | None

    if TYPE_CHECKING:

        def follow(self, rewound: RunRewound) -> None: ...

    @contextmanager
    def following(self) -> Iterator[None]:
        """Within it the run may turn out to have been rewound. RunRewound is raised when this trainer has followed. After Ctrl-C,
        which may leave an ended step unheard of, forwards are seen, of which the next waits for it."""
        try:
            yield
        except RunRewound as rewound:
            self._follow_once(rewound)
            raise
        except KeyboardInterrupt:
            self.hooks.cover_forwards()
            raise

    def _follow_once(self, rewound: RunRewound) -> None:
        if not rewound.followed:
            self.follow(rewound)

    def _tell_rewound(self) -> None:
        rewound, self._rewound = self._rewound, None
        if rewound is not None:
            raise rewound

    @property
    def interrupted(self) -> bool:
        """Whether a step was ended, and Ctrl-C came before its result; not one that overlap_forward waits for later."""
        session = self._membership.session
        return session is not None and session.ended and not (self._overlap and self._left)

    def finish_interrupted(self) -> None:
        """Before something of the next step: waits for such a one and its weights, as step() called again would."""
        with self.lock, self.following():
            session = self._membership.session
            if session is None or not self.interrupted:
                return
            self._sent.clear()
            self._left = True  # the next step() tells of it
            session.finish()
            session.finished_unheard = True
            self._note_left(session)

    def wait(self) -> None:
        """Waits for the step that was ended last, and all its weights."""
        with self.lock, self.following():
            if self._membership.session is not None:
                self._membership.session.await_all()
                self._membership.session.complete()

    def take_untold(self) -> StepResult | None:
        """The result of the step that the trainer has gone on without, when it is in: once."""
        if self._membership.session is not None:
            self._note_left(self._membership.session)
        untold, self._untold = self._untold, None
        return untold

    def _note_left(self, session: Session) -> None:
        """Before another step may end, as by zero_grad()."""
        if self._left and not session.ended:
            self._left, self._untold = False, session.last_result

    def finish_ended(self) -> None:
        """Before the trainer leaves: wait(), if it has gone on without the step that was ended last. Warns where that fails."""
        session = self._membership.session
        if not self._overlap or session is None or not session.ended:
            return
        number = session.step
        try:
            self.wait()
        except RuntimeError as error:
            warnings.warn(
                f"run '{session.run}': step {number} was ended, and not all its weights are here: {error}",
                stacklevel=3,
            )

    @property
    def last_result(self) -> StepResult | None:
        """The result of the run's last step, which is waited for; None before the first, and before the run is joined."""
        session = self._membership.session
        if session is None:
            return self._membership.last_result
        if self._overlap:
            self.wait()
        return session.last_result

    @property
    def begun_one(self) -> bool:
        """Whether a step was begun, since the run was rewound if it was."""
        return self._hyperparameters.sent

    @property
    def skipped(self) -> bool:
        """As Optimizer.step_was_skipped."""
        if not self.begun_one:
            return self._empty or self._rejoin.skipped
        result = self.last_result
        return self._empty or (result is not None and not result)
