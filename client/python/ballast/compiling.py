"""Whether torch.compile traces what runs now."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch


def _by_dynamo() -> bool:
    dynamo = sys.modules.get("torch._dynamo")  # without it nothing is traced
    return dynamo is not None and bool(dynamo.is_compiling())


# torch 2.2 has no torch.compiler.is_compiling.
is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", _by_dynamo)
