"""Whether a GPU does an operation of a layer in one pass over memory."""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling


def kernels(x: Tensor, least: tuple[int, int] = (8, 0)) -> ModuleType | None:
    """ballast.nn.triton_kernels, where x is on a GPU that runs them, of that compute capability at least; None elsewhere, and
    under torch.compile, which makes kernels of its own."""
    if x.device.type != "cuda" or is_compiling() or type(x) not in (Tensor, nn.Parameter):
        return None
    if torch.cuda.get_device_capability(x.device) < least:
        return None
    return _tried(x.device)


@cache
def _tried(device: torch.device) -> ModuleType | None:
    """None, with a warning, where Triton does not do what it is asked: it is not there, or of another version, or has no C
    compiler, which it needs to launch anything."""
    try:
        from ballast.nn import triton_kernels

        codes, _ = triton_kernels.quantize_rows(torch.tensor([[-2.0, 1.0]], device=device))
        if codes.tolist() == [[-127, 64]]:
            return triton_kernels
        why = "it gives other codes than torch"
    except Exception as error:  # whatever Triton raises; torch's operations give the same bits
        why = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"layers in 8 bits on {device} take torch's operations, which take some three times as long: Triton does not run there "
        f"({why})",
        stacklevel=2,
    )
    return None


def transposed(codes: Tensor) -> Tensor:
    """Of a matrix of bytes; contiguous where a GPU's products want that."""
    fused = kernels(codes)
    return codes.t() if fused is None else fused.transposed(codes)
