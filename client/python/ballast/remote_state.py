"""The `state` of an optimizer whose state is elsewhere."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

from ballast.errors import Rejected


class RemoteState(defaultdict[Any, Any]):
    """torch.optim.Optimizer.state: always empty.

    torch.distributed.checkpoint takes an empty one for state that is still to be made, and makes it by a step() of zero
    gradients with lr 0. Here that would be a step of the run: moments decay, every count goes up. It looks whether this is
    empty before it changes anything, so here it is refused.
    """

    def __init__(self, run: str):
        super().__init__(dict)
        self._run = run

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemoteState, (self._run,))

    def __copy__(self) -> RemoteState:
        return RemoteState(self._run)

    copy = __copy__

    def __bool__(self) -> bool:
        if sys._getframe(1).f_code.co_name == "_init_optim_state":
            raise Rejected(
                f"torch.distributed.checkpoint cannot save or load the optimizer of run '{self._run}': its state is with the "
                "daemon, and get_optimizer_state_dict, set_optimizer_state_dict, get_state_dict and set_state_dict would "
                "make a real step of zero gradients there. Nothing was sent. Save the weights with "
                "get_model_state_dict(model), and lr and the other options with optimizer.state_dict(); the moments stay "
                "with the daemon, which writes no checkpoints yet",
                "UNIMPLEMENTED",
            )
        return len(self) > 0
