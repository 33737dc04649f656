"""What layers in 8 bits do on a CUDA GPU, each in one pass over memory: torch would take one for each operation. The bits are
those of the operations, one after the other."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

_MOST = tl.constexpr(127.0)
_AT_ONCE = 8192  # columns of a row, or numbers
_SIDE = 128  # of a tile that is transposed
# Of a product: how large its tiles are, what launches it. The first is for large ones and needs 144 KiB of shared memory.
_LARGE = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 128, "GROUP": 8, "num_warps": 8, "num_stages": 3}
_SMALL = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64, "GROUP": 8, "num_warps": 4, "num_stages": 4}
_LARGE_SIDE = 1024  # which each side is above, measured on an H200
# Without it products and sums would be contracted, which rounds otherwise.
_AS_WRITTEN = {"enable_fp_fusion": False}


def quantize_rows(x: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As int8.quantize_rows of a matrix [rows, columns], of x * factors where there are some: fp32, one for each column."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if not x.numel():
        return codes, scales.zero_()
    at_once = min(_AT_ONCE, triton.next_power_of_2(columns))
    launch: Any = _quantize_row[(rows,)]
    with torch.cuda.device(x.device):
        launch(x, x.stride(0), columns, factors, codes, scales, at_once, num_warps=8, **_AS_WRITTEN)
    return codes, scales


@triton.jit
def _quantize_row(x, stride, columns, factors, codes, scales, AT_ONCE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = 0.0
    bad = 0
    for first in range(0, columns, AT_ONCE):
        values, _ = _of_row(x + row * stride, columns, first, factors, AT_ONCE)
        largest = tl.maximum(largest, tl.max(tl.abs(values)))
        bad = tl.maximum(bad, tl.max((values != values).to(tl.int32)))
    scale = tl.where(bad != 0, float("nan"), largest)
    tl.store(scales + row, scale)
    for first in range(0, columns, AT_ONCE):
        values, at = _of_row(x + row * stride, columns, first, factors, AT_ONCE)
        code = libdevice.rint(tl.div_rn(_MOST * values, scale + tl.zeros((AT_ONCE,), tl.float32)))
        code = tl.minimum(tl.maximum(code, -_MOST), _MOST)
        tl.store(codes + row * columns + at, tl.where(scale == 0, 0.0, code).to(tl.int8), at < columns)


@triton.jit
def _of_row(row, columns, first, factors, AT_ONCE: tl.constexpr):
    at = first + tl.arange(0, AT_ONCE)
    values = tl.load(row + at, at < columns, 0.0).to(tl.float32)
    if factors is not None:
        values = values * tl.load(factors + at, at < columns, 0.0)
    return values, at


def multiply(
    a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """As int8.product."""
    a, b = a.contiguous(), b.contiguous()
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=dtype, device=a.device)
    if not out.numel():
        return out
    has_room = torch.cuda.get_device_capability(a.device) in ((8, 0), (9, 0), (10, 0))
    sizes = _LARGE if has_room and min(n, k) > _LARGE_SIDE else _SMALL
    grid = (triton.cdiv(m, sizes["ROWS"]) * triton.cdiv(n, sizes["COLUMNS"]),)
    launch: Any = _multiply[grid]
    with torch.cuda.device(a.device):
        launch(a, b, of_a, of_b, bias, out, m, n, k, ONE=of_b is not None and of_b.numel() == 1, **sizes, **_AS_WRITTEN)
    return out


@triton.jit
def _multiply(
    a, b, of_a, of_b, bias, out, m, n, k,
    ONE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of the product. Those that read the same rows are near each other."""
    tiles_of_rows, tiles_of_columns = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    number = tl.program_id(0)
    group = number // (GROUP * tiles_of_columns)
    in_group = min(tiles_of_rows - group * GROUP, GROUP)
    row = group * GROUP + number % (GROUP * tiles_of_columns) % in_group
    column = number % (GROUP * tiles_of_columns) // in_group
    i = row * ROWS + tl.arange(0, ROWS)
    j = column * COLUMNS + tl.arange(0, COLUMNS)
    p = tl.arange(0, DEPTH)
    of_row = a + (i % m).to(tl.int64)[:, None] * k + p[None, :]
    of_column = b + (j % n).to(tl.int64)[None, :] * k + p[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for first in range(0, k, DEPTH):
        left = tl.load(of_row, p[None, :] < k - first, 0)
        right = tl.load(of_column, p[:, None] < k - first, 0)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
        of_row += DEPTH
        of_column += DEPTH
    result = total.to(tl.float32) * tl.div_rn(tl.load(of_a + i, i < m, 0.0), i * 0 + _MOST)[:, None]
    if of_b is not None:
        result = result * tl.div_rn(tl.load(of_b + (j * 0 if ONE else j), j < n, 0.0), j * 0 + _MOST)[None, :]
    if bias is not None:
        result = result + tl.load(bias + j, j < n, 0.0).to(tl.float32)[None, :]
    at = out + i.to(tl.int64)[:, None] * n + j[None, :]
    tl.store(at, result.to(out.dtype.element_ty), (i < m)[:, None] & (j < n)[None, :])


def transposed(codes: Tensor) -> Tensor:
    """Of a matrix of bytes, contiguous."""
    rows, columns = codes.shape
    out = torch.empty(columns, rows, dtype=codes.dtype, device=codes.device)
    if not out.numel():
        return out
    launch: Any = _transpose[(triton.cdiv(rows, _SIDE), triton.cdiv(columns, _SIDE))]
    with torch.cuda.device(codes.device):
        launch(codes.contiguous().view(torch.uint8), out.view(torch.uint8), rows, columns, _SIDE, num_warps=8)
    return out


@triton.jit
def _transpose(codes, out, rows, columns, SIDE: tl.constexpr):
    i = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    j = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    tile = tl.load(codes + i.to(tl.int64)[:, None] * columns + j[None, :], inside, 0)
    tl.store(out + j.to(tl.int64)[:, None] * rows + i[None, :], tl.trans(tile), tl.trans(inside))


def saturate(x: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """As served_codes.saturate, of fp32 products of x, contiguous, with the factor [1]."""
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not x.numel():
        return codes
    launch: Any = _saturate[(triton.cdiv(x.numel(), _AT_ONCE),)]
    with torch.cuda.device(x.device):
        launch(x, factor, codes, x.numel(), torch.finfo(dtype).max, _AT_ONCE, num_warps=8, **_AS_WRITTEN)
    return codes


@triton.jit
def _saturate(x, factor, codes, count, largest, AT_ONCE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    values = tl.load(x + at, at < count, 0.0).to(tl.float32)
    if factor is not None:
        values = values * tl.load(factor)
    finite = tl.abs(values) < float("inf")  # no NaN is
    held = tl.minimum(tl.maximum(values, -largest), largest)
    tl.store(codes + at, tl.where(finite, held, float("nan")).to(codes.dtype.element_ty), at < count)
