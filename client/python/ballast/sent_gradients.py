"""The gradients of the open step that have left, as the trainer's parameters show them."""

from __future__ import annotations

from torch import Tensor

from ballast.errors import Rejected
from ballast.sent_gradient import SentGradient


class SentGradients:
    """Puts a SentGradient in `.grad` of each parameter whose gradient leaves, and sees whether it is still there: who sets
    `.grad` to None takes the gradient back, as zero_grad() of an optimizer or a module does. One thread at a time.

    staged: nothing is updated before step(), so that gradients can be taken back.
    """

    def __init__(self, staged: bool):
        self._staged = staged
        self._made: dict[int, SentGradient] = {}  # by tensor; of all steps
        self._open: dict[int, Tensor] = {}  # by tensor, the parameters whose gradients left in the open step

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, tensor: int) -> bool:
        return tensor in self._open

    def take(self, tensor: int, parameter: Tensor) -> tuple[Tensor | None, bool]:
        """What `.grad` has that has not left, after which it is None, and whether a backward() put it on top of one that has."""
        gradient, parameter.grad = parameter.grad, None
        made = self._made.get(tensor)
        arrived = None if made is None else made.take()
        return (arrived if gradient is made else gradient), arrived is not None

    def mark(self, tensor: int, parameter: Tensor, name: str) -> None:
        """The parameter's gradient has left."""
        self._open[tensor] = parameter
        made = self._made.get(tensor)
        if made is None or made.device != parameter.device:
            made = self._made[tensor] = SentGradient(parameter, name, self._staged)
        parameter.grad = made

    def mark_again(self, tensor: int) -> None:
        """A further gradient of its was refused, and `.grad` is empty."""
        if tensor in self._open and self._open[tensor].grad is None:
            self._open[tensor].grad = self._made[tensor]

    def clear(self) -> None:
        """The step was ended: what is still marked has no gradient any more."""
        for tensor, parameter in self._open.items():
            if parameter.grad is self._made[tensor]:
                parameter.grad = None
        self._open.clear()

    def taken_back(self, step: int, arriving: int | None = None) -> bool:
        """Whether all of them were, but for the tensor `arriving`, whose next gradient has just been made. Rejected if some
        were and others not, and if one was that may be applied already.

        step: the open one's number.
        """
        kept = lost = None
        for tensor, parameter in self._open.items():
            if tensor != arriving and parameter.grad is self._made[tensor]:
                kept = tensor
            else:
                lost = tensor
        if lost is None:
            return False
        name = self._made[lost].parameter_name
        if kept is not None or not self._staged:
            for tensor in self._open:
                self.mark_again(tensor)
        if not self._staged:
            raise Rejected(
                f"the gradient of '{name}' was taken back (zero_grad(), .grad = None) in step {step}, but has left, and may be "
                "applied already: step(), now, takes them all. Give commit='staged', which can drop the gradients of a step",
                "FAILED_PRECONDITION",
            )
        if kept is not None:
            raise Rejected(
                f"the gradient of '{name}' was taken back (.grad = None) in step {step}, and that of '{self._made[kept].parameter_name}' was "
                "not: gradients that have left are dropped together, by zero_grad() of the optimizer; step(), now, takes them all. "
                "Freeze what is not to be trained in a step (requires_grad_(False)) before its forward",
                "FAILED_PRECONDITION",
            )
        return True

    def missing_from(self, parameters: set[int]) -> str | None:
        """The name of one whose parameter is not among these, given by id(); None: all are."""
        for tensor, parameter in self._open.items():
            if id(parameter) not in parameters:
                return self._made[tensor].parameter_name
        return None
