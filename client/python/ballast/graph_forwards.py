"""Forwards that make a graph, told before they read weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook


class GraphForwards:
    """Calls `prepare(module)` before each module's forward outside of a backward(), where gradients are enabled: the outermost
    module first, and before FSDP2 gathers its parameters. Holds `prepare`'s object weakly. From the constructor to remove().
    """

    def __init__(self, prepare: Callable[[nn.Module], None]):
        method = weakref.WeakMethod(prepare)

        def before(module: nn.Module, _: Any) -> None:
            if is_compiling() or not torch.is_grad_enabled():
                return
            if torch._C._current_graph_task_id() != -1:
                return
            bound = method()
            if bound is not None:
                bound(module)

        self._handle = register_module_forward_pre_hook(before)

    def remove(self) -> None:
        self._handle.remove()
