"""How a step ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ballast.errors import Rejected
from ballast.spikes import SpikeEvent
from ballast.wording import in_python


@dataclass(frozen=True)
class StepTiming:
    """What moved when, in one step. Bytes are payload; "in backward" is before step() was called."""

    pushed_bytes: int
    pulled_bytes: int
    pushed_bytes_in_backward: int
    pulled_bytes_in_backward: int
    buffered_bytes_most: int  # of gradients, in the client's own memory at one time
    backward_s: float  # from the first gradient to step()
    wait_s: float  # from step() to the last weight


@dataclass(frozen=True)
class StepResult:
    """The daemon's account of one step, the same on every rank. True where weights were updated.

    outcome: "APPLIED", "SKIPPED", "ABORTED" (no tensor changed) or "PARTIAL" (those in `not_applied` did not change, the
        others did). Every outcome consumes the step's number.
    reason: why it was not APPLIED; one of a closed set, such as "overflow", "nonfinite", "rank_lost", "disagreement",
        "discarded" (a trainer dropped its gradients, by zero_grad() after backward()).
    detail: the same for people: names the tensor, rank or field, and the fix. May be empty.
    grad_norm: L2 norm over all tensors of the reduced and unscaled gradient, before any clipping.
    clip_coefficient: what max_grad_norm multiplied the gradient by; 1 without clipping.
    not_applied: names of the tensors that had a gradient, or were still awaited, and were not updated.
    nonfinite_tensors: how many tensors had a NaN or an infinity in their gradient.
    rejected_blocks: how many blocks of 32 elements kept their old contents for that.
    ranks_left_out: trainers that the step was made without: on_lost_rank="continue".
    spikes: loss spikes, and what tells of them, that were found at this step; `warnings` has them as sentences.
    durable_step: the highest step that survives a crash of the daemon; 0 without checkpoints.
    timing: None for the result of a step of an earlier trainer.
    """

    step: int
    outcome: str
    reason: str
    detail: str
    grad_norm: float
    clip_coefficient: float
    not_applied: tuple[str, ...]
    ranks_left_out: tuple[int, ...]
    nonfinite_tensors: int
    rejected_blocks: int
    warnings: tuple[str, ...]
    spikes: tuple[SpikeEvent, ...]
    durable_step: int
    timing: StepTiming | None

    def __bool__(self) -> bool:
        return not self.skipped

    @property
    def skipped(self) -> bool:
        """Whether no weight changed: LR schedulers are not to be stepped."""
        return self.outcome not in ("APPLIED", "PARTIAL")

    @property
    def applied(self) -> bool:
        """Whether every tensor with a gradient was updated."""
        return self.outcome == "APPLIED"

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], names: Sequence[str]) -> StepResult:
        """From the wire's fields; `names` are the run's tensors by index."""
        own = {key: fields[key] for key in cls.__dataclass_fields__ if key in fields}
        own["not_applied"] = tuple(names[tensor] for tensor in fields["tensors_not_applied"])
        own["ranks_left_out"] = tuple(fields["ranks_left_out"])
        own["detail"] = in_python(fields["detail"])
        own["warnings"] = tuple(map(in_python, fields["warnings"]))
        own["spikes"] = tuple(SpikeEvent.from_fields(event) for event in fields["spikes"])
        own["timing"] = StepTiming(**fields["timing"]) if "timing" in fields else None
        return cls(**own)


def as_loss(value: Any) -> float | None:
    """A loss to tell the daemon, if that is one number."""
    if hasattr(value, "detach"):  # a tensor; torch need not be imported to know
        return float(value.detach()) if value.numel() == 1 else None
    if getattr(value, "size", None) == 1:  # numpy's
        return float(value.item())
    return float(value) if isinstance(value, (int, float)) else None


def told_loss(value: Any) -> float | None:
    """The loss that the caller gives. None where none is given; Rejected if it is not one number."""
    loss = as_loss(value)
    if loss is None and value is not None:
        shape = getattr(value, "shape", None)
        shown = repr(value) if shape is None else f"a {type(value).__name__} of shape {tuple(shape)}"
        raise Rejected(f"the loss is {shown}: it must be one number, such as the mean, or not be given")
    return loss
