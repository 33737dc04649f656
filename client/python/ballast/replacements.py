"""Parameters that are put in place of an optimizer's: by fully_shard, and by frameworks in param_groups."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ballast.errors import Rejected
from ballast.hooks import TorchHooks
from ballast.membership import Membership
from ballast.parameters import ParameterList
from ballast.starting_state import StartingState

Groups = list[dict[str, Any]]


class Replacements:
    """Puts a parameter in the place of another, everywhere that the optimizer has it, before the run is joined.

    `groups` are the optimizer's param_groups as they are at the call. One thread at a time.
    """

    def __init__(
        self,
        run: str,
        parameters: ParameterList,
        membership: Membership,
        starting_state: StartingState,
        hooks: TorchHooks,
    ):
        self._run = run
        self._parameters = parameters
        self._membership = membership
        self._starting_state = starting_state
        self._hooks = hooks

    def refuse_late(self, parameter: Tensor) -> None:
        """Rejected if fully_shard replaces a parameter of the optimizer's too late."""
        name, saved = self._parameters.name_of(parameter), self._starting_state.saved
        if self._membership.session is not None or saved is not None:
            raise Rejected(
                f"fully_shard() replaces parameter '{name}' after "
                + ("load_state_dict()" if saved is not None else f"run '{self._run}' was joined")
                + ": call it before the first gradient, connect(), weights='server' and load_state_dict(), best before the "
                "optimizer is made",
                "FAILED_PRECONDITION",
            )

    def adopt(self, groups: Groups) -> None:
        """What has been put into param_groups, as Accelerate does, in place of what was given."""
        for old, new in self._parameters.replaced_in(groups):
            self.refuse_late(old)
            self.put(old, new, groups)

    def put(self, old: Tensor, new: Tensor, groups: Groups) -> None:
        self._parameters.replace(old, new)
        self._hooks.replace(old, new)
        for group in groups:
            for place, parameter in enumerate(group["params"]):
                if parameter is old:
                    group["params"][place] = new
