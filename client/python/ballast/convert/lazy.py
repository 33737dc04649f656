"""A tensor that is not read yet. What passes through a conversion is these, so that one or two are in memory at
once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ballast.errors import Rejected

# Elements that are worked on at once where values are made anew: a multiple of every block of 8-bit codes.
PIECE = 1 << 18


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """shape and dtype are known, the values are not.

    read() gives them: a contiguous tensor on the CPU that is not to be written to. It is made anew by each call, or
    maps the file; nothing keeps it. sharded: it was saved in more than one piece. reordered: it was saved in another
    order of memory than its shape's (channels last).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    sharded: bool = False
    reordered: bool = False

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.numel * self.dtype.itemsize

    @property
    def is_scalar(self) -> bool:
        """Whether it is one number, as a count of steps or a learning rate may be."""
        return self.shape == ()

    def item(self) -> float:
        """The number that it is. Rejected if it is more than one."""
        if self.numel != 1:
            raise Rejected(f"a tensor of shape {self.shape} stands where one number is wanted")
        return self.read().item()


def constant(tensor: torch.Tensor) -> LazyTensor:
    """One that is in memory already: for small ones."""
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The values in memory, in C order, without a copy where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def pieces(numel: int) -> Iterator[tuple[int, int]]:
    """(first, past the last) of runs of PIECE elements."""
    for first in range(0, numel, PIECE):
        yield first, min(first + PIECE, numel)
