"""What gradients lose where they are converted to formats of fewer exponents."""

from __future__ import annotations

import torch
from torch import Tensor

# Formats whose range a gradient may leave: their smallest numbers are 2**-24 and 2**-16.
_NARROW = {torch.float16, torch.float8_e5m2}


class ConversionLosses:
    """Counts, at every tenth step, the elements that were not 0 and become so, and those that were finite and become
    infinite. Nothing waits for a GPU before take(). One thread at a time."""

    EVERY = 10

    def __init__(self) -> None:
        self._counts: list[Tensor] = []  # of each gradient: flushed, overflowed; on its device
        self._elements = 0

    def count(self, step: int, gradient: Tensor, sent: Tensor) -> None:
        """Of a gradient as it was made, and as it is sent."""
        if step % self.EVERY != 1 or sent.dtype not in _NARROW or sent.dtype == gradient.dtype:
            return
        wide = sent.to(torch.float32)
        flushed = (gradient != 0) & (wide == 0)
        overflowed = gradient.isfinite() & ~wide.isfinite()
        self._counts.append(torch.stack([flushed.sum(), overflowed.sum()]))
        self._elements += gradient.numel()

    def take(self) -> tuple[float | None, float | None]:
        """The shares of all elements counted since, flushed and overflowed; None: there were none."""
        counts, elements = self._counts, self._elements
        self._counts, self._elements = [], 0
        if not elements:
            return None, None
        flushed, overflowed = (sum(int(count[i]) for count in counts) for i in (0, 1))
        return flushed / elements, overflowed / elements
