"""Products of int8 codes, with exact sums."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ballast.nn import fused
from ballast.served_codes import MOST, divided, quantize

# So many products of two codes, at most 127 * 127 each, fp32 adds without rounding, in any order.
_EXACT = 1024
# So many int32 holds.
MOST_SUMMED = (2**31 - 1) // 127**2

Product = Callable[[Tensor, Tensor], Tensor]


def quantize_rows(x: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """int8 codes of a matrix [rows, columns], each row by its largest |x|; and those, fp32 [rows, 1]. A row with a NaN or an
    infinity has a scale that is not finite, and so has every product with it. factors: fp32, one for each column, which x is
    multiplied by before."""
    kernels = fused.kernels(x)
    if kernels is not None:
        codes, largest = kernels.quantize_rows(x, factors)
        return codes, largest
    values = x.float() if factors is None else x.float() * factors
    scales = values.abs().amax(-1, keepdim=True)
    return quantize(values, scales), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32."""
    return codes.float() * divided(scales, MOST)


def product(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """int8 a [m, k] times the transpose of int8 b [n, k]; times their scales, of_a [m, 1] and of_b [1] or [n]; and the bias: [m, n],
    rounded once."""
    kernels = fused.kernels(a)
    if kernels is not None:
        made: Tensor = kernels.multiply(a, b, of_a, of_b, bias, dtype)
        return made
    result = matmul(a, b.t()) * divided(of_a, MOST)
    if of_b is not None:
        result = result * divided(of_b, MOST)
    return (result if bias is None else result + bias.float()).to(dtype)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of int8 [m, k] and [k, n], summed exactly: int32 on CUDA (torch._int_mm), else fp32, rounded once where
    a sum is above 2**24. k is at most MOST_SUMMED."""
    if a.device.type == "cuda":
        return _on_tensor_cores(a, b)
    # oneDNN's has no shapes for tensors that have no memory, on the device meta or in FakeTensorMode.
    has_values = type(a) is Tensor and a.device.type == "cpu" and not is_compiling()
    return (_cpu_product() if has_values else by_fp32)(a, b)


def reference(a: Tensor, b: Tensor) -> Tensor:
    """The same in integers, on any device."""
    return (a.long()[:, :, None] * b.long()[None]).sum(1) if a.device.type == "cuda" else a.long() @ b.long()


def by_fp32(a: Tensor, b: Tensor) -> Tensor:
    """In fp32's products: exact within slices of k, which are added in int32."""
    if a.shape[1] <= _EXACT:
        return a.float() @ b.float()
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32, device=a.device)
    for first in range(0, a.shape[1], _EXACT):
        total += (a[:, first : first + _EXACT].float() @ b[first : first + _EXACT].float()).to(torch.int32)
    return total.float()


def by_onednn(a: Tensor, b: Tensor) -> Tensor:
    """By oneDNN's int8 product: exact with VNNI or AMX, and not without, where it adds in 16 bits that saturate."""
    ops = torch.ops.onednn
    packed = ops.qlinear_prepack(b.t().contiguous(), list(a.shape))
    ones = torch.ones(b.shape[1], device="cpu", dtype=torch.float32)
    none = torch.zeros(b.shape[1], device="cpu", dtype=torch.int32)
    product: Tensor = ops.qlinear_pointwise(
        a.contiguous(), 1.0, 0, packed, ones, none, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


def is_exact(product: Product) -> bool:
    """Whether it has the sums of the largest codes, and of others."""
    generator = torch.Generator("cpu").manual_seed(0)
    a = torch.randint(-127, 128, (8, 256), dtype=torch.int8, device="cpu", generator=generator)
    b = torch.randint(-127, 128, (256, 16), dtype=torch.int8, device="cpu", generator=generator)
    a[0], b[:, 0] = 127, 127
    a[1], b[:, 1] = -127, -127
    try:
        return bool((product(a, b).long() == reference(a, b)).all())
    except (AttributeError, RuntimeError, TypeError):  # another torch's has other arguments, or none
        return False


def is_faster(product: Product, than: Product) -> bool:
    """Whether it is on this machine. oneDNN has a product for any processor, which on one that it has no code for takes a thousand times
    as long."""
    codes = torch.full((256, 256), 127, dtype=torch.int8, device="cpu")
    return _seconds(product, codes) < _seconds(than, codes)


def _seconds(product: Product, codes: Tensor) -> float:
    """Of one of the first few, whichever took least; of the first where that took long."""
    taken: list[float] = []
    while len(taken) < 4 and (not taken or taken[0] < 0.2):
        began = perf_counter()
        product(codes, codes)
        taken.append(perf_counter() - began)
    return min(taken)


_chosen: list[Product] = []


def _cpu_product() -> Product:
    """The faster of those that are exact on this machine: the results are the same."""
    if not _chosen:
        faster = is_exact(by_onednn) and is_faster(by_onednn, than=by_fp32)
        _chosen.append(by_onednn if faster else by_fp32)
    return _chosen[0]


# torch._int_mm takes no fewer rows on CUDA, and other dimensions by eights: the layers see to those.
_ROWS = 32


def _on_tensor_cores(a: Tensor, b: Tensor) -> Tensor:
    columns = (
        b.t().contiguous().t()
    )  # cuBLASLt takes the first one by rows and the second by columns; others not everywhere
    lacking = _ROWS - a.shape[0]
    if lacking > 0:
        return torch._int_mm(torch.nn.functional.pad(a, (0, 0, 0, lacking)), columns)[: a.shape[0]]
    return torch._int_mm(a.contiguous(), columns)
