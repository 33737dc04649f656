"""The `state` of an optimizer whose state is elsewhere."""

from __future__ import annotations

import enum
import sys
from collections import defaultdict
from typing import Any, NoReturn

from ballast.errors import Rejected


class Asked(enum.Enum):
    """Why torch.distributed.checkpoint wants a state_dict()."""

    TO_SAVE = enum.auto()
    TO_LOAD = enum.auto()  # another one in its place, for which only its names and shapes count


class RemoteState(defaultdict[Any, Any]):
    """torch.optim.Optimizer.state: always empty. Optimizer.state_dict() asks the daemon. Rejected is who changes it, or asks it
    for a parameter's: nothing would come of it.

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

    def _refuse(self, call: str) -> NoReturn:
        raise Rejected(
            f"{call}: an optimizer's state is in its run, '{self._run}', and .state is always empty. state_dict() reads it; "
            'load_state_dict() of one whose "state" was changed puts that in its place, and begins anew what was taken out. To '
            "begin all of it anew, make another optimizer with a run of its own",
            "FAILED_PRECONDITION",
        )

    def __missing__(self, key: Any) -> NoReturn:
        self._refuse("state[parameter]")

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        self._refuse("setting state[parameter]")

    def __delitem__(self, key: Any) -> NoReturn:
        self._refuse("deleting state[parameter]")

    def clear(self) -> NoReturn:
        self._refuse("state.clear()")

    def pop(self, *_: Any) -> NoReturn:
        self._refuse("state.pop()")

    def popitem(self) -> NoReturn:
        self._refuse("state.popitem()")

    def setdefault(self, *_: Any) -> NoReturn:
        self._refuse("state.setdefault()")

    def update(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("state.update()")

    def replaced(self) -> NoReturn:
        """Somebody gave the optimizer another one."""
        self._refuse("setting .state")

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
