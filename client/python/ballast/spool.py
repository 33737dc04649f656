"""Tensors that need not stay in memory until they are sent."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor

_ALIGNED = 64


def spooled_bytes(tensor_bytes: int) -> int:
    """What a tensor takes of a spool."""
    return -(-tensor_bytes // _ALIGNED) * _ALIGNED


class Spool:
    """Copies of tensors, in a file without a name in the folder for temporary files (TMPDIR), which is mapped: the system
    writes pages out and takes them back. It is there as long as one of them. OSError where the folder has no room.
    """

    def __init__(self, nbytes: int):
        """nbytes: the sum of their spooled_bytes(); above 0."""
        with tempfile.TemporaryFile(prefix="ballast-") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)  # or a full disk is found out by a signal
            self._memory = mmap.mmap(file.fileno(), nbytes)
        self._used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of it, on the CPU."""
        place = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += spooled_bytes(place.nbytes)
        return place.copy_(tensor.reshape(-1)).view(tensor.shape)
