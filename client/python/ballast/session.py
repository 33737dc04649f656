"""A trainer's place in a run: attaching to it, agreeing on the weights, and its steps."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ballast import _core
from ballast.binding import Binding
from ballast.errors import Rejected, Unavailable
from ballast.parameters import NamedParameter
from ballast.result import StepResult

# A lost predecessor's lease is 10 s unless the daemon is configured otherwise.
_LEASE_WAIT_S = 12.0
# Between two looks for Ctrl-C.
_WAIT_SLICE_S = 0.1
# How long rank 0 may take from creating the run to its first gradient, and how often the others look.
_UPLOAD_WAIT_S = 300.0
_UPLOAD_POLL_S = 0.05
# Of the largest weight: more than any format's rounding, less than another seed's or step's weights differ by.
_STORED_ERROR = 0.1


_RUN_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def run_id(run: str | None) -> str:
    """The run's name as given, else $BALLAST_RUN. Rejected if there is none, or it cannot be one."""
    run = run or os.environ.get("BALLAST_RUN")
    if not run:
        raise Rejected("no run is named: give run='my-run' (or set BALLAST_RUN); the same name goes on with that run")
    if not _RUN_ID.fullmatch(run):
        raise Rejected(f"run={run!r}: at most 63 of a-z, 0-9 and '-', with a letter or digit at both ends")
    return run


@dataclass(frozen=True)
class Place:
    """Which rank of which run this process is, and how it gets to the daemon."""

    run: str
    rank: int = 0
    world: int = 1
    takeover: bool = False
    lane: str = "auto"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Place:
        lane = options.get("lane", "auto")
        if lane not in ("auto", "grpc", "shm"):
            raise Rejected(f"lane={lane!r}: it must be 'auto', 'grpc' or 'shm'")
        run = run_id(options.get("run"))
        return cls(run, options.get("rank", 0), options.get("world", 1), options.get("takeover", False), lane)


