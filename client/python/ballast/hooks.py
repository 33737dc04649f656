"""What torch calls for an optimizer: with the gradients that backward makes, and before a forward reads weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ballast import wrappers
from ballast.overlap import ForwardWaits


class TorchHooks:
    """Calls `receive(parameter)` as GradientHooks does and, if it is given, `wait(parameters)` as ForwardWaits does, and has
    modules in DistributedDataParallel know `trainer`, from cover() to remove(). Holds all of them weakly."""

    def __init__(
        self,
        receive: Callable[[Tensor], None],
        wait: Callable[[Iterable[Tensor]], None] | None,
        trainer: wrappers.Trainer,
    ):
        self._gradients = GradientHooks(receive)
        self._wait = None if wait is None else weakref.WeakMethod(wait)
        self._waits: ForwardWaits | None = None
        self._trainer = weakref.ref(trainer)

    def cover(self, parameters: Iterable[Tensor]) -> None:
        """From now on their gradients are received, and every module waits for its weights."""
        self._gradients.cover(parameters)
        trainer = self._trainer()
        if trainer is not None:
            wrappers.watch(trainer)
        wait = self._wait and self._wait()
        if self._waits is None and wait:
            self._waits = ForwardWaits(wait)

    def remove(self) -> None:
        wrappers.release(self._trainer())
        self._gradients.remove()
        if self._waits is not None:
            self._waits.remove()


class GradientHooks:
    """Calls `receive(parameter)` when a gradient has been accumulated, while backward goes on.

    Holds `receive`'s object weakly: hooks live as long as their parameters and must not keep an optimizer alive.
    """

    def __init__(self, receive: Callable[[Tensor], None]):
        self._receive = weakref.WeakMethod(receive)
        self._handles: dict[int, Any] = {}

    def cover(self, parameters: Iterable[Tensor]) -> None:
        """Watches those that require a gradient and are not watched yet."""
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self._handles:
                register: Any = parameter.register_post_accumulate_grad_hook  # torch declares no types for it
                self._handles[id(parameter)] = register(_forward_to(self._receive))

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def _forward_to(receive: weakref.WeakMethod[Callable[[Tensor], None]]) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        method = receive()
        if method is not None:
            method(parameter)

    return hook
