"""Modules that reduce gradients themselves, and with which a parameter would be reduced twice."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch.distributed
from torch import nn

from ballast.errors import Rejected
from ballast.parameters import NamedParameter


def refuse_wrapped(entries: Iterable[NamedParameter]) -> None:
    """Rejected, naming the wrapper, if a live DistributedDataParallel module has one of the parameters.

    A parameter does not tell what wraps it, so all live objects are looked through; only where torch.distributed is
    initialized, for otherwise there is no such module.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    ours = {id(entry.parameter): entry.name for entry in entries}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), nn.parallel.DistributedDataParallel):
            continue
        for parameter in candidate.parameters():
            if id(parameter) in ours:
                raise Rejected(
                    f"parameter '{ours[id(parameter)]}' is in a {type(candidate).__name__} module, which reduces gradients "
                    "before they could leave: give the plain module's parameters and drop the wrapper; the daemon takes "
                    "the mean over the ranks",
                    "FAILED_PRECONDITION",
                )
