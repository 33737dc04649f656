"""Averages of the weights that the daemon keeps: the option `ema` of the optimizers, and what is read of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ballast.errors import Rejected
from ballast.pulls import portions
from ballast.shard import is_sharded, like, local_of

if TYPE_CHECKING:
    from ballast.binding import Binding
    from ballast.session import Session
    from ballast.steps import Steps

_MOST = 4


def as_decays(given: Any) -> tuple[float, ...]:
    """The option `ema` as it is meant. Rejected if it is none."""
    if given is None:
        return ()
    decays = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    for decay in decays:
        if isinstance(decay, bool) or not isinstance(decay, float) or not 0 < decay < 1:
            raise Rejected(f"ema={given!r}: a decay is a number above 0 and below 1, as 0.999")
    if len(set(decays)) < len(decays) or len(decays) > _MOST:
        raise Rejected(f"ema={given!r}: give at most {_MOST} decays, each of them once")
    return decays


class Averages:
    """What an optimizer reads of its run's averages. One thread at a time.

    steps: the optimizer's, which holds this. inside: the decay of the average that the parameters have now; None: they have the
        weights.
    """

    def __init__(self, decays: tuple[float, ...]):
        self.decays = decays
        self.inside: float | None = None

    def refuse_within(self, what: str) -> None:
        """Rejected while the parameters have an average."""
        if self.inside is not None:
            raise Rejected(
                f"{what} within average({self.inside}): the parameters have the averaged weights, which are not trained; "
                "leave the block first",
                "FAILED_PRECONDITION",
            )

    def read(self, steps: Steps, decay: float | None) -> dict[str, Tensor]:
        """By the tensors' names, in fp32 on the CPU; of a sharded parameter a DTensor as it is."""
        with steps.lock, steps.following():
            session, chosen = self._session(steps, decay)
            bindings = session.weights.bindings
            averages = session.weights.average(chosen, bindings)
            session.weights.check_current()
            return {b.name: like(b.parameter, averages[b.index]) for b in bindings}

    @contextmanager
    def swapped(self, steps: Steps, decay: float | None) -> Iterator[None]:
        with steps.lock, steps.following():
            self.refuse_within("average()")
            session, chosen = self._session(steps, decay)
            weights, bindings = session.weights, session.weights.bindings
            for binding in bindings:
                _refuse_swap(binding)
            kept = {b.index: b.parameter.detach().clone() for b in bindings}
            untouched = [b for b in bindings if not b.last_seen.touched]
            self.inside = chosen
        try:
            with steps.lock, steps.following():
                for some in portions(bindings):
                    averages = weights.average(chosen, some)
                    for binding in some:
                        _write(binding, averages[binding.index])
                weights.check_current()
            yield
        finally:
            with steps.lock:
                self.inside = None
                if steps.joined().weights is weights:  # else the parameters have those that the run went back to
                    for binding in bindings:
                        _write(binding, kept[binding.index])
                    for binding in untouched:
                        binding.last_seen.note()

    def _session(self, steps: Steps, decay: float | None) -> tuple[Session, float]:
        if decay is None and len(self.decays) == 1:
            decay = self.decays[0]
        if decay not in self.decays or decay is None:
            kept = f"it keeps {list(self.decays)}" if self.decays else "it keeps none: give the optimizer ema=[0.999]"
            asked = "which average: name its decay" if decay is None else f"no average with the decay {decay}"
            raise Rejected(f"{asked}; {kept}")
        steps.wait()
        session = steps.joined()
        session.weights.require()
        if session.step_open:
            raise Rejected(
                f"step {session.step} is open: call step() first, then read the average", "FAILED_PRECONDITION"
            )
        return session, decay


def _refuse_swap(binding: Binding) -> None:
    if is_sharded(binding.parameter):
        why = "which is sharded: FSDP keeps gathered copies that would not follow"
    elif binding.as_served:
        why = "whose layer computes in the codes that the daemon serves"
    else:
        return
    raise Rejected(
        f"average() of parameter '{binding.name}', {why}; read it by averaged(), and load it into a model of its own",
        "FAILED_PRECONDITION",
    )


def _write(binding: Binding, weights: Tensor) -> None:
    with torch.no_grad():
        local_of(binding.parameter).copy_(weights)


class Averaging:
    """Of an optimizer: its run's averages."""

    _steps: Steps

    @contextmanager
    def average(self, decay: float | None = None) -> Iterator[None]:
        """Within the block the parameters have an average of the run's weights, as an evaluation wants it; after it they have
        their weights again, to the bit. The daemon keeps the average (option `ema`).

            with optimizer.average(0.999):
                evaluate(model)

        decay: one of `ema`; None: the only one. The average is in fp32, rounded to each parameter's dtype. It is that of the
        last step that was applied; before the first, of the weights as they were loaded. Each rank asks for itself.

        Rejected, by name: there is no such average; a step is open; a parameter is sharded, or computed in as it is served
        (averaged() has its average). Within the block no gradient is taken; pull() and rewind()
        end it early: the parameters have the weights then.
        """
        with self._steps.averages.swapped(self._steps, decay):
            yield

    def averaged(self, decay: float | None = None) -> dict[str, Tensor]:
        """An average of the run's weights by the parameters' names, in fp32 on the CPU; of a sharded parameter a DTensor. decay
        and errors as for average(); a step is not to be open.

            ema_model.load_state_dict(optimizer.averaged(0.999), strict=False)  # of an optimizer of named_parameters()
        """
        return self._steps.averages.read(self._steps, decay)
