"""The norm of a step that is asked for before the step ends, and what the step is clipped to."""

from __future__ import annotations

import math

from ballast import _core
from ballast.commit import StepRules
from ballast.errors import Rejected
from ballast.pending import fields_of
from ballast.progress import Patience


class Clipping:
    """Of the open step of a staged run; clear() ends it with the step. One thread at a time.

    rules: the run's, which may clip every step.
    """

    def __init__(self, client: _core.Client, rules: StepRules):
        self._client = client
        self._most = rules.max_grad_norm
        self._tensor_clip = rules.tensor_clip
        self.clear()

    def clear(self) -> None:
        self._measuring: _core.PendingMeasure | None = None
        self._norm: float | None = None
        self._max_norm: float | None = None

    @property
    def asked(self) -> bool:
        """Whether the norm was asked for, after which the step gets no more gradients."""
        return self._measuring is not None

    @property
    def max_norm(self) -> float | None:
        """What the step is to end with, in place of what the run says: the least that was asked for. None: nothing."""
        if self._max_norm is None or self._most is None:
            return self._max_norm
        return min(self._max_norm, self._most)

    def measure(self, loss: float | None, patience: Patience) -> float:
        """The norm of the step's whole gradient: waits until every rank has sent its own, or ended the step. Inf if an
        element is not finite, NaN if a rank has dropped the step. After an interrupted wait, waits on.

        loss: of the micro-batch that this ends, told with the first call.
        """
        if self._norm is None:
            if self._measuring is None:
                self._measuring = self._client.measure_step(loss)
            fields = fields_of(self._measuring, patience)
            self._norm = math.inf if fields["nonfinite_tensors"] else float(fields["grad_norm"])
        return self._norm

    def clip(self, max_norm: float, loss: float | None, patience: Patience) -> float:
        """Has the step clipped to max_norm, or to less where that was asked before; inf: not at all. Returns the norm, as
        measure(), that it had before, as clipped by earlier calls. Rejected where each tensor is clipped by its own norm.
        """
        if max_norm != math.inf and self._tensor_clip is not None:
            raise Rejected(
                f"clip_grad_norm_(max_norm={max_norm}) in a run with tensor_clip={self._tensor_clip!r}, which clips each tensor "
                "by its own norm: leave one of the two out (HF Trainer: max_grad_norm=0); max_norm=inf only measures",
                "FAILED_PRECONDITION",
            )
        norm = self.measure(loss, patience)
        if self._max_norm is not None:
            norm *= min(1.0, self._max_norm / (norm + 1e-6))
        if max_norm != math.inf:
            self._max_norm = min(max_norm, self._max_norm or max_norm)
        return norm


def refuse_released(step: int, staged: bool) -> None:
    """Rejected if the norm of a step is asked for whose updates are made as its gradients come."""
    if not staged:
        raise Rejected(
            f"the gradients of step {step} have left, and may be applied already: give the optimizer max_grad_norm=, which clips, "
            "or commit='staged', in which clip_grad_norm_ and get_total_norm can be called",
            "FAILED_PRECONDITION",
        )


def refuse_partial(step: int, missing: str | None) -> None:
    """Rejected if the norm of some parameters is asked for, and `missing`, which has a gradient too, is not one of them."""
    if missing is not None:
        raise Rejected(
            f"clip_grad_norm_ or get_total_norm without parameter '{missing}', which has a gradient in step {step}: the daemon clips "
            "by the norm of all parameters of an optimizer. Give all of them, or make an optimizer, with a run of its own, for each "
            "norm",
            "FAILED_PRECONDITION",
        )
