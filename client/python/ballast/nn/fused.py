"""Whether a GPU does an operation of a layer in one pass over memory."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ballast.compiling import is_compiling


def kernels(x: Tensor) -> ModuleType | None:
    """ballast.nn.triton_kernels, where x is on a GPU that runs them and Triton is there, which torch's packages for CUDA bring;
    None under torch.compile, which makes kernels of its own."""
    if x.device.type != "cuda" or is_compiling() or not _has_triton():
        return None
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return None
    from ballast.nn import triton_kernels

    return triton_kernels


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def transposed(codes: Tensor) -> Tensor:
    """Of a matrix of bytes; contiguous where a GPU's products want that."""
    fused = kernels(codes)
    return codes.t() if fused is None else fused.transposed(codes)
