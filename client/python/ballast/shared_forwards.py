"""Forwards of a model that is sharded, in which every rank reads the weights that the others hold."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

from torch import nn

from ballast.errors import Rejected
from ballast.membership import Membership
from ballast.parameters import ParameterList
from ballast.result import StepResult
from ballast.session import Session
from ballast.sharded_weights import ShardedWeights
from ballast.starting_state import StartingState


class SharedForwards:
    """Sees to it that all ranks are at the same state of the run before the first forward of each step. One thread at a time,
    but for due(), which a fork may call too."""

    def __init__(self, parameters: ParameterList, membership: Membership, starting_state: StartingState):
        self._parameters = parameters
        self._membership = membership
        self._starting_state = starting_state
        self._ours: WeakSet[nn.Module] = WeakSet()  # that have parameters of the run
        self._agreed: tuple[int, StepResult | None] | None = None  # the last time: generation, and the step before

    @property
    def to_settle(self) -> bool:
        """Whether the weights or the state here and there are to be made the same."""
        session = self._membership.session
        return session is None or not session.weights.settled or self._starting_state.saved is not None

    def due(self, module: nn.Module) -> bool:
        """Whether the ranks are to agree before the module's forward, as far as can be told before the run is joined. Asks
        nobody."""
        session = self._membership.session
        if session is None or self.to_settle:
            return True
        if not isinstance(session.weights, ShardedWeights):
            return False
        generation, before = self._agreed or (None, None)
        return (generation != session.weights.generation or before is not session.last_result) and self.read(module)

    def read(self, module: nn.Module) -> bool:
        """Whether the module's forward reads parameters of the run."""
        if self.to_settle:
            let_go(module)
        if module not in self._ours and any(parameter in self._parameters for parameter in module.parameters()):
            self._ours.add(module)
        return module in self._ours

    def prepare(self, session: Session, module: nn.Module, check: Callable[[], None]) -> None:
        """Before such a forward: the weights of all ranks are those of one state of the run. Collective: all ranks call it for
        the same module.

        RunRewound where the run is at another state and this rank has not heard of it yet; the others wait until it has
        followed, and comes to its next forward. Rejected, on all, if some have loaded a state_dict() and others not, one has
        changed weights, or `check` raises it on one.
        """
        if isinstance(session.weights, ShardedWeights):
            checks = [check] if self.to_settle else [session.refuse_changed, check]
            session.weights.agree(self._starting_state.saved is not None, _refusal(checks))
        if self._agreed is None or self._agreed[0] != session.weights.generation:
            let_go(module)  # gathered before, perhaps of two states
        self._starting_state.settle(session)
        self._agreed = session.weights.generation, session.last_result


def _refusal(checks: Iterable[Callable[[], None]]) -> Rejected | None:
    """Why a step cannot begin here; the backward() would find it out in the middle of FSDP's."""
    try:
        for check in checks:
            check()
    except Rejected as refused:
        return refused
    return None


def let_go(module: nn.Module) -> None:
    """Has the next forward gather weights anew, also where FSDP has kept those of an earlier one, as it does of the outermost
    module until a backward(), or has begun to gather them, as unshard() does."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return
    for part in module.modules():
        if isinstance(part, kind):
            sharded: Any = part
            if _gathering(sharded):
                sharded.unshard()  # waits for that
            sharded.reshard()


def _gathering(module: Any) -> bool:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one in earlier torch
    return any(getattr(group, "_all_gather_result", None) is not None for group in groups)
