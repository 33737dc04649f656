"""torch's gradient clipping, told about gradients that it cannot see.

torch.nn.utils.clip_grad_norm_ and clip_grad_value_ skip a parameter whose .grad is None; of a Ballast optimizer's
parameters that is every one, so the call would silently clip nothing. While such an optimizer is open the two functions
are replaced by ones that raise for its parameters and are the old ones for all others. A name imported from torch before
the first optimizer was made keeps the old function; there clip_grad_norm_ is still caught where torch has its inner
function (2.6 and later), clip_grad_value_ is not.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from ballast.errors import Rejected


class Owner(Protocol):
    def owns(self, parameter: Tensor) -> bool: ...


_PLACES: tuple[tuple[Any, str], ...] = (
    (torch.nn.utils, "clip_grad_norm_"),
    (torch.nn.utils, "clip_grad_value_"),
    (clip_grad, "clip_grad_norm_"),
    (clip_grad, "clip_grad_value_"),
    (clip_grad, "_clip_grads_with_norm_"),
)

_owners: weakref.WeakSet[Any] = weakref.WeakSet()
_originals: list[tuple[Any, str, Callable[..., Any]]] = []


def guard_clipping(owner: Owner) -> None:
    """From now on clipping a parameter that `owner` owns raises."""
    _owners.add(owner)
    if _originals:
        return
    for module, name in _PLACES:
        original = getattr(module, name, None)
        if original is not None:
            _originals.append((module, name, original))
            setattr(module, name, _guarded(original))


def release_clipping(owner: Owner | None) -> None:
    """`owner` is closed, or, None, one is deleted; with the last one torch's own functions are put back."""
    if owner is not None:
        _owners.discard(owner)
    if any(True for _ in _owners):  # its length still counts one that is just being deleted
        return
    while _originals:
        module, name, original = _originals.pop()
        setattr(module, name, original)


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(owner.owns(parameter) for owner in _owners for parameter in given):
            raise Rejected(
                f"{original.__name__.strip('_')} cannot clip parameters of a ballast optimizer: their gradients have left for "
                "the daemon during backward, .grad is None. Remove the call, and give the optimizer max_grad_norm= to clip by "
                "the norm over all tensors"
            )
        return original(given, *args, **kwargs)

    return clip
