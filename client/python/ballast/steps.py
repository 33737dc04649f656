"""A trainer's steps in its run: what gradients, step() and the next forward do."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ballast.averages import Averages
from ballast.clipping import refuse_partial, refuse_released
from ballast.errors import Rejected, RunRewound
from ballast.gradient_staging import refuse_capture
from ballast.growth import Growth
from ballast.hooks import TorchHooks
from ballast.hyperparameters import Hyperparameters
from ballast.loss_scale import LossScale
from ballast.membership import Membership
from ballast.micro_batches import Announced
from ballast.optimized import Optimized
from ballast.parameters import ParameterList
from ballast.rank import Rank
from ballast.rejoin import Rejoin
from ballast.replacements import Replacements
from ballast.result import StepResult
from ballast.sent_gradients import SentGradients
from ballast.session import Session
from ballast.settings import RunSettings
from ballast.shared_forwards import SharedForwards
from ballast.sharding_watch import refuse_in_backward, refuse_orphans
from ballast.starting_state import StartingState
from ballast.step_outcomes import StepOutcomes
from ballast.step_warnings import Unpaired


class Steps(StepOutcomes):
    """A step is begun by its first gradient, and the first step of all joins the run. Hooks bring the gradients, and wait
    for weights before a forward.

    lock: whoever uses this, or a part that it was given, holds it; hooks and wait() take it themselves.

    optimizer: weak, so that it ends with the last name that it has. A hook holds it while it runs; in all else the
        optimizer itself is the caller.
    overlap: the next forward waits for weights, instead of end().
    loss_scale: that each step is begun with; set between steps.
    """

    def __init__(
        self,
        optimizer: ref[Optimized],
        settings: RunSettings,
        parameters: ParameterList,
        membership: Membership,
        starting_state: StartingState,
        rejoin: Rejoin,
        overlap: bool,
        loss_scale: Any,
    ):
        self.lock = threading.RLock()
        self.loss_scale = LossScale(loss_scale)
        self._optimizer = optimizer
        self._settings = settings
        self._parameters = parameters
        self._membership = membership
        self._starting_state = starting_state
        self._rejoin = rejoin
        self._overlap = overlap
        self._hyperparameters = Hyperparameters(settings.rule)
        self.hooks = TorchHooks(self.receive, self.before_read, self.before_forward, overlap, self)
        self._forwards = SharedForwards(parameters, membership, starting_state)
        self._replacements = Replacements(settings.rank.run, parameters, membership, starting_state, self.hooks)
        self.averages = Averages(settings.step_rules.averages)
        self.growth = Growth(settings, parameters, membership, self._hyperparameters, self.hooks)
        self._announced = Announced()
        self._sent = SentGradients()
        self._empty = False  # the last end() had no gradient
        self._left = False  # the last end() has left a step without its result
        self._untold = None
        self._rewound: RunRewound | None = None  # in a backward(), and not raised yet
        self._looked = False  # whether the parameters were replaced unseen
        self._unpaired = Unpaired(settings.rank)

    # --- hooks ------------------------------------------------------------------------------------------------------

    def receive(self, parameter: Tensor) -> None:
        """The parameter's gradient was made: sends it, and leaves a SentGradient in .grad."""
        optimizer = self._optimizer()  # held until this is done
        if optimizer is None:
            return
        try:
            self._receive(parameter)
        except RunRewound as rewound:
            if not self._parameters.sharded or torch._C._current_graph_task_id() == -1:
                raise
            self._rewound = rewound  # FSDP's ranks wait for one another, and hear of it at different gradients

    def _receive(self, parameter: Tensor) -> None:
        with self.lock:
            grad, on_top = self._sent.take(parameter)
            if grad is None or self._rejoin.in_dead_backward or self._rewound is not None:
                return
            try:
                self._take_in(parameter, grad, on_top)
            except RunRewound as rewound:  # as following(), which costs each gradient more
                self._follow_once(rewound)
                raise

    def _take_in(self, parameter: Tensor, grad: Tensor, on_top: bool) -> None:
        session = self.joined()
        try:
            if session.begun and not on_top and self._sent.taken_back_before(parameter, session):
                self._discard(session)
            self._send(session, parameter, grad)
        finally:
            self._sent.mark_again(parameter)

    def _send(self, session: Session, parameter: Tensor, grad: Tensor) -> None:
        refuse_capture(grad)
        self.averages.refuse_within("a gradient was made")
        synchronized = self._optimized.synchronized
        if synchronized is not None:
            self._announced.hear(synchronized)
        self._starting_state.refuse_within(session)
        name = self._parameters.name_of(parameter)
        if parameter not in session and not session.begun:  # it is new: the run is to have it first
            session.await_last(name)
            session = self._settled(session)
        session.admit(parameter, name, self._announced.final)
        if not session.begun:
            session = self.begin(session)
        raised = session.push(parameter, grad)
        self._sent.mark(parameter, grad, name, session.staged)
        if raised is not None:
            raise raised

    def before_read(self, parameters: Iterable[Tensor], forward: bool = True) -> None:
        """These parameters are about to be read: waits for weights that are on their way. Rejected if a forward reads them, and
        a backward() under way has changed them already."""
        optimizer = self._optimizer()  # held until this is done
        session = self._membership.session
        if optimizer is None or session is None or not (session.step_open or session.overlaps):
            return
        ours = [parameter for parameter in parameters if parameter in session]
        if ours:  # else this may be a fork, that is not to touch the lock
            with self.lock, self.following():
                if session.begun and forward:
                    session.refuse_overwritten(ours)
                session.await_weights(ours)

    # --- sharded modules --------------------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module) -> None:
        """A module makes a graph: where its parameters are sharded, what the run is to take of them is gathered now, for no
        rank can, alone or in backward(), and all ranks are at one state of it."""
        optimizer = self._optimizer()  # held until this is done
        if optimizer is None or not self._membership.open:
            return
        if self.interrupted and self._forwards.read(module):
            self.finish_interrupted()
        if not self._forwards.due(module):
            return
        with self.lock, self.following():
            groups = optimizer.param_groups
            if self._membership.session is None:
                self._replacements.adopt(groups)
            if self._parameters.sharded and self._forwards.read(module):
                session = self.joined()
                session.await_all()
                self._forwards.prepare(session, module, lambda: self.growth.refuse_sharded(session, groups))

    def before_sharding(self, parameter: Tensor) -> None:
        """Rejected if fully_shard replaces a parameter too late."""
        if self._optimizer() is not None and parameter in self._parameters:
            self._replacements.refuse_late(parameter)

    def sharded(self, parameter: Tensor, made: Tensor) -> None:
        optimizer = self._optimizer()  # held until this is done
        if optimizer is None:
            return
        if parameter in self._parameters:
            self._replacements.put(parameter, made, optimizer.param_groups)
        self.hooks.cover_forwards()

    @property
    def _optimized(self) -> Optimized:
        optimizer = self._optimizer()
        assert optimizer is not None  # who calls holds it
        return optimizer

    # --- modules in DDP ---------------------------------------------------------------------------------------------

    @property
    def rank(self) -> Rank:
        return self._settings.rank

    def trains(self, parameter: Tensor) -> bool:
        return parameter in self._parameters

    def hear(self, synchronized: bool) -> None:
        """A module in DDP begins a forward that makes a graph, under no_sync() or not."""
        self._announced.hear(synchronized)

    # --- a step -----------------------------------------------------------------------------------------------------

    def joined(self) -> Session:
        """The session, of a run that is created or joined now if it was not."""
        session = self._membership.session
        if session is not None:
            return session
        self._membership.connected()
        groups = self._optimized.param_groups
        self._replacements.adopt(groups)
        self._parameters.refuse_edited(groups)
        return self.growth.join(groups, self._overlap)

    def begin(self, session: Session) -> Session:
        """Begins the next step, with or without a gradient. Returns the session that it is of."""
        session = self._settled(session)
        self._note_left(session)
        session.refuse_changed()
        session.begin(self._hyperparameters.begin(self._optimized.param_groups), float(self.loss_scale))
        return session

    def _settled(self, session: Session) -> Session:
        """Before a step: the weights, the state and the description of the run here and there made the same. Returns the
        session since."""
        self._rejoin.require_asked()
        self._parameters.refuse_edited(self._optimized.param_groups)
        self.loss_scale.check(session.step)
        self._settings.check_scaler()
        session.await_all()
        session.complete()
        if self._forwards.to_settle and self._parameters.sharded:  # which looks at every parameter
            refuse_in_backward()
        saved, first = self._starting_state.saved, not session.weights.settled
        groups = self._optimized.param_groups
        if first:  # a run is amended when it has weights
            self.growth.refuse_unsettled(session, groups)
            self._starting_state.settle(session)
            return self.growth.amended(session, groups, self._starting_state.waiting)
        session = self.growth.amended(session, groups, self._starting_state.waiting if saved is None else {})
        self._starting_state.settle(session)  # state that was loaded is of what was added, too
        return session

    def leave(self, session: Session, failed: bool) -> None:
        """At the end of an announced micro-batch, by an exception where it failed. Nothing if zero_grad() has dropped its step,
        or a rewind. session: that it was entered in."""
        if not session.micro_batches.inside:
            return
        if not failed:
            self._receive_rest(last=session.micro_batches.last)
            session = self._membership.session or session  # another one, where the run was amended
            if not session.begun:  # it had no gradient, and counts nevertheless
                session = self.begin(session)
        session.micro_batches.leave(failed)

    def end(self, loss: float | None) -> StepResult | None:
        """Sends the gradients that were set by hand, ends the step and waits for its result, which is returned. None
        without a step that is open, and with overlap, where the step goes on."""
        self._membership.connected()
        self._tell_rewound()
        self._receive_rest()
        session = self._membership.session
        if session is not None:
            self._parameters.refuse_edited(self._optimized.param_groups)
        begun = session is not None and session.begun
        waits_on = session is not None and (session.ended or session.finished_unheard)
        self._empty = not begun and (self._overlap or not waits_on)
        if not begun:  # what Ctrl-C has left of one that was ended
            self._sent.clear()
        if session is None or not session.step_open:
            if session is not None:
                session.finished_unheard = False
            self._check_in_place()
            self._unpaired.tell()
            return None
        if begun and self._sent.taken_back(session):
            self._discard(session)
            return None
        if begun:
            self._starting_state.refuse_within(session)
            self._sent.refuse_added(session.step)
            groups = self._hyperparameters.end(self._optimized.param_groups, session.step, session.staged)
            self._announced.final = None
            session.end(loss, self._rejoin.collect(self._optimized.options_dict), groups)
            self._sent.clear()
            self.loss_scale.spend()
            if self._overlap:
                session.leave_waiting()
                self._left = True
                return None
        self._left = True  # until it is heard of
        result = session.finish()
        self._left = False
        return result

    def _receive_rest(self, last: bool = True) -> None:
        """Sends the gradients that no hook brought: those set by hand, or made before the hooks knew of a parameter that was
        unfrozen; in the last micro-batch the zeros of zero_grad(set_to_none=False), too."""
        for parameter in self._parameters.with_gradient(self._sent.is_marked):
            self.receive(parameter)
        zeros, session = self._sent.zeros(), self._membership.session
        if not last or not zeros or session is None or (session.ended and not self._overlap):
            return  # step() was interrupted, and waits on
        session.await_all()
        for parameter in zeros:
            parameter.grad = torch.zeros_like(parameter)
            self.receive(parameter)

    def zero(self, set_to_none: bool) -> None:
        """zero_grad(): drops the open step, as drop(), and notes what torch would have in `.grad` from now on."""
        self.finish_interrupted()
        self.drop()
        self._sent.zero(set_to_none)

    def _check_in_place(self) -> None:
        """In a step() without any gradient: Rejected if there can be none, for FSDP has other parameters. Looks once."""
        if self._looked or self.begun_one:
            return
        self._looked = True
        refuse_orphans(entry.parameter for entry in self._parameters)

    def drop(self) -> None:
        """Drops the gradients of the open step, if there is one: it is SKIPPED. Rejected if the run is not staged."""
        session = self._membership.session
        if session is None or not session.begun:
            return
        if not session.staged:
            raise Rejected(
                f"zero_grad() after backward() cannot take back the gradients of step {session.step}, which have left, and may "
                f"be applied already: first {session.micro_batches.way_on}; or give commit='staged', which can drop the gradients "
                "of a step",
                "FAILED_PRECONDITION",
            )
        with self.following():
            self._discard(session)

    def _discard(self, session: Session) -> None:
        self._announced.final = None
        session.discard()
        self._sent.clear()
        session.finish()

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> float | None:
        """Has the open step clipped to max_norm; inf: not at all. Returns the norm of its whole gradient, as the daemon has it,
        which waits for the other ranks. None: no gradient was made.

        Rejected if the run is not staged, and if a parameter that has a gradient is not among those given.
        """
        with self.lock, self.following():
            self._tell_rewound()
            self._receive_rest()
            session = self._membership.session
            if session is None or len(self._sent) == 0:
                return None
            refuse_released(session.step, session.staged)
            if self._sent.taken_back(session):
                self._discard(session)
                return None
            refuse_partial(session.step, self._sent.missing_from(parameters))
            return session.clip(max_norm)

    # --- rewinds ----------------------------------------------------------------------------------------------------

    def follow(self, rewound: RunRewound) -> None:
        """Takes this trainer to the step that the run is back at, and tells `rewound` of it."""
        before = self.joined()
        session = self._rejoin.take_rank(self._membership)
        if session is not before:
            self._hyperparameters.unfix()
        self._membership.note_restored()
        self._parameters.drop_gradients()
        self._sent.clear()
        self._left = False
        self._hyperparameters.forget()
        self._rejoin.finish(rewound, session, self._membership.connected(), self.load_kept)

    def load_kept(self, options: dict[str, Any]) -> None:
        """As load_state_dict() of what client state keeps of the optimizer. Groups that were added since have theirs."""
        groups = options["param_groups"]
        added = self._optimized.options_dict()["param_groups"][len(groups) :]
        self._optimized.load_unhooked({**options, "param_groups": [*groups, *added]})
