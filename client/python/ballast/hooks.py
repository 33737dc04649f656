"""Catching gradients as backward makes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


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
