"""Which weights a module's forward may read, told before it does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook


class ForwardReads:
    """Calls `read(parameters)` before a module's forward, with the parameters that it may read.

    Those are the module's own, and those of modules below it that have not been called themselves: some modules read the
    weights of their children (nn.MultiheadAttention those of out_proj). A compiled module may read all below it, and so may
    any that makes no graph: in evaluation nn.TransformerEncoderLayer reads those of children that it calls in training,
    and no gradient tells of it. Holds `read`'s object weakly, and learns which modules are called from the forwards that it
    sees.

    again: only of a forward within a backward(), which computes again what activation checkpointing has not kept.
    """

    def __init__(self, read: Callable[[Iterable[Tensor]], None], again: bool):
        self._called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        method, called = weakref.WeakMethod(read), self._called

        def before(module: nn.Module, _: Any) -> None:
            if is_compiling():
                return  # traced as part of a compiled module, which was waited for
            if again and torch._C._current_graph_task_id() == -1:
                return
            bound = method()
            if bound is not None:
                called.add(module)
                whole = hasattr(module, "_orig_mod") or not (again or torch.is_grad_enabled())
                bound(_read_by(module, () if whole else called))

        self._handle = register_module_forward_pre_hook(before)

    def remove(self) -> None:
        self._handle.remove()


def _read_by(module: nn.Module, called: Container[nn.Module]) -> Iterator[Tensor]:
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    for child in module.children():
        if child not in called:
            yield from _read_by(child, called)
