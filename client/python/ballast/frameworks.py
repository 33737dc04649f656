"""Frameworks that drive this process's training loop, and what they say of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

# Those that clip, accumulate or skip after backward(), as they are told, without telling the optimizer before.
_LOOPS = {"lightning.pytorch": "Lightning", "pytorch_lightning": "Lightning", "torchtune": "torchtune"}


def driving_framework() -> str | None:
    """The name of the one that makes this process's steps, as far as can be known: Accelerate, which HF Trainer and TRL
    stand on, once it is set up; the others once they are imported. None: there is none."""
    state = sys.modules.get("accelerate.state")
    if state is not None and getattr(state.PartialState, "_shared_state", None):
        return "Accelerate"
    return next((name for module, name in _LOOPS.items() if module in sys.modules), None)


def synchronizes() -> bool | None:
    """Whether Accelerate makes a step of what the backward() under way leaves; None without it."""
    state = sys.modules.get("accelerate.state")
    shared = None if state is None else getattr(state.GradientState, "_shared_state", None)
    return bool(shared["sync_gradients"]) if shared and "sync_gradients" in shared else None


class Prepared:
    """An optimizer that Accelerate takes as it is. Its own wrapper would hide skipped steps from schedulers; what it does
    besides, passing over step() and zero_grad() within accumulate(), the optimizer does as synchronizes() says."""

    _is_accelerate_prepared = True

    @property
    def optimizer(self) -> Self:
        """Itself: where its wrapper has the optimizer."""
        return self
