"""The daemon's masters of tensors of which the trainer has changed some elements by itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ballast import _core
from ballast.binding import Binding
from ballast.moments import MASTER, zeros
from ballast.pulls import pulled

# Of weights that are put in the place of others in 8 bits up to 1 in 40 are equal by chance, and their masters are others.
_BY_CHANCE = 1 / 16


def kept_masters(bindings: Iterable[Binding], client: _core.Client, run: str) -> dict[int, Tensor]:
    """By index, fp32 in host memory, what is to take the masters' place: of an element that is as the daemon serves it its
    own master, of any other the weight that is here. Of tensors only whose parameter may hold less than the master, and that
    have more such elements than come by chance. The bindings have loaded."""
    masters = {}
    for binding in bindings:
        if not binding.holds_less:
            continue
        unchanged = binding.landing == pulled(binding, client, run)
        if unchanged.sum() > (_BY_CHANCE * unchanged.numel() if binding.served_narrower else 0):
            master = zeros(binding.shape)
            client.pull_state(run, [(binding.index, MASTER, master.data_ptr(), master.nbytes)])
            masters[binding.index] = torch.where(unchanged, master, binding.landing.float())
    return masters
