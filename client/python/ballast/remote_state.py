"""The `state` of an optimizer whose state is elsewhere."""

from __future__ import annotations

import enum
import sys
from collections import defaultdict
from typing import Any


class Asked(enum.Enum):
    """Why torch.distributed.checkpoint wants a state_dict()."""

    TO_SAVE = enum.auto()
    TO_LOAD = enum.auto()  # another one in its place, for which only its names and shapes count


class RemoteState(defaultdict[Any, Any]):
    """torch.optim.Optimizer.state: always empty. Optimizer.state_dict() asks the daemon.

    torch.distributed.checkpoint takes an empty one for state that is still to be made, and makes it by a step() of zero
    gradients with lr 0. Here that would be a step of the run: moments decay, every count goes up. So it is told that there
    is some; the state_dict() that it asks for next has state of every parameter, as it expects.
    """

    def __init__(self, run: str):
        super().__init__(dict)
        self._run = run
        self._asked: Asked | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemoteState, (self._run,))

    def __copy__(self) -> RemoteState:
        return RemoteState(self._run)

    copy = __copy__

    def __bool__(self) -> bool:
        if sys._getframe(1).f_code.co_name == "_init_optim_state":
            loading = sys._getframe(2).f_code.co_name == "_load_optim_state_dict"
            self._asked = Asked.TO_LOAD if loading or self._asked is Asked.TO_LOAD else Asked.TO_SAVE
            return True
        return len(self) > 0

    def pop_asked(self) -> Asked | None:
        """What torch.distributed.checkpoint has asked for since this was called last; None: nothing."""
        asked, self._asked = self._asked, None
        return asked
