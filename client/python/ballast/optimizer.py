"""ballast.Optimizer: torch's optimizer interface to a run on a daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ballast.errors import Rejected
from ballast.micro_batches import Accumulation
from ballast.options import check_fixed, check_group, check_option, check_unchanged, step_values
from ballast.rejoin import Returning
from ballast.result import StepResult, as_loss, warn_about
from ballast.session import Session


class Optimizer(Returning):
    """An optimizer whose master weights and moments live in a daemon, `ballastd`. Its rules are the classes made of it:
    ballast.AdamW, Adam, StableAdamW, SGD, Lion, CollageLight, CollagePlus.

    Any torch LR scheduler works on it. A step() reads lr, weight_decay, betas and momentum when the step's first gradient
    is made, or, of a staged run, in step(); a rule's other hyperparameters are fixed for the run.

    Args:
        params: parameters, (name, parameter) pairs, or dicts as torch's with "params" and any of "name", the rule's
            hyperparameters, "lr_scale", "wd_scale", "decouple_lr", "lr_peak" and the formats. Dense, of dtype float32,
            bfloat16 or float16, contiguous. Frozen ones are skipped. A parameter without a name is "param.<i>", i its
            place among all parameters given, so that a restarted trainer that gives the same list finds the same
            tensors; named_parameters() is safer. A parameter under two names is sent once, under the first.
        options: those of ballast.RunOptions, whose help says what each does.

    Raises:
        Rejected: the parameters or options cannot be trained as given; the message names which, and the fix.
        Unavailable: no daemon answers at `server`.

    The constructor only looks whether the daemon answers. The run is created, or joined, at the first gradient or by
    connect(), so parameter groups may be added and weights loaded until then. Weights of tensors that have a gradient
    are overwritten while backward still runs, each after its own gradient is made; a second backward() through the same
    graph raises torch's "modified by an inplace operation". With gradient_accumulation_steps that is so in the last
    backward() of a step alone.

    Parameters on another device than the CPU work, without overlap: each gradient is copied to host memory when it is
    made, and step() copies the weights back.

    Not supported, and refused: sharded parameters (FSDP, DTensor), modules wrapped in DistributedDataParallel, torch's
    gradient clipping (max_grad_norm does it) and GradScaler (ballast.GradScaler is it), copying or pickling the optimizer.

    Not thread-safe, except that hooks may run on autograd's threads. Of no use in a forked child; one that does not touch
    it, such as a DataLoader's worker, does no harm.
    """

    # --- one step ---------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, *, loss: Tensor | float | None = None) -> Any:
        """Ends the step and returns when every new weight is in place; with overlap_forward, at once.

        closure: evaluates the model, calls backward() and returns the loss, as for torch's optimizers.
        loss: told to the daemon, for its metrics; default: what the closure returned.
        Returns what the closure returned, else None. What became of the step is in `last_result`.

        Parameters without a gradient are left alone (no decay either). A .grad that was set by hand is sent now. Without
        any gradient nothing happens: no step is consumed, and `step_was_skipped` is True.

        Raises:
            Unavailable: the daemon was lost and not found again within reconnect_timeout, or before the run gave this
                trainer up; the message says which.
            RunFenced: another trainer took this rank over.
            RunRewound: the run was taken back to an earlier step, and this trainer with it.
            Rejected: param_groups were changed since the first gradient of a step that is not staged, micro-batches are
                missing, or a gradient cannot be sent.
            KeyboardInterrupt: while waiting; calling step() again waits on.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        with self._lock, self._following():
            self._connected()
            self._send_left_over()
            session = self._session
            begun = session is not None and session.begun
            waits_on = session is not None and session.ended
            self._empty = not begun and (self._overlap is not None or not waits_on)
            if session is None or not session.step_open:
                return value
            if begun:
                self._end(session, as_loss(value if loss is None else loss))
                if self._overlap is not None:
                    session.leave_waiting()
                    return value
            result = session.finish()
        warn_about(result, self._rank.run)
        return value

    def _end(self, session: Session, loss: float | None) -> None:
        if not self._step_rules.staged:
            check_unchanged(self._step_values, self.param_groups, self._rule, session.step)
        groups = self._wire_values(self._read_groups()) if self._step_rules.staged else []
        session.end(loss, self._states.collect(self.state_dict), groups)

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

        Without it a step has exactly gradient_accumulation_steps backward(); with it, at most that many. Every rank has
        the same number. Gradients are summed. Weights are overwritten in the final backward() alone.
        """
        with self._lock, self._following():
            session = self._joined()
            session.micro_batches.begin(final, session.step, session.begun)
        failed = True
        try:
            yield Accumulation(self.report_loss)
            failed = False
        finally:
            with self._lock, self._following():
                if not failed and not session.begun:  # it had no gradient, and counts nevertheless
                    self._begin(session)
                session.micro_batches.leave(failed)

    def report_loss(self, loss: Tensor | float) -> None:
        """Tells the daemon the loss of the micro-batch whose backward() was last, a number or a tensor with one element,
        for its metrics. The step's is the mean over micro-batches and ranks. step(loss=...) tells the last one's."""
        with self._lock:
            self._joined().micro_batches.loss = as_loss(loss)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step() changed no weight: it had no gradient, or ended SKIPPED or ABORTED. LR schedulers are
        stepped unless it is True. When client state was put back, of the step() that it was taken in."""
        if not self._step_values:
            return self._empty or self._put_back_skipped
        return self._empty or (self.last_result is not None and not self.last_result)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's: drops gradients set by hand. Rejected between backward() and step(), when gradients have left."""
        if self._session is not None and self._session.begun:
            raise Rejected(
                f"zero_grad() after backward() cannot take back the gradients of step {self._session.step}, which have "
                "left: call step() first",
                "FAILED_PRECONDITION",
            )
        super().zero_grad(set_to_none)

    def _before_forward(self, parameters: Iterable[Tensor]) -> None:
        session = self._session
        if session is None or not session.ended:
            return
        ours = [parameter for parameter in parameters if parameter in session]
        if ours:  # else this may be a fork, that is not to touch the lock
            with self._lock, self._following():
                session.await_weights(ours)

    def _receive(self, parameter: Tensor) -> None:
        with self._lock, self._following():
            grad, parameter.grad = parameter.grad, None
            backward = torch._C._current_graph_task_id()
            if backward != -1 and backward == self._dead_backward:
                return  # on another thread of a backward() that began before the run was rewound
            if grad is not None:
                self._send(parameter, grad)

    def _send_left_over(self) -> None:
        for entry in self._parameters:
            if entry.parameter.grad is not None and entry.parameter.requires_grad:
                self._receive(entry.parameter)

    def _send(self, parameter: Tensor, grad: Tensor) -> None:
        session = self._joined()
        session.admit(parameter, self._parameters.name_of(parameter))
        if not session.begun:
            self._begin(session)
        session.push(parameter, grad)

    def _begin(self, session: Session) -> None:
        if self._states and not self._restored:
            raise Rejected(
                "client state is registered: call connect() before the loop, so that an earlier process's is put back "
                "before the first batch",
                "FAILED_PRECONDITION",
            )
        check_option("loss_scale", self.loss_scale, "")
        session.await_all()
        session.weights.settle(self._weights, self._moments)
        self._moments = {}
        check_fixed(self._fixed, self.param_groups)
        self._step_values = self._read_groups()
        session.begin(self._wire_values(self._step_values), float(self.loss_scale))

    def _wire_values(self, values: list[dict[str, float]]) -> list[dict[str, float]]:
        return [values[group.origin] for group in self._grouping.groups]

    def _read_groups(self) -> list[dict[str, float]]:
        for group in self.param_groups:
            check_group(group, self._rule)
        return [step_values(group, self._rule) for group in self.param_groups]
