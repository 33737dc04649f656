"""The gradients of the open step that have left, as the trainer's parameters show them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from ballast.errors import Rejected
from ballast.kept_gradients import KeptGradients
from ballast.sent_gradient import SentGradient, sent_in
from ballast.shard import like

if TYPE_CHECKING:
    from ballast.session import Session


def _references(held: Mapping[int, object], key: int) -> int:
    return sys.getrefcount(held[key])


_ALONE = _references({0: object()}, 0)  # to what that mapping alone holds


class SentGradients:
    """Puts a SentGradient in `.grad` of each parameter whose gradient leaves, and sees whether it is still there: who sets
    `.grad` to None takes the gradient back, as zero_grad() of an optimizer or a module does. One thread at a time.
    """

    def __init__(self) -> None:
        self._made: dict[int, SentGradient] = {}  # by id(parameter); of all steps
        self._shown: dict[int, Tensor] = {}  # likewise, what `.grad` is: those, or DTensors of them
        self._open: dict[int, Tensor] = {}  # likewise, the parameters whose gradients left in the open step
        self._given: dict[int, Tensor] = {}  # likewise, that had one since gradients were last set to None
        self._kept = KeptGradients()
        self._zeroed = False  # by zero_grad(set_to_none=False) since then

    def __len__(self) -> int:
        return len(self._open)

    def take(self, parameter: Tensor) -> tuple[Tensor | None, bool]:
        """What `.grad` has that has not left, after which it is None, and whether a backward() put it on top of one that has.
        Rejected if it is what stood there in an earlier step."""
        gradient, shown = parameter.grad, self._shown.get(id(parameter))
        if gradient is not shown and (sent := sent_in(gradient)) is not None:
            raise Rejected(
                f"what was put into .grad stands for a gradient of '{sent.parameter_name}' that left for the daemon in an earlier step, "
                "and has no values. Make it anew by a backward(), or keep its values in a hook of register_hook(), and put those "
                "into .grad",
                "FAILED_PRECONDITION",
            )
        parameter.grad = None
        made = self._made.get(id(parameter))
        arrived = None if made is None else made.take_arrived()
        return (arrived if gradient is shown else gradient), arrived is not None

    def mark(self, parameter: Tensor, gradient: Tensor, name: str, staged: bool) -> None:
        """The parameter's gradient has left. staged: nothing is updated before step()."""
        self._kept.note(gradient, name)
        self._open[id(parameter)] = self._given[id(parameter)] = parameter
        made = self._made.get(id(parameter))
        if made is None or made.device != parameter.device:
            made = self._made[id(parameter)] = SentGradient(parameter, name, staged)
            self._shown[id(parameter)] = like(parameter, made)
        parameter.grad = self._shown[id(parameter)]

    def mark_again(self, parameter: Tensor) -> None:
        """A further gradient of its was refused, and `.grad` is empty."""
        if id(parameter) in self._open and parameter.grad is None:
            parameter.grad = self._shown[id(parameter)]

    def clear(self) -> None:
        """The step was ended: what is still marked has no gradient any more."""
        for key, parameter in self._open.items():
            if self.is_marked(parameter):
                parameter.grad = None
            if _references(self._shown, key) > _ALONE + (self._shown[key] is self._made[key]):
                del self._shown[key], self._made[key]  # who holds it may put it back, when it is no gradient any more
        self._open.clear()
        self._kept.clear()

    def zero(self, set_to_none: bool) -> None:
        """zero_grad() between two steps. False: what had a gradient has one of zeros from now on, where a step makes no other."""
        self._zeroed = not set_to_none
        if set_to_none:
            self._given.clear()

    def zeros(self) -> list[Tensor]:
        """Those that have a gradient of zeros in the step that is about to end."""
        if not self._zeroed:
            return []
        return [p for key, p in self._given.items() if key not in self._open and p.grad is None and p.requires_grad]

    def taken_back_before(self, parameter: Tensor, session: Session) -> bool:
        """As taken_back(), when another gradient has just been made, of `parameter`, and not on top of one that left. One look
        tells where none was taken back, or not all were."""
        first = next(iter(self._open.values()), None)
        if first is None or (id(parameter) not in self._open and self.is_marked(first)):
            return False
        return self.taken_back(session, arriving=parameter)

    def taken_back(self, session: Session, arriving: Tensor | None = None) -> bool:
        """Whether all of them were, but for that of `arriving`, whose next one has just been made. Rejected if some were and
        others not, and if one was that may be applied already, for the run is not staged.

        session: that the open step is of.
        """
        kept = [p for p in self._open.values() if p is not arriving and self.is_marked(p)]
        if len(kept) == len(self._open):
            return False
        lost = next(p for p in self._open.values() if p is arriving or not self.is_marked(p))
        if session.staged and not kept:
            return True
        for parameter in self._open.values():
            self.mark_again(parameter)
        name = self._made[id(lost)].parameter_name
        if not session.staged:
            raise Rejected(
                f"the gradient of '{name}' was taken back (zero_grad(), .grad = None) in step {session.step}, but has left, and may be "
                f"applied already: {session.micro_batches.way_on}, which takes them all. Give commit='staged', which can drop the "
                "gradients of a step",
                "FAILED_PRECONDITION",
            )
        raise Rejected(
            f"the gradient of '{name}' was taken back (.grad set to None, or to another) in step {session.step}, and that of "
            f"'{self._made[id(kept[0])].parameter_name}' was not: gradients that have left are dropped together, by zero_grad() of "
            "the optimizer; step(), now, takes them all. Freeze what is not to be trained in a step (requires_grad_(False)) "
            "before its forward; register_hook() adds a hook that changes a gradient before it leaves",
            "FAILED_PRECONDITION",
        )

    def refuse_added(self, step: int) -> None:
        """Rejected, once, if somebody added to one after it had left, or wrote to its memory: within a backward(), where autograd does so, too."""
        added = [made for made in map(self._made.__getitem__, self._open) if made.take_arrived() is not None]
        if added:
            raise Rejected(
                f"the gradient of '{added[0].parameter_name}' was added to after it had left for the daemon in step {step}, by a "
                "hook: the daemon's is without that; step(), now, takes it so. register_hook() adds a hook that changes a "
                "gradient before it leaves",
                "FAILED_PRECONDITION",
            )
        if (name := self._kept.written()) is not None:
            raise Rejected(
                f"the memory of the gradient of '{name}', which the trainer keeps (a buffer whose parts were put into .grad, say), was "
                f"written to after it had left for the daemon in step {step}: the daemon's is without that; step(), now, takes it so. "
                "Change gradients in a hook of register_hook(), or leave .grad empty before backward() and set it by hand before step()",
                "FAILED_PRECONDITION",
            )

    def missing_from(self, parameters: Iterable[Tensor]) -> str | None:
        """The name of one that is not of these parameters; None: all are."""
        given = {id(parameter) for parameter in parameters}
        return next((self._made[key].parameter_name for key in self._open if key not in given), None)

    def is_marked(self, parameter: Tensor) -> bool:
        """Whether `.grad` is what stands for one that has left."""
        gradient = parameter.grad
        return gradient is not None and gradient is self._shown.get(id(parameter))
