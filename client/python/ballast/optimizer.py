"""ballast.Optimizer: torch's optimizer interface to a run on a daemon."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ballast import _core
from ballast.errors import Rejected
from ballast.formats import FormatRules, Grouping
from ballast.guards import guard_clipping, release_clipping
from ballast.hooks import GradientHooks
from ballast.options import (
    COMMON,
    WEIGHTS,
    Rule,
    RunOptions,
    check_fixed,
    check_group,
    check_names,
    check_scales,
    check_unchanged,
    fix_peak,
    fixed_values,
    step_values,
)
from ballast.parameters import ParameterList
from ballast.result import StepResult, as_loss, warn_about
from ballast.session import Place, Session
from ballast.spec import run_spec
from ballast.status import Status, readable

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_open: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class Optimizer(torch.optim.Optimizer):
    """An optimizer whose master weights and moments live in a daemon, `ballastd`. Its rules are the classes made of it:
    ballast.AdamW, Adam, StableAdamW, SGD, Lion, CollageLight, CollagePlus.

    Any torch LR scheduler works on it. A step() reads lr, weight_decay, betas and momentum when the step's first gradient
    is made; a rule's other hyperparameters are fixed for the run.

    Args:
        params: parameters, (name, parameter) pairs, or dicts as torch's with "params" and any of "name", the rule's
            hyperparameters, "lr_scale", "wd_scale", "decouple_lr", "lr_peak" and the formats below. Dense, of dtype
            float32, bfloat16 or float16, contiguous. Frozen ones are skipped. A parameter without a name is "param.<i>",
            i its place among all parameters given, so that a restarted trainer that gives the same list finds the same
            tensors; named_parameters() is safer. A parameter under two names is sent once, under the first.
        server: "host:port" or "unix:path" of the daemon. Default: $BALLAST_SERVER, else "localhost:7700".
        run: the run's name on the daemon, [a-z0-9-], at most 63 characters. Default: $BALLAST_RUN. Needed.
        master, state: how the daemon stores weights ("split24", "split32", "fp32", "bf16", ...) and moments
            ("companded8", "bf16", "fp32", ...). None: as the two aliases say. Collage needs "mcf", its default.
        master_weight_bits: alias of master: 24 (split24, fp32 rounded to 24 bits) or 32 (split32, fp32 exactly).
        state_dtype: alias of state.
        rounding: "stochastic" or "nearest", of the compressed formats.
        serving: None, weights return in the parameter's dtype, or what they return in to save traffic: "fp8-e4m3",
            "int8-row", "int8-tensor". They are decoded to the parameter's dtype on arrival.
        gradient_dtype: None, gradients leave in the parameter's dtype, or what they are converted to: "fp8-e5m2", "bf16",
            "fp16", "fp32". What is too large for it becomes an infinity, and its block is not updated.
        formats: {pattern: {"master": ..., "state": ..., "rounding": ..., "serving": ..., "gradient_dtype": ...}} for
            parameters by name (fnmatch; the first pattern that matches), over what their group says, as
            {"*embed*": {"master": "fp32", "state": "fp32"}}. A pattern that matches nothing is refused.
        lr_scales: {name: factor of lr}, on top of the group's lr_scale; see ballast.umup_scales.
        decouple_lr, lr_peak: weight decay is multiplied by lr / lr_peak instead of lr, so that it does not depend on the
            scale of lr. For rules with decoupled decay; the peak is by default the lr that the group begins with.
        loss_scale: what the loss was multiplied by before backward(), to keep narrow gradients in range: the daemon
            divides by it. The attribute may be set between steps.
        weights: what the first gradient does about weights. "client": upload the trainer's, before the run's first step.
            "match": refuse to go on unless trainer and daemon have the same. "server": the constructor overwrites the
            trainer's weights in place with the daemon's. None: "client" for a run without a step, else "match".
        takeover: fence a live trainer that holds this rank, instead of being refused.
        seed: of the stochastic rounding. Same gradients, names and seed: same bits.
        rank, world: which of how many trainers this is. Each step is made of the mean of all ranks' gradients, and
            step() returns when every rank has ended it. Rank 0 uploads the weights; the others must begin with the same.
        lane: "auto": gradients and weights go through memory shared with the daemon where it is on the same host, else
            over "grpc". "shm": refuse to go on without shared memory.
        connect_timeout, reconnect_timeout: seconds to wait for the daemon in the constructor, and for a daemon that was
            lost during a step.

    Raises:
        Rejected: the parameters or options cannot be trained as given; the message names which, and the mend.
        Unavailable: no daemon answers at `server`.

    The constructor only looks whether the daemon answers. The run is created, or joined, at the first gradient or by
    connect(), so parameter groups may be added and weights loaded until then. Weights of tensors that have a gradient
    are overwritten while backward still runs, each after its own gradient is made; a second backward() through the same
    graph raises torch's "modified by an inplace operation".

    Parameters on another device than the CPU work, without overlap: each gradient is copied to host memory when it is
    made, and step() copies the weights back.

    Not supported, and refused where it can be seen: sharded parameters (FSDP, DTensor), torch's gradient clipping,
    GradScaler, accumulating over several backward(), copying or pickling the optimizer. A DistributedDataParallel module
    cannot be told by its parameters: do not wrap the model, its gradients would be reduced twice.

    Not thread-safe, except that hooks may run on autograd's threads. Of no use in a forked child; one that does not touch
    it, such as a DataLoader's worker, does no harm.
    """

    def __init__(self, params: Iterable[Any], rule: Rule, values: Mapping[str, Any], **options: Unpack[RunOptions]):
        self._client: _core.Client | None = None  # first: close() looks at it, whatever goes wrong below
        self._session: Session | None = None
        check_names(options, RunOptions.__annotations__, type(self).__name__)
        self._rule = rule
        self._place = Place.of(options)
        self._weights = options.get("weights")
        if self._weights not in WEIGHTS:
            raise Rejected(f"weights={self._weights!r}: it must be 'client', 'server', 'match' or None")
        self._seed = options.get("seed", 0)
        self._formats = FormatRules(options.get("formats"))
        self._grouping = Grouping([], [])
        self._lr_scales = dict(options.get("lr_scales") or {})
        self.loss_scale = options.get("loss_scale", 1.0)
        self._parameters = ParameterList()
        self._hooks = GradientHooks(self._receive)
        self._lock = threading.RLock()
        self._step_values: list[dict[str, float]] = []  # as sent with the open step, by param_group
        self._fixed: list[dict[str, Any]] = []  # as the run was created with
        self._skipped = False
        common = {option: options.get(option, default) for option, default in COMMON.items()}
        super().__init__([params] if isinstance(params, dict) else params, {**values, **common})
        self._client = _core.Client.connect(
            options.get("server") or os.environ.get("BALLAST_SERVER") or "localhost:7700",
            options.get("connect_timeout", 3.0),
            options.get("reconnect_timeout", 15.0),
        )
        _open.add(self)
        self._hooks.cover(entry.parameter for entry in self._parameters)
        guard_clipping(self)
        if self._weights == "server":
            self._pull_at_once()

    # --- the run ----------------------------------------------------------------------------------------------------

    @property
    def server(self) -> str:
        """The daemon's address."""
        return self._connected().server

    @property
    def run(self) -> str:
        """The run's name."""
        return self._place.run

    def connect(self) -> None:
        """Creates the run, or joins it, now instead of at the first gradient. Rejected if its description differs."""
        with self._lock:
            if self._session is not None:
                return
            client = self._connected()
            tensors = self._parameters.trainable()
            names = [entry.name for entry in self._parameters]
            self._formats.check_used(names)
            check_scales(self._lr_scales, names)
            grouping = self._formats.group(tensors, self.param_groups)
            spec = run_spec(self._place, self._rule, tensors, self.param_groups, grouping, self._lr_scales, self._seed)
            formats = [grouping.groups[group].formats for group in grouping.of_tensor]
            self._session = Session(client, self._place, spec, tensors, formats)
            self._grouping = grouping
            self._fixed = [fixed_values(group, self._rule) for group in self.param_groups]
            self._hooks.cover(tensor.parameter for tensor in tensors)

    def pull(self) -> int:
        """Overwrites every weight in place with the daemon's. Returns the last step that they are of."""
        with self._lock:
            session = self._joined()
            session.require_weights()
            return session.pull()

    def run_status(self) -> Status:
        """What the daemon says of the run: a dict with the fields of ballast.v1.RunStatus, readable as attributes too."""
        status: Status = readable(self._connected().get_run(self._place.run)["status"])
        return status

    def close(self) -> None:
        """Leaves the run: another trainer may take the rank at once, unless a step is open. The run lives on."""
        client, self._client = self._client, None
        if client is None:
            return
        _open.discard(self)
        self._hooks.remove()
        release_clipping(self)
        self._session = None
        client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_client", None) is not None:
            self.close()

    def _connected(self) -> _core.Client:
        if self._client is None:
            raise Rejected(
                f"this optimizer of run '{self._place.run}' is closed: make a new one", "FAILED_PRECONDITION"
            )
        return self._client

    def _joined(self) -> Session:
        self.connect()
        assert self._session is not None
        return self._session

    def _pull_at_once(self) -> None:
        try:
            self._connected().get_run(self._place.run)  # a run that does not exist is not to be created empty
            self.pull()
        except BaseException:
            self.close()
            raise

    # --- one step ---------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, *, loss: Tensor | float | None = None) -> Any:
        """Ends the step and returns when every new weight is in place.

        closure: evaluates the model, calls backward() and returns the loss, as for torch's optimizers.
        loss: told to the daemon, for its metrics; default: what the closure returned.
        Returns what the closure returned, else None. What became of the step is in `last_result`.

        Parameters without a gradient are left alone (no decay either). A .grad that was set by hand is sent now. Without
        any gradient nothing happens: no step is consumed, and `step_was_skipped` is True.

        Raises:
            Unavailable: the daemon was lost and not found again within reconnect_timeout; the message names it.
            RunFenced: another trainer took this rank over.
            Rejected: param_groups were changed since the step's first gradient, or a gradient cannot be sent.
            KeyboardInterrupt: while waiting; calling step() again waits on.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        with self._lock:
            self._connected()
            self._send_left_over()
            session = self._session
            self._skipped = session is None or not session.step_open
            if session is None or not session.step_open:
                return value
            check_unchanged(self._step_values, self.param_groups, self._rule, session.step)
            result = session.finish(lambda: as_loss(value if loss is None else loss))
            self._skipped = result.outcome not in ("APPLIED", "PARTIAL")
        warn_about(result, self._place.run)
        return value

    @property
    def last_result(self) -> StepResult | None:
        """How the run's last step ended; after joining a run, the step before. None before the first."""
        return self._session.last_result if self._session is not None else None

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step() changed no weight: it had no gradient, or ended SKIPPED or ABORTED."""
        return self._skipped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's: drops gradients set by hand. Rejected between backward() and step(), when gradients have left."""
        if self._session is not None and self._session.step_open:
            raise Rejected(
                f"zero_grad() after backward() cannot take back the gradients of step {self._session.step}, which have "
                "left: call step() first",
                "FAILED_PRECONDITION",
            )
        super().zero_grad(set_to_none)

    def _receive(self, parameter: Tensor) -> None:
        with self._lock:
            grad, parameter.grad = parameter.grad, None
            if grad is not None:
                self._send(parameter, grad)

    def _send_left_over(self) -> None:
        for entry in self._parameters:
            if entry.parameter.grad is not None and entry.parameter.requires_grad:
                self._receive(entry.parameter)

    def _send(self, parameter: Tensor, grad: Tensor) -> None:
        session = self._joined()
        session.check_push(parameter, self._parameters.name_of(parameter))
        if not session.step_open:
            session.settle(self._weights)
            check_fixed(self._fixed, self.param_groups)
            self._step_values = self._read_groups()
            scale = float(self.loss_scale)
            session.begin([self._step_values[group.origin] for group in self._grouping.groups], scale)
        session.push(parameter, grad)

    def _read_groups(self) -> list[dict[str, float]]:
        for group in self.param_groups:
            check_group(group, self._rule)
        return [step_values(group, self._rule) for group in self.param_groups]

    # --- torch's interface ------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, before the run is created or joined: that is, before the first gradient and connect()."""
        if self._session is not None:
            raise Rejected(
                f"run '{self._place.run}' exists and its tensors are fixed: add parameter groups before the first "
                "gradient, or make an optimizer with another run",
                "FAILED_PRECONDITION",
            )
        group = {**self.defaults, **param_group}
        given = group["params"]
        if isinstance(given, set):
            raise Rejected("'params' is a set, whose order changes between runs: give a list")
        check_group(group, self._rule)
        fix_peak(group)
        group["params"] = self._parameters.add([given] if isinstance(given, Tensor) else given, len(self.param_groups))
        if not group["params"]:
            raise Rejected(
                "a parameter group is empty: give at least one parameter (a generator can be read only once)"
            )
        self._check_unowned(group["params"])
        super().add_param_group(group)
        if self._client is not None:
            self._hooks.cover(group["params"])

    def _check_unowned(self, parameters: Iterable[Tensor]) -> None:
        for other in _open:
            for parameter in parameters:
                if other is not self and other.owns(parameter):
                    raise Rejected(
                        f"parameter '{other._parameters.name_of(parameter)}' is trained by another ballast optimizer, with "
                        f"run '{other.run}': close() that one first",
                        "FAILED_PRECONDITION",
                    )

    def state_dict(self) -> dict[str, Any]:
        """{"state": {}, "param_groups": [...]}: the moments stay with the daemon. After the first step, "ballast" tells
        the run and the last step."""
        state = super().state_dict()
        if self.last_result is not None:
            state["ballast"] = {"run": self._place.run, "step": self.last_result.step}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes lr and the other options of param_groups over, as LR schedulers need it. Options that it lacks keep
        their values. Rejected if it holds moments: they cannot be sent to the daemon."""
        if self._session is not None and self._session.step_open:
            raise Rejected(f"step {self._session.step} is open: call step() first", "FAILED_PRECONDITION")
        if state_dict["state"]:
            raise Rejected(
                "this state_dict holds optimizer state, and moments cannot be sent to the daemon: to go on with its "
                'options alone, load {"state": {}, "param_groups": state_dict["param_groups"]}'
            )
        saved = list(state_dict["param_groups"])
        kept = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        if len(saved) == len(kept):  # else torch says what is wrong
            saved = [{**ours, **theirs} for ours, theirs in zip(kept, saved)]
        for group in saved:
            check_group(group, self._rule)
        super().load_state_dict({"state": {}, "param_groups": saved})

    def owns(self, parameter: Tensor) -> bool:
        """Whether this optimizer trains `parameter`."""
        return parameter in self._parameters

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        # torch's GradScaler asks for this first of all in step().
        raise Rejected(
            f"GradScaler cannot be used with ballast.{type(self).__name__}: gradients leave during backward, before it can unscale them, "
            "so the step just made was made with scaled gradients. Use bfloat16, or float32 parameters under autocast, "
            "without a GradScaler (enabled=False), and start from a new run"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise Rejected(
            f"ballast.{type(self).__name__} cannot be copied or pickled: it is a connection to a daemon. Save its state_dict(), or make "
            "another optimizer"
        )


@atexit.register
def _close_all() -> None:
    """Gives the ranks back of what a program leaves open."""
    for optimizer in list(_open):
        optimizer.close()
