"""ballast.Optimizer: torch's optimizer interface to a run on a daemon."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ballast.averages import Averaging
from ballast.disagreements import Disagreements
from ballast.durability import Durable
from ballast.errors import Rejected, RunRewound
from ballast.frameworks import Prepared
from ballast.in_step import InStep
from ballast.joined import Joined
from ballast.membership import Membership
from ballast.micro_batches import Accumulation
from ballast.open_optimizers import OpenOptimizer, check_unowned
from ballast.optimizer_state import OptimizerState
from ballast.options import COMMON, RunOptions, check_names, complete_group
from ballast.parameters import ParameterList
from ballast.rejoin import Rejoin
from ballast.result import StepResult, as_loss, told_loss
from ballast.rule import Rule
from ballast.settings import RunSettings
from ballast.starting_state import StartingState
from ballast.status import Status, readable
from ballast.step_end import StepEnd
from ballast.step_warnings import StepWarnings
from ballast.steps import Steps
from ballast.uncopyable import Uncopyable

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class Optimizer(Prepared, InStep, Durable, Averaging, OptimizerState, Uncopyable, torch.optim.Optimizer):
    """An optimizer whose master weights and moments live in a daemon, `ballastd`. Its rules are the classes made of it:
    ballast.AdamW, Adam, StableAdamW, SGD, Lion, Muon, CollageLight, CollagePlus.

    Any torch LR scheduler works on it. A step() reads lr, weight_decay, betas and momentum when the step's first gradient
    is made, or, of a staged run, in step(). A rule's other hyperparameters may be changed between two steps, parameters
    unfrozen and groups added, by every rank alike: the next first gradient amends the run, whose snapshots go then.

    Args:
        params: parameters, (name, parameter) pairs, or dicts as torch's with "params" and any of "name", the rule's
            hyperparameters, "lr_scale", "wd_scale", "decouple_lr", "lr_peak" and the formats. Dense, of dtype float32,
            bfloat16 or float16, contiguous. Frozen ones are skipped until they are unfrozen. A parameter without a
            name is "param.<i>", i its place among all parameters given, so that a restarted trainer that gives the same
            list finds the same tensors; named_parameters() is safer. One under two names is sent once, under the first.
        options: those of ballast.RunOptions, whose help says what each does.

    Raises:
        Rejected: the parameters or options cannot be trained as given; the message names which, and the fix.
        Unavailable: no daemon answers at `server`.

    The constructor only looks whether the daemon answers. The run is created, or joined, at the first gradient or by
    connect(), so weights may be loaded until then. Weights of tensors that have a gradient are overwritten while backward
    still runs, each after its own gradient is made; a second backward() through the same graph raises torch's "modified
    by an inplace operation". With gradient_accumulation_steps that is so in the last backward() of a step alone. Parameters
    on a GPU are sent by way of host memory, which the trainer does not wait for; on other devices it does.

    Modules may be wrapped in DistributedDataParallel, before or after. While the optimizer is open they do not reduce
    gradients; the daemon takes the mean over the ranks. Or they are sharded by fully_shard (FSDP2): each rank sends its part
    of FSDP's mean, and the first forward with gradients joins the run.

    Between backward() and step() `.grad` is a SentGradient, without values. A staged run can be clipped as torch's. Of
    signs of a loss spike Python warns once a kind; `spike_counts` has how many. Not supported, and refused: FSDP1,
    tensor parallelism, torch's GradScaler (ballast.GradScaler is it), copying or pickling the optimizer.

    Not thread-safe, except that hooks may run on autograd's threads. Of no use in a forked child; one that does not touch
    it, such as a DataLoader's worker, does no harm. A child that is forked while one is open cannot make another.
    """

    def __init__(self, params: Iterable[Any], rule: Rule, values: Mapping[str, Any], **options: Unpack[RunOptions]):
        check_names(options, RunOptions.__annotations__, type(self).__name__)
        self._settings = RunSettings(rule, options)
        self._parameters = ParameterList()
        self._membership = Membership(self._settings.rank)
        self._starting_state = StartingState(options.get("weights"))
        self._rejoin = Rejoin(self.run)
        self._disagreements = Disagreements(self.run)
        self._warnings = StepWarnings(self.run, options.get("spikes"))
        self.spike_counts = self._warnings.counts
        self._steps = Steps(
            weakref.ref(self),
            self._settings,
            self._parameters,
            self._membership,
            self._starting_state,
            self._rejoin,
            bool(options.get("overlap_forward", False)),
            options.get("loss_scale", 1.0),
        )
        common = {option: options.get(option, default) for option, default in COMMON.items()}
        super().__init__([params] if isinstance(params, dict) else params, {**values, **common})
        self._keep_state(self._settings, self._membership, self._steps, self._starting_state)
        self._membership.connect(options)
        client, hooks = self._membership.connected(), self._steps.hooks
        self._open = OpenOptimizer(self, self._settings.rank, self._parameters, client, hooks)
        self._steps.growth.cover(entry.parameter for entry in self._parameters)
        if self._starting_state.from_daemon:
            self._pull_at_once()

    # --- one step ---------------------------------------------------------------------------------------------------

    @_disable_dynamo  # a compiled step calls it, outside of its graphs
    def step(self, closure: Callable[[], Any] | None = None, *, loss: Tensor | float | None = None) -> Any:
        """Ends the step and returns when every new weight is in place; with overlap_forward, at once.

        closure: evaluates the model, calls backward() and returns the loss, as for torch's optimizers.
        loss: told to the daemon, for its metrics; one number; default: what the closure returned, if that is one.
        Returns what the closure returned, else None. What became of the step is in `last_result`.

        Nothing happens within Accelerate's accumulate(), but in the step's last micro-batch. Parameters without a gradient
        are left alone (no decay either). A .grad that was set by hand is sent now. Without any gradient nothing happens: no
        step is consumed, and `step_was_skipped` is True.

        Raises:
            Unavailable: the daemon was lost and not found again within reconnect_timeout, or before the run gave this
                trainer up; the message says which.
            RunFenced: another trainer took this rank over.
            RunRewound: the run was taken back to an earlier step, and this trainer with it.
            Rejected: param_groups were changed since the first gradient of a step that is not staged, micro-batches are
                missing, a gradient cannot be sent, the loss is not one number, or ten steps in a row came to nothing because the
                ranks gave different values.
            KeyboardInterrupt: while waiting; calling step() again waits on, and so do zero_grad() and the next forward.
        """
        value = None
        if self.synchronized is False:
            return None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        self._tell(self._steps.take_untold())
        with self._steps.lock, self._steps.following():
            result = self._steps.end(as_loss(value) if loss is None else told_loss(loss))
        self._tell(result)
        return value

    def _tell(self, result: StepResult | None) -> None:
        if result is not None:
            self._warnings.tell(result)
            self._disagreements.hear(result)

    @contextmanager
    def accumulate(self, final: bool = False) -> Iterator[Accumulation]:
        """One micro-batch of a step, with one backward() in it; step() follows the one that is final.

            for i, batch in enumerate(batches):
                with optimizer.accumulate(final=(i + 1) % n == 0) as micro:
                    loss = model(batch) / n
                    loss.backward()
                    micro.report(loss)  # optional, for the daemon's metrics
                if (i + 1) % n == 0:
                    optimizer.step()

        Without it a step of a release run has exactly gradient_accumulation_steps backward(); with it, at most that many.
        Every rank has the same number. Gradients are summed. Weights are overwritten in the final backward() alone.
        no_sync() of DistributedDataParallel and Accelerate's accumulate() tell as much. A staged step needs none of it: the
        backward() before step() was its last.
        """
        steps = self._steps
        steps.finish_interrupted()
        with steps.lock, steps.following():
            session = steps.joined()
            session.micro_batches.begin(final, session.step, session.begun)
        failed = True
        try:
            yield Accumulation(self)
            failed = False
        finally:
            with steps.lock, steps.following():
                steps.leave(session, failed)

    def report_loss(self, loss: Tensor | float) -> None:
        """Tells the daemon the loss of the micro-batch whose backward() was last, a number or a tensor with one element,
        for its metrics. The step's is the mean over micro-batches and ranks. step(loss=...) tells the last one's."""
        with self._steps.lock:
            self._steps.joined().micro_batches.loss = told_loss(loss)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step() changed no weight: it had no gradient, or ended SKIPPED or ABORTED. LR schedulers are
        stepped unless it is True. When client state was put back, of the step() that it was taken in."""
        return self._steps.skipped

    @property
    def last_result(self) -> StepResult | None:
        """How the run's last step ended; after joining a run, the step before. None before the first. With
        overlap_forward, waits for it. After close() it stays."""
        return self._steps.last_result

    def wait(self) -> None:
        """With overlap_forward: waits for the last step() and its weights. For who saves, compares or otherwise reads them."""
        self._steps.wait()
        self._tell(self._steps.take_untold())

    # --- the run ----------------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """As the option of that name; may be set between steps, and is rejected within one."""
        return float(self._steps.loss_scale)

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        with self._steps.lock:
            self._steps.loss_scale.set(scale, self._membership.session)

    @property
    def server(self) -> str:
        """The daemon's address."""
        return self._membership.connected().server

    @property
    def run(self) -> str:
        """The run's name."""
        return self._settings.rank.run

    def run_status(self) -> Status:
        """What the daemon says of the run: a dict with the fields of ballast.v1.RunStatus, readable as attributes too."""
        status: Status = readable(self._membership.connected().get_run(self.run)["status"])
        return status

    def connect(self) -> Joined:
        """Creates the run, or joins it, now instead of at the first gradient. Rejected if its description differs.

        Where client state is registered, that of an earlier process is put back, the first time; then the parameters get
        the run's weights, too, unless the option `weights` is given. What is returned is True then, and says at which step
        the run is, and from which checkpoint the daemon has read it back, if it was started anew.
        """
        with self._steps.lock:
            session = self._steps.joined()
            client = self._membership.connected()
            if (pieces := self._rejoin.put_back_once(session, client, self._steps.load_kept)) is not None:
                self._starting_state.take(session)
            return Joined(session.step - 1, pieces, self._membership.restored)

    @property
    def ends_since_state(self) -> tuple[StepEnd | None, ...]:
        """How the step ended that the client state was taken in that was put back last, and after it those that ended without
        this rank, whose process was lost in them: `outcome`, `reason` and `skipped` of each. None: the daemon does not know
        it any more. Empty: none was put back."""
        return tuple(self._rejoin.ends)

    def register_client_state(self, name: str, get: Any, set: Callable[[Any], object] | None = None) -> None:
        """State of the trainer that the daemon keeps with each step, at most 1 MiB in all, for the process that takes
        this rank after this one: of the data loader, the LR scheduler, random numbers, a GradScaler.

            optimizer.register_client_state("scheduler", scheduler)
            optimizer.register_client_state("rng", torch.get_rng_state, torch.set_rng_state)
            if optimizer.connect():  # an earlier process's was put back: weights, lr and other options of param_groups too
                if not optimizer.step_was_skipped:  # as this loop does after step(), in which the state was taken
                    scheduler.step()

        Steps that ended without this rank, after the one that its state was taken in, are made up for: an LR scheduler that is
        registered as an object, but ReduceLROnPlateau, is stepped for each that changed weights. What else counts steps is to
        be moved on by hand: `ends_since_state` has them.

        get: an object with state_dict() and load_state_dict(), or a function that returns the state: containers, numbers,
            strings, bytes and tensors. Called in step().
        set: the function that puts it back. Called in connect(), so register first.
        """
        with self._steps.lock:
            self._rejoin.register(name, get, set, late=self._steps.begun_one)

    def use_dynamic_loss_scale(self) -> None:
        """For ballast.GradScaler: loss_scale follows the results, and a step with a NaN or an infinity is skipped.
        Rejected once the run is joined, but where weights="server" has joined one that was begun so, and with
        commit="release"."""
        there = self._settings.step_rules.dynamic_loss_scale and not self._steps.begun_one
        if self._membership.session is not None and not there:
            raise Rejected(
                f"run '{self.run}' is joined already: make the GradScaler before connect() and the first gradient; "
                "where weights='server' has joined it, the run was begun without one: leave it out",
                "FAILED_PRECONDITION",
            )
        self._settings.scale_loss_dynamically()
        self._steps.loss_scale.expect()

    def pull(self) -> int:
        """Overwrites every weight in place with the daemon's (some, when it raises). Returns the last step that they are of."""
        with self._steps.lock:
            session = self._steps.joined()
            self._steps.wait()
            session.weights.require()
            if session.step_open:
                raise Rejected(f"step {session.step} is open: call step() first, then pull", "FAILED_PRECONDITION")
            return session.weights.pull()

    def _pull_at_once(self) -> None:
        try:
            if (spec := self._membership.spec_to_go_on()) is not None:
                self._settings.go_on_as(spec)
            self.pull()
        except BaseException:
            self.close()
            raise

    def rewind(self, steps: int | None = None, *, to: int | None = None) -> int:
        """Takes the run back to a snapshot, and this trainer with it: its weights, and what is registered with
        register_client_state, are those of that step. Returns it; the next step is the one after. The other ranks' calls
        raise RunRewound. The run needs snapshots (option `snapshots`).

        steps: so many steps before the last one, or the nearest snapshot before that. to: this very step. Neither: the
            latest snapshot. A step that is open is discarded.

        Raises Rejected, naming the steps kept, if there is no such snapshot; and where the run is rewound, but the disk
        would bring the undone steps back at a restart of the daemon: the message says so, and what is wrong with the disk.
        This trainer's next call raises RunRewound then.
        """
        if steps is not None and to is not None:
            raise Rejected(f"rewind(steps={steps}, to={to}): give one of them")
        for name, value in (("steps", steps), ("to", to)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise Rejected(f"rewind({name}={value!r}): it must be a whole number of at least 0")
        rewound = RunRewound("")
        with self._steps.lock:
            self._steps.joined()
            self._membership.connected().rewind(self.run, to, steps, "trainer")
            self._steps.follow(rewound)
        return rewound.step

    def close(self) -> None:
        """Leaves the run: another trainer may take the rank at once, unless a step is open. The run lives on. With
        overlap_forward, waits for the last step() and its weights before; warns if they do not come."""
        self._steps.finish_ended()
        self._tell(self._steps.take_untold())
        self.close_at_once()

    def close_at_once(self) -> None:
        """close(), but with overlap_forward the weights of the last step() may not be here."""
        self._membership.leave()
        self._open.close()
        self._warnings.end()
        self._membership.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close() if kind is None else self.close_at_once()

    # --- torch's interface ------------------------------------------------------------------------------------------

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Between backward() and step() it drops the step's gradients, of all ranks: the step ends SKIPPED,
        "discarded". Rejected then if the run is not staged: they may be applied already. After set_to_none=False a step has
        gradients of zeros of what had others before and gets none, which decay and momentum move on, as torch's do."""
        if self.synchronized is False:  # within Accelerate's accumulate(), more is to come
            return
        with self._steps.lock:
            self._steps.zero(set_to_none)
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float = math.inf) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_ of this optimizer's parameters, in a staged run: step() clips the gradient to
        max_norm, and to max_grad_norm where that is less. Returns the norm over all tensors before, of the mean over all
        ranks, unscaled: float32, without dimensions. The step gets no more gradients. Rejected if the run is not staged.
        """
        return torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], max_norm)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. In the middle of a training the run has the group from the next step's first gradient on; state and
        steps of all else go on. Every rank adds the same before the same step, and rank 0's weights are sent. Rejected
        between backward() and step(), and where the parameters are sharded."""
        self._steps.growth.refuse_group()
        group = complete_group(param_group, self.defaults, self._settings.rule)
        given = group["params"]
        given = [given] if isinstance(given, Tensor) else given
        check = partial(check_unowned, ours=self._parameters)
        group["params"] = self._parameters.add(given, len(self.param_groups), check)
        super().add_param_group(group)
        self._steps.growth.add(group)
        if self._membership.open:
            self._steps.growth.cover(group["params"])

    def owns(self, parameter: Tensor) -> bool:
        """Whether this optimizer trains `parameter`."""
        return parameter in self._parameters
