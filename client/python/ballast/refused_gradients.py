"""Why a gradient, or a forward within a backward(), is refused in a step."""

from __future__ import annotations

from ballast.errors import Rejected


def unknown(name: str, step: int) -> Rejected:
    """Of a parameter that the step does not have."""
    return _refused(
        f"parameter '{name}' has a gradient in step {step}, and was frozen, or in no group, when that began: unfreeze it, or add its "
        "group, between two steps"
    )


def unawaited(name: str, step: int) -> Rejected:
    """With overlap_forward, of weights that no forward waited for."""
    return _refused(
        f"parameter '{name}' got a gradient in step {step}, but no module's forward waited for its weights: it was read outside of "
        "the module that has it, perhaps before they were in. Call wait() before the forward, or leave overlap_forward out"
    )


def after_norm(name: str, step: int) -> Rejected:
    """Once the norm of the step's gradient is known."""
    return _refused(
        f"parameter '{name}' got a gradient after the norm of step {step} was asked for (clip_grad_norm_): run every backward() of a "
        "step before, or drop the step with zero_grad()"
    )


def too_early(name: str, step: int, in_place: bool) -> Rejected:
    """Of a forward that began before the end of `step`, which Ctrl-C has interrupted. in_place: whether its weights are by now."""
    fix = "they are now: run" if in_place else "call step() again, which waits for them, and run"
    return _refused(
        f"parameter '{name}' got a gradient of a forward that began before the weights of step {step} were in place, whose step() was "
        f"interrupted; {fix} forward and backward again"
    )


def read_again(name: str, step: int) -> Rejected:
    """Of a forward that would read what the backward() around it may have changed."""
    return _refused(
        f"parameter '{name}' is read again by activation checkpointing, in a backward() that has its gradient already and so may have "
        f"changed it (step {step}): what is computed again would not be what was. It is read without a graph there (detach()), or "
        "is tied under a reentrant checkpoint, which use_reentrant=False mends: give commit='staged', in which weights change in step()"
    )


def _refused(message: str) -> Rejected:
    return Rejected(message, "FAILED_PRECONDITION")
