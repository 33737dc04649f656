"""What a version changes of one tensor, as inference engines put it in place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class WeightPatch(NamedTuple):
    """What Subscriber.patches() gives, in the order of vLLM's CheckpointWeightPatch: CheckpointWeightPatch(*patch).

    name, shape, dtype: of the tensor, as the run has it.
    values: one dimension, on the CPU, in dtype: the elements at `indices`, or all of them, flattened, where there are none.
    indices: int64, ascending: places in the flattened tensor; None: the tensor comes whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    indices: Tensor | None
