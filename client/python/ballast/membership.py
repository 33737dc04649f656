"""A torch optimizer as a member of a run: its parameters and options, joining the run, and leaving it."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ballast import _core
from ballast.client_state import ClientStates
from ballast.commit import step_rules
from ballast.errors import Rejected
from ballast.formats import FormatRules, Grouping
from ballast.guards import guard_clipping, release_clipping
from ballast.hooks import GradientHooks
from ballast.moments import Moments, moments_of
from ballast.options import (
    COMMON,
    WEIGHTS,
    Rule,
    RunOptions,
    check_group,
    check_names,
    check_scales,
    fix_peak,
    fixed_values,
)
from ballast.overlap import ForwardWaits
from ballast.parameters import ParameterList
from ballast.rank import rank_of
from ballast.remote_state import RemoteState
from ballast.result import StepResult
from ballast.session import Session
from ballast.spec import run_spec
from ballast.status import Status, readable
from ballast.wrappers import refuse_wrapped

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_open: weakref.WeakSet[Membership] = weakref.WeakSet()


class Membership(torch.optim.Optimizer):
    """What ballast.Optimizer is beside its steps."""

    def __init__(self, params: Iterable[Any], rule: Rule, values: Mapping[str, Any], **options: Unpack[RunOptions]):
        self._client: _core.Client | None = None  # first: close() looks at it, whatever goes wrong below
        self._session: Session | None = None
        self._overlap: ForwardWaits | None = None
        self._moments: dict[int, Moments] = {}  # to be uploaded with the weights
        check_names(options, RunOptions.__annotations__, type(self).__name__)
        self._rule = rule
        self._options = options
        self._rank = rank_of(options)
        self._step_rules = step_rules(options)
        self._weights = options.get("weights")
        if self._weights not in WEIGHTS:
            raise Rejected(f"weights={self._weights!r}: it must be 'client', 'server', 'match' or None")
        self._formats = FormatRules(options.get("formats"))
        self._grouping = Grouping([], [])
        self._lr_scales = dict(options.get("lr_scales") or {})
        self.loss_scale = options.get("loss_scale", 1.0)
        self._parameters = ParameterList()
        self._hooks = GradientHooks(self._receive)
        self._states = ClientStates()
        self._restored = False  # what the daemon kept of them was asked for
        self._lock = threading.RLock()
        self._step_values: list[dict[str, float]] = []  # as sent with the open step, by param_group
        self._fixed: list[dict[str, Any]] = []  # as the run was created with
        self._empty = False  # the last step() had no gradient
        self._dead_backward = -1  # the backward() that was under way when the run was rewound
        self._put_back_skipped = False  # the step that the client state put back was taken in
        common = {option: options.get(option, default) for option, default in COMMON.items()}
        super().__init__([params] if isinstance(params, dict) else params, {**values, **common})
        self.state = RemoteState(self._rank.run)
        self._client = _core.Client.connect(
            options.get("server") or os.environ.get("BALLAST_SERVER") or "localhost:7700",
            options.get("connect_timeout", 3.0),
            options.get("reconnect_timeout", 15.0),
        )
        _open.add(self)
        self._hooks.cover(entry.parameter for entry in self._parameters)
        if options.get("overlap_forward", False):
            self._overlap = ForwardWaits(self._before_forward)
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
        return self._rank.run

    def use_dynamic_loss_scale(self) -> None:
        """For ballast.GradScaler: loss_scale follows the results, and a step with a NaN or an infinity is skipped.
        Rejected once the run is joined, and with commit="release"."""
        if self._session is not None:
            raise Rejected(
                f"run '{self._rank.run}' is joined already: make the GradScaler before connect() and the first gradient",
                "FAILED_PRECONDITION",
            )
        self._step_rules = step_rules(self._options, dynamic_loss_scale=True)

    def _join(self) -> Session:
        client = self._connected()
        tensors = self._parameters.trainable()
        names = [entry.name for entry in self._parameters]
        self._formats.check_used(names)
        check_scales(self._lr_scales, names)
        refuse_wrapped(tensors)
        grouping = self._formats.group(tensors, self.param_groups)
        seed = self._options.get("seed", 0)
        spec = run_spec(
            self._rank, self._rule, tensors, self.param_groups, grouping, self._lr_scales, seed, self._step_rules
        )
        formats = [grouping.groups[group].formats for group in grouping.of_tensor]
        self._session = Session(client, self._rank, spec, tensors, formats, self._step_rules)
        self._grouping = grouping
        self._fixed = [fixed_values(group, self._rule) for group in self.param_groups]
        self._hooks.cover(tensor.parameter for tensor in tensors)
        return self._session

    def pull(self) -> int:
        """Overwrites every weight in place with the daemon's. Returns the last step that they are of."""
        with self._lock:
            session = self._joined()
            with self._following():
                session.await_all()
            session.weights.require()
            if session.step_open:
                raise Rejected(f"step {session.step} is open: call step() first, then pull", "FAILED_PRECONDITION")
            return session.weights.pull()

    def wait(self) -> None:
        """With overlap_forward: waits for the last step() and all its weights. Call it before weights are read in
        another way than by a module's forward: saved, compared, used in a loss."""
        with self._lock, self._following():
            if self._session is not None:
                self._session.await_all()

    @property
    def last_result(self) -> StepResult | None:
        """How the run's last step ended; after joining a run, the step before. None before the first. With
        overlap_forward, waits for it."""
        if self._session is None:
            return None
        if self._overlap is not None:
            self.wait()
        return self._session.last_result

    def run_status(self) -> Status:
        """What the daemon says of the run: a dict with the fields of ballast.v1.RunStatus, readable as attributes too."""
        status: Status = readable(self._connected().get_run(self._rank.run)["status"])
        return status

    def close(self) -> None:
        """Leaves the run: another trainer may take the rank at once, unless a step is open. The run lives on."""
        client, self._client = self._client, None
        if client is None:
            return
        _open.discard(self)
        self._hooks.remove()
        if self._overlap is not None:
            self._overlap.remove()
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
            raise Rejected(f"this optimizer of run '{self._rank.run}' is closed: make a new one", "FAILED_PRECONDITION")
        return self._client

    def _joined(self) -> Session:
        return self._session or self._join()

    def _pull_at_once(self) -> None:
        try:
            self._connected().get_run(self._rank.run)  # a run that does not exist is not to be created empty
            self.pull()
        except BaseException:
            self.close()
            raise

    def _following(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def _receive(self, parameter: Tensor) -> None:
        raise NotImplementedError

    def _before_forward(self, parameters: Iterable[Tensor]) -> None:
        raise NotImplementedError

    # --- torch's interface ------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, before the run is created or joined: that is, before the first gradient and connect()."""
        if self._session is not None:
            raise Rejected(
                f"run '{self._rank.run}' exists and its tensors are fixed: add parameter groups before the first "
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
            state["ballast"] = {"run": self._rank.run, "step": self.last_result.step}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes lr and the other options of param_groups over, as LR schedulers need it. Options that it lacks keep
        their values.

        Moments that it holds, as torch's optimizers keep them, go to the daemon with the weights, at the first gradient
        of a new run: training goes on where another optimizer stopped. Every rank gives the same; rank 0's are sent.
        Rejected once the run has its weights, and of state that the daemon has no place for (amsgrad's).
        """
        if self._session is not None and self._session.step_open:
            raise Rejected(f"step {self._session.step} is open: call step() first", "FAILED_PRECONDITION")
        if state_dict["state"] and self._session is not None and self._session.weights.settled:
            raise Rejected(
                f"this state_dict holds moments, and run '{self._rank.run}' has its own since its first gradient: load it "
                'before, or its options alone: {"state": {}, "param_groups": state_dict["param_groups"]}',
                "FAILED_PRECONDITION",
            )
        saved = list(state_dict["param_groups"])
        kept = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        if len(saved) == len(kept):  # else torch says what is wrong
            saved = [{**ours, **theirs} for ours, theirs in zip(kept, saved)]
        for group in saved:
            check_group(group, self._rule)
        moments = moments_of(state_dict, self.param_groups)
        super().load_state_dict({"state": {}, "param_groups": saved})
        self.state = RemoteState(self._rank.run)
        self._moments = moments

    def owns(self, parameter: Tensor) -> bool:
        """Whether this optimizer trains `parameter`."""
        return parameter in self._parameters

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        # torch's GradScaler asks for this first of all in step().
        raise Rejected(
            f"torch's GradScaler cannot be used with ballast.{type(self).__name__}: gradients leave during backward, before "
            "it can unscale them, so the step just made was made with scaled gradients. Use ballast.GradScaler(optimizer) in "
            "its place, or bfloat16 without one (enabled=False), and start from a new run"
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
