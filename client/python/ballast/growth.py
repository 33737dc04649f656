"""A run that is given another description in the middle of a training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ballast.errors import Rejected
from ballast.hooks import TorchHooks
from ballast.hyperparameters import Hyperparameters
from ballast.membership import Membership
from ballast.moments import Moments
from ballast.parameters import ParameterList
from ballast.session import Session
from ballast.settings import Description, RunSettings
from ballast.spec import follow_of

Groups = Sequence[Mapping[str, Any]]


class Growth:
    """Joins the run, and amends it where parameters were added or unfrozen since, or options that it has in its description
    were changed.

    `groups` are the optimizer's param_groups as they are at the call. One thread at a time.
    """

    def __init__(
        self,
        settings: RunSettings,
        parameters: ParameterList,
        membership: Membership,
        hyperparameters: Hyperparameters,
        hooks: TorchHooks,
    ):
        self._settings = settings
        self._parameters = parameters
        self._membership = membership
        self._hyperparameters = hyperparameters
        self._hooks = hooks

    def cover(self, parameters: Iterable[Tensor]) -> None:
        """From now on their gradients are sent, and what reads them is told of."""
        self._hooks.cover(parameters)
        if self._parameters.sharded:
            self._hooks.cover_forwards()

    def add(self, group: Mapping[str, Any]) -> None:
        """The optimizer has a group more."""
        self._hyperparameters.add(group)

    def join(self, groups: Groups, overlap: bool) -> Session:
        """Creates the run, or joins it. Rejected if the daemon has it with another description, but for the order of tensors:
        those that were added to a run come last in it, wherever a trainer that is started later gives them; and for the
        option follow, which the run then has as it is given."""
        description = self._settings.describe(self._parameters, groups)
        if description.sharded and overlap:
            raise Rejected(
                "overlap_forward=True with sharded parameters: FSDP gathers weights before the modules that have them are called, "
                "and would gather some that are on their way. Leave overlap_forward out"
            )
        try:
            session = self._membership.join(description)
        except Rejected as error:
            session = self._join_as_it_is(description, groups, error)
            description = session.description
        self._hyperparameters.fix(groups, description.grouping)
        self.cover(tensor.parameter for tensor in description.tensors)
        return session

    def _join_as_it_is(self, description: Description, groups: Groups, refusal: Rejected) -> Session:
        """After join() was refused: joins the run with its tensors in its order, and gives it the option follow, unless rank 0
        has by now. Rejected, as before, if neither was why."""
        spec = self._membership.spec_there(refusal)
        if spec is None:
            raise refusal
        names, there = [tensor.name for tensor in description.tensors], [tensor["name"] for tensor in spec["tensors"]]
        reordered = names != there and sorted(names) == sorted(there)
        if reordered:
            description = self._settings.describe(self._parameters, groups, there)
        wanted, follow = follow_of(description.spec), spec["follow"]
        if wanted is not None and wanted != {name: value for name, value in (follow or {}).items() if value}:
            return self._membership.join_to_follow(description, follow)
        return self._membership.join(description)

    def amended(self, session: Session, groups: Groups, moments: Mapping[int, Moments]) -> Session:
        """Between two steps: the session since, in which the run is as parameters and groups say; the same where it was so.
        moments: by id(parameter), that go to the run with what is added.

        Rejected, on every rank that makes the change and before anything is sent, if the run cannot be so; on rank 0 alone, if
        the daemon has no memory for it, or a value does not fit the format that it is to be stored in.
        """
        change = self._change(session, groups)
        if change is None:
            return session
        self.refuse_sharded(session, groups)
        description = self._settings.describe_again(session.description, self._parameters, groups)
        if description.spec != session.description.spec:
            session = self._membership.amend(description, moments)
            session.complete()
        self._hyperparameters.fix(groups, description.grouping)
        self.cover(tensor.parameter for tensor in description.tensors)
        return session

    def refuse_unsettled(self, session: Session, groups: Groups) -> None:
        """Before the first step of a rank among several: Rejected if it would amend the run, with whose weights others may
        still compare theirs."""
        change = self._change(session, groups)
        if change is not None and self._settings.rank.world > 1:
            raise Rejected(
                f"{change} after connect() and before the first step of rank {self._settings.rank.number} of "
                f"{self._settings.rank.world}: take it back, or make it on every rank before connect(), or after that step",
                "FAILED_PRECONDITION",
            )

    def refuse_sharded(self, session: Session, groups: Groups) -> None:
        """Before a step: Rejected if the run is to be amended, and its parameters are sharded."""
        change = self._change(session, groups) if session.description.sharded and not session.begun else None
        if change is not None:
            raise _sharded(session, change)

    def refuse_group(self) -> None:
        """Rejected if no group can be added now: a step is open, or the run's parameters are sharded."""
        session = self._membership.session
        if session is not None and session.begun:
            raise Rejected(f"step {session.step} is open: call step() before add_param_group()", "FAILED_PRECONDITION")
        if session is not None and session.description.sharded:
            raise _sharded(session, "add_param_group()")

    def _change(self, session: Session, groups: Groups) -> str | None:
        """What the run is to have otherwise, in words."""
        changed = self._hyperparameters.changed(groups)
        for entry in self._parameters:
            if entry.parameter.requires_grad and entry.parameter not in session:
                return f"parameter '{entry.name}' was added or unfrozen"
        return changed


def _sharded(session: Session, change: str) -> Rejected:
    """What is added would have to be put together by all ranks within a backward(), where FSDP's own calls are under way."""
    return Rejected(
        f"{change} in the middle of run '{session.run}', whose parameters are sharded: such a run trains what it began with. "
        "Take it back on every rank; or make the change before the first step of an optimizer with another run, and give "
        "that one this one's state_dict()",
        "FAILED_PRECONDITION",
    )
