"""The `state` of an optimizer whose state is elsewhere."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any


class RemoteState(defaultdict[Any, Any]):
    """torch.optim.Optimizer.state: always empty. Optimizer.state_dict() asks the daemon.

    torch.distributed.checkpoint takes an empty one for state that is still to be made, and makes it by a step() of zero
    gradients with lr 0. Here that would be a step of the run: moments decay, every count goes up. So it is told that there
    is some; the state_dict() that it asks for next has state of every parameter, as it expects.
    """

    def __init__(self, run: str):
        super().__init__(dict)
        self._run = run
        self._asked = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemoteState, (self._run,))

    def __copy__(self) -> RemoteState:
        return RemoteState(self._run)

    copy = __copy__

    def __bool__(self) -> bool:
        if sys._getframe(1).f_code.co_name == "_init_optim_state":
            self._asked = True
            return True
        return len(self) > 0

    def pop_asked(self) -> bool:
        """Whether torch.distributed.checkpoint has asked since this was called last."""
        asked, self._asked = self._asked, False
        return asked