class Session:
    """One attachment, from Attach to close. One thread at a time."""

    def __init__(
        self,
        client: _core.Client,
        place: Place,
        spec: str,
        tensors: Sequence[NamedParameter],
        formats: Sequence[Mapping[str, Any]],
    ):
        self._client = client
        self._place = place
        self._names = [tensor.name for tensor in tensors]
        self._bindings = [Binding(index, *pair) for index, pair in enumerate(zip(tensors, formats))]
        self._by_id = {id(binding.parameter): binding for binding in self._bindings}
        client.create_run(spec)
        attached = client.attach(place.run, place.rank, place.world, place.takeover, _LEASE_WAIT_S, place.lane)
        self._digests: list[int] = attached["digests"]
        self._weights_loaded: bool = attached["weights_loaded"]
        self._settled = False
        self._unlike: set[int] = set()  # tensors whose weights the daemon serves otherwise than they are here
        self._pushed: set[int] = set()  # in the open step
        self._pending: _core.PendingStep | None = None
        self.step_open = False
        self.last_result: StepResult | None = None
        if attached["last_result"] is not None:
            self.last_result = StepResult.from_fields(attached["last_result"], self._names)

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._by_id

    @property
    def step(self) -> int:
        """The number of the step that is open, or comes next."""
        return self._client.step

    # --- weights ----------------------------------------------------------------------------------------------------

    def settle(self, policy: str | None) -> None:
        """Makes the weights here and there the same, before the first gradient; nothing when that was done.

        policy: "client" uploads, "match" and "server" compare; None uploads to a run that made no step, else compares.
        """
        if self._settled:
            return
        fresh = not self._weights_loaded or self.step == 1
        if policy is None and fresh and self._place.rank > 0:
            self._await_weights()
            self._compare_stored()
        elif policy == "client" or (policy is None and fresh):
            self._upload()
        else:
            self._compare()
        for binding in self._bindings:
            self._bind(binding)
        self._settled = True

    def _upload(self) -> None:
        if self.step > 1:
            raise Rejected(
                f"run '{self._place.run}' is at step {self.step}: weights can be uploaded before its first step only; "
                "take the daemon's with weights='server', or give another run",
                "FAILED_PRECONDITION",
            )
        ours = [binding.digest() for binding in self._bindings]
        served = self._client.load_weights(
            [(b.index, b.format, b.landing.data_ptr(), b.landing.nbytes) for b in self._bindings]
        )
        self._unlike = {index for index, (one, other) in enumerate(zip(ours, served)) if one != other}
        self._weights_loaded, self._digests = True, served

    def _await_weights(self) -> None:
        """Until rank 0 has uploaded."""
        deadline = time.monotonic() + _UPLOAD_WAIT_S
        while not self._weights_loaded:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"rank 0 of run '{self._place.run}' has not uploaded its weights for {_UPLOAD_WAIT_S:.0f} s: it does "
                    "so at its first gradient. Start it, or look at what it waits for",
                    "DEADLINE_EXCEEDED",
                )
            self._weights_loaded = self._client.get_run(self._place.run)["status"]["weights_loaded"]
            time.sleep(_UPLOAD_POLL_S)

    def _compare(self) -> None:
        self.require_weights()
        for binding, served in zip(self._bindings, self._digests):
            ours, theirs = binding.digest(), self._digest_there(binding) if binding.served_narrower else served
            if ours != theirs:
                raise Rejected(
                    f"the weights of '{binding.name}' differ from those of run '{self._place.run}' at step "
                    f"{self.step - 1}: digest {ours:016x} here, {theirs:016x} there. Take the daemon's with "
                    "weights='server', delete the run (ballastctl), or give another run",
                    "FAILED_PRECONDITION",
                )

    def _compare_stored(self) -> None:
        """With what rank 0 uploaded, as the daemon stores and serves it: equal but for that rounding."""
        for binding in self._bindings:
            binding.load()
            ours, theirs = binding.landing, self._pulled(binding)
            if not torch.equal(ours, theirs):
                self._unlike.add(binding.index)
            if (ours.float() - theirs.float()).abs().max() > _STORED_ERROR * ours.float().abs().max():
                raise Rejected(
                    f"the weights of '{binding.name}' differ from those that rank 0 uploaded to run "
                    f"'{self._place.run}': make the model from the same seed or checkpoint on every rank",
                    "FAILED_PRECONDITION",
                )

    def _pulled(self, binding: Binding) -> Tensor:
        """The daemon's weights, decoded to the parameter's dtype."""
        decoded = torch.empty_like(binding.landing)
        self._client.pull(self._place.run, [(binding.index, decoded.data_ptr(), decoded.nbytes)])
        return decoded

    def _digest_there(self, binding: Binding) -> int:
        decoded = self._pulled(binding)
        return _core.digest(decoded.data_ptr(), decoded.nbytes)

    def require_weights(self) -> None:
        """Rejected if the daemon has no weights of this run yet."""
        if not self._weights_loaded:
            raise Rejected(
                f"run '{self._place.run}' has no weights yet: upload them with weights='client'", "FAILED_PRECONDITION"
            )

    def pull(self) -> int:
        """Overwrites every weight in place with the daemon's; returns the last step that they are of."""
        if self.step_open:
            raise Rejected(f"step {self.step} is open: call step() first, then pull", "FAILED_PRECONDITION")
        return self._pull(self._bindings)

    def _pull(self, bindings: Iterable[Binding]) -> int:
        wanted = list(bindings)
        for binding in wanted:
            binding.follow()
        places = [(b.index, b.landing.data_ptr(), b.landing.nbytes) for b in wanted]
        steps = self._client.pull(self._place.run, places)
        for binding in wanted:
            binding.store()
            torch.autograd.graph.increment_version(binding.parameter)
        self._unlike.difference_update(binding.index for binding in wanted)
        return max(steps.values(), default=0)

    # --- one step ---------------------------------------------------------------------------------------------------

    def begin(self, groups: list[dict[str, float]], loss_scale: float) -> None:
        self._client.begin_step(groups, loss_scale)
        self.step_open = True

    def check_push(self, parameter: Tensor, name: str) -> None:
        """Rejected, before anything is sent, if `parameter` is not to have a gradient now."""
        binding = self._by_id.get(id(parameter))
        if binding is None:
            raise Rejected(
                f"parameter '{name}' has a gradient but is not part of run '{self._place.run}': it was frozen when the "
                "run was created. Unfreeze before the first gradient, or make an optimizer with another run",
                "FAILED_PRECONDITION",
            )
        if self._pending is not None:
            self._client.check_status()
            raise Rejected(
                f"parameter '{name}' got a gradient while step {self.step} is not finished: call step() again to wait "
                "for its weights",
                "FAILED_PRECONDITION",
            )
        if binding.index in self._pushed:
            raise Rejected(
                f"parameter '{name}' got a second gradient in step {self.step}: its first has left already and "
                "gradients are not accumulated. Call step() after every backward(), or sum the micro-batches' losses "
                "before one backward()",
                "FAILED_PRECONDITION",
            )

    def push(self, parameter: Tensor, grad: Tensor) -> None:
        """Sends a gradient. From here on the parameter may be overwritten at any time until the step's end."""
        binding = self._by_id[id(parameter)]
        gradient = binding.gradient(grad)
        if binding.follow():
            self._bind(binding)
        self._client.push(binding.index, gradient.data_ptr(), gradient.nbytes)
        self._pushed.add(binding.index)
        torch.autograd.graph.increment_version(parameter)

    def _bind(self, binding: Binding) -> None:
        self._client.bind_weights(binding.index, binding.landing.data_ptr(), binding.landing.nbytes)

    def finish(self, loss: Callable[[], float | None]) -> StepResult:
        """Ends the step and waits for its weights. After an interrupted wait, waits on."""
        if self._pending is None:
            self._pending = self._client.end_step(loss())
        fields = None
        while fields is None:
            fields = self._pending.wait(_WAIT_SLICE_S)
        result = StepResult.from_fields(fields, self._names)
        self._take_weights(fields)
        self._pending = None
        self._pushed.clear()
        self.step_open = False
        self.last_result = result
        return result

    def _take_weights(self, fields: Mapping[str, Any]) -> None:
        updated = set(fields["tensors_received"])
        for index in updated:
            self._bindings[index].store()
        self._unlike -= updated
        if self._unlike:
            self._pull([self._bindings[index] for index in sorted(self._unlike)])
