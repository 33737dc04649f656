"""What gradients lose on their way, given back to them at the next step."""

from __future__ import annotations

import torch
from torch import Tensor


class ErrorFeedback:
    """Rounds the gradients of one tensor, and adds to each what its predecessor lost (1-bit SGD, Seide et al. 2014; "EF",
    arXiv 1901.09847): their sum over the steps is right, however coarse the format is.

    It keeps that in bf16, 2 bytes an element, 4 within a step, on the gradient's device, and free of the loss scale. What it
    keeps is rounded itself, so that of each gradient about 2**-11 may go astray in e5m2. An element that becomes
    infinite or NaN loses nothing and keeps what it had. One thread at a time.
    """

    def __init__(self) -> None:
        self._lost: Tensor | None = None
        self._before: Tensor | None = None  # when the step began
        self._in_step = False

    def round(self, gradient: Tensor, dtype: torch.dtype, loss_scale: float) -> Tensor:
        """The gradient, of a loss that was multiplied by loss_scale, with what was lost before, in `dtype`."""
        if not self._in_step:
            self._before, self._in_step = self._lost, True
        whole = gradient.float()
        if self._lost is not None:
            whole = whole + self._lost.to(whole.device).float() * loss_scale
        rounded = whole.to(dtype)
        lost = (whole - rounded.float()) / loss_scale
        before = torch.zeros_like(lost) if self._lost is None else self._lost.to(whole.device).float()
        self._lost = torch.where(rounded.float().isfinite(), lost, before).to(torch.bfloat16)
        return rounded

    def settle(self, applied: bool) -> None:
        """The step has ended. Of one that was not applied nothing is kept."""
        if self._in_step and not applied:
            self._lost = self._before
        self._before, self._in_step = None, False

    def forget(self) -> None:
        """Nothing was lost: the weights are those of another step."""
        self._lost = self._before = None
        self._in_step = False
