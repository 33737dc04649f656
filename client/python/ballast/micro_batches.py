"""Which micro-batch of a step a gradient belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from ballast.errors import Rejected


class MicroBatches:
    """The micro-batches of one step after another, at most `most` a step.

    A step is made in one of two ways. Implicit: each backward() is a micro-batch, and a step has `most` of them; a tensor
    whose gradient comes again is of the next. no_sync() of DistributedDataParallel, where it is used, may end the step
    before. Announced: each is entered with begin(final) before its backward(), and the step ends with the one that is final.
    Bookkeeping only.

    end_micro(loss, next_is_last): told when a micro-batch is over that is not the step's last.
    open_ended: nothing returns before the step's end, and so it may have any number of them up to `most`: the one that it
        ends in is the last.
    """

    def __init__(self, most: int, end_micro: Callable[[float | None, bool], None], open_ended: bool = False):
        self._most = most
        self._open_ended = open_ended
        self._end_micro = end_micro
        self.clear()

    def clear(self) -> None:
        """The step is over."""
        self._announced: bool | None = None  # None: not known yet
        self._inside = False
        self._again = False  # the present one was broken off before its first gradient
        self._final = False
        self._index = 0
        self._pushed: set[int] = set()
        self.loss: float | None = None  # of the present one

    @property
    def count(self) -> int:
        """How many the step that begins now has, as far as is known; 0: its end will tell."""
        if self._open_ended:
            return 0
        return 1 if self._final else self._most

    @property
    def last(self) -> bool:
        """Whether the present one is the step's last: weights may return."""
        return self._final or (not self._announced and not self._open_ended and self._index + 1 == self._most)

    @property
    def inside(self) -> bool:
        """Whether an announced one was entered, and its step is not over."""
        return self._inside

    @property
    def way_on(self) -> str:
        """What ends the open step, as it is to be told."""
        if self.last or (self._open_ended and not self._announced):
            return "call step()"
        if self._announced:
            return "enter the rest of its micro-batches, the last with accumulate(final=True), then call step()"
        return f"run {self._most - self._index - 1} more backward(), then call step()"

    def begin(self, final: bool, step: int, open_: bool) -> None:
        """Enters an announced one. open_: the step has begun."""
        if self._inside:
            raise Rejected(
                "accumulate() within accumulate(): leave the first micro-batch before", "FAILED_PRECONDITION"
            )
        if self._announced is False and open_:
            raise Rejected(
                f"accumulate() after a backward() of step {step} outside of it: enter it for every micro-batch of a step, "
                f"or for none. To end this one, {self.way_on}",
                "FAILED_PRECONDITION",
            )
        again = self._again and open_
        if again and final != self._final:
            raise Rejected(
                f"the micro-batch of step {step} that an exception broke off began with final={self._final}: enter it "
                "again with the same",
                "FAILED_PRECONDITION",
            )
        if self._announced and self._final and not self._again:
            raise Rejected(
                f"accumulate() after the final micro-batch of step {step}: call step() first", "FAILED_PRECONDITION"
            )
        index = self._index + (0 if self._again else 1) if open_ and self._announced else 0
        if not final and index + 1 == self._most:
            raise Rejected(
                f"micro-batch {index + 1} of step {step} must be final=True: gradient_accumulation_steps={self._most} is "
                "the most a step may have; give a larger one",
                "FAILED_PRECONDITION",
            )
        if index > self._index:
            self._next(next_is_last=final)
        self._announced, self._inside, self._final, self._again = True, True, final, False

    def leave(self, failed: bool) -> None:
        """failed: by an exception. Before its first gradient, the same one may be entered again."""
        self._inside = False
        self._again = failed and not self._pushed

    def admit(self, tensor: int, name: str, step: int, final: bool | None = None) -> None:
        """Before a gradient is sent: it belongs to the present micro-batch from here on. Rejected if it cannot.

        final: whether its backward() is the step's last, as no_sync() says; None: nothing says so. Not heard within
        accumulate()."""
        if self._announced is None:
            self._announced = False
        if self._open_ended:
            final = None
        if self._announced and not self._inside:
            raise Rejected(
                f"parameter '{name}' got a gradient outside of accumulate() in step {step}: run each micro-batch's "
                "backward() within it, and call step() after the final one",
                "FAILED_PRECONDITION",
            )
        again = tensor in self._pushed
        if again and (self._announced or self.last):
            raise Rejected(self._second(name, step), "FAILED_PRECONDITION")
        if not self._announced and (again or not self._pushed):
            self._enter(self._index + again, name, step, final)

    def _enter(self, index: int, name: str, step: int, final: bool | None) -> None:
        """The gradient of `name` is the first of the implicit micro-batch `index`."""
        if final is False and index + 1 == self._most:
            raise Rejected(
                f"parameter '{name}' got a gradient under no_sync() in step {step}, so this micro-batch is not the step's "
                f"last; but a step has at most gradient_accumulation_steps={self._most}, and this is number {index + 1}. Give "
                "a larger one, or leave the last backward() of each step outside of no_sync()",
                "FAILED_PRECONDITION",
            )
        if index == self._most:
            raise Rejected(
                f"parameter '{name}' got a gradient of another backward() in step {step}, which has had "
                f"gradient_accumulation_steps={self._most}, the most that it may have: call step() before, or give a larger one",
                "FAILED_PRECONDITION",
            )
        if index > self._index:
            self._next(next_is_last=bool(final))
        self._final = bool(final)

    def add(self, tensor: int) -> None:
        self._pushed.add(tensor)

    def check_end(self, step: int) -> None:
        """Rejected unless step() may end the step now."""
        if self._inside:
            raise Rejected("step() within accumulate(): call it after the final micro-batch", "FAILED_PRECONDITION")
        if self.last or (self._open_ended and not self._announced):
            return
        if self._announced:
            raise Rejected(
                f"step() after {self._index + 1} micro-batches of step {step}, none of them final: enter the last one with "
                "accumulate(final=True)",
                "FAILED_PRECONDITION",
            )
        raise Rejected(
            f"step() after {self._index + 1} of {self._most} micro-batches of step {step}: {self.way_on}. A step that may have "
            "fewer wants accumulate() around each of them, or commit='staged'",
            "FAILED_PRECONDITION",
        )

    def _next(self, next_is_last: bool) -> None:
        self._end_micro(self.loss, next_is_last and not self._open_ended)
        self.loss = None
        self._index += 1
        self._pushed.clear()

    def _second(self, name: str, step: int) -> str:
        if self._most == 1:
            return (
                f"parameter '{name}' got a second gradient in step {step}: its first has left already. Call step() after "
                "every backward(), sum the losses before one backward(), or make an optimizer with "
                "gradient_accumulation_steps=N to add up N backward()"
            )
        where = f"micro-batch {self._index + 1} of step {step}"
        if self._announced:
            fix = "one backward() for each accumulate()"
        elif self._final:
            fix = "it was the step's last, as its forward was not under no_sync(), and step() comes next"
        else:
            fix = f"it was the last of the {self._most} backward() of a step, of which each counts that was begun: call step()"
        return (
            f"parameter '{name}' got a second gradient in {where}, and its first has left already: {fix}. Where one "
            "backward() has made both, of a tensor used twice under activation checkpointing, use_reentrant=False mends that"
        )


class Announced:
    """What no_sync() of modules in DDP, or Accelerate, says of the micro-batches: those without synchronization are not the
    step's last.

    final: whether the present one is the last. None: nothing says so. Where all are synchronized, that does not make one the
        last: who accumulates by hand does not say so.
    """

    def __init__(self) -> None:
        self.final: bool | None = None
        self._used = False

    def hear(self, synchronized: bool) -> None:
        """A module's forward begins, under no_sync() or not; or a gradient is made, and Accelerate synchronizes or not."""
        self._used = self._used or not synchronized
        self.final = synchronized if self._used else None


class Reporting(Protocol):
    def report_loss(self, loss: Any) -> None: ...


class Accumulation:
    """What `with optimizer.accumulate(final=...)` hands out: one micro-batch. Holds its optimizer weakly: the name is there
    after the `with` block, and must not keep an optimizer alive."""

    def __init__(self, optimizer: Reporting):
        self._optimizer = weakref.ref(optimizer)

    def report(self, loss: Any) -> None:
        """Optimizer.report_loss of this micro-batch. Rejected once the optimizer is deleted."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise Rejected("report() of a micro-batch whose optimizer is deleted: keep the optimizer while it trains")
        optimizer.report_loss(loss)
