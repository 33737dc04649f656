"""Waiting for new weights in the next forward, module by module, instead of in step()."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook


class ForwardWaits:
    """Calls `wait(parameters)` before a module's forward, with the parameters that it may read.

    Those are the module's own, and those of modules below it that have not been called themselves: some modules read the
    weights of their children (nn.MultiheadAttention those of out_proj). A compiled module may read all below it. Holds
    `wait`'s object weakly, and learns which modules are called from the forwards that it sees.
    """

    def __init__(self, wait: Callable[[Iterable[Tensor]], None]):
        self._called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        method, called = weakref.WeakMethod(wait), self._called

        def before(module: nn.Module, _: Any) -> None:
            if torch.compiler.is_compiling():
                return  # traced as part of a compiled module, which was waited for
            bound = method()
            if bound is not None:
                called.add(module)
                bound(_read_by(module, called))

        self._handle = register_module_forward_pre_hook(before)

    def remove(self) -> None:
        self._handle.remove()


def _read_by(module: nn.Module, called: weakref.WeakSet[nn.Module]) -> Iterator[Tensor]:
    if hasattr(module, "_orig_mod"):  # what torch.compile makes of a module
        yield from module.parameters()
        return
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in called:
            yield from _read_by(child, called)
