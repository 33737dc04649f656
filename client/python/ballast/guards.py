"""torch's gradient clipping, told about gradients that it cannot see.

Of a ballast optimizer's parameters `.grad` holds no values once backward() has made them. While such an optimizer is open,
torch.nn.utils.clip_grad_norm_, get_total_norm and clip_grads_with_norm_ ask the daemon for its parameters, and are torch's
own for all others. A name imported from torch before the first optimizer was made keeps torch's function: clip_grad_norm_
then comes here by the two inner ones where torch has them (2.6 and later), and raises where it has not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from ballast.errors import Rejected
from ballast.patch import Patch
from ballast.sent_gradient import sent_in
from ballast.shard import replicated


class Owner(Protocol):
    """trains: whether it has the parameter. clip: as Steps.clip."""

    def trains(self, parameter: Tensor) -> bool: ...
    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> float | None: ...


def guard_clipping(owner: Owner) -> None:
    """From now on clipping parameters that `owner` trains is the daemon's."""
    _owners.hold(owner)


def release_clipping(owner: Owner | None) -> None:
    """`owner` is closed, or, None, one is deleted; with the last one torch's own functions are put back."""
    _owners.release(owner)


# --- in place of torch's functions, which come first ----------------------------------------------------------------


def _clip_grad_norm_(
    original: Callable[..., Tensor],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    given = _listed(parameters)
    owner = _owner_of(given, "clip_grad_norm_")
    norm = None if owner is None else owner.clip(given, _checked("clip_grad_norm_", float(max_norm), norm_type))
    if norm is None:
        return original(given, max_norm, norm_type, error_if_nonfinite, foreach)
    return _answer(norm, given[0], error_if_nonfinite)


def _get_total_norm(
    original: Callable[..., Tensor],
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    given = _listed(tensors)
    parameters = [sent.parameter() for sent in map(sent_in, given) if sent is not None]
    if not parameters:
        return original(given, norm_type, error_if_nonfinite, foreach)
    if len(parameters) < len(given):
        raise _mixed("get_total_norm")
    known = [parameter for parameter in parameters if parameter is not None]
    owner = _owner_of(known, "get_total_norm")
    norm = None if owner is None else owner.clip(known, _checked("get_total_norm", math.inf, norm_type))
    if norm is None:
        raise Rejected("get_total_norm of gradients whose step was ended: call it between backward() and step()")
    return _answer(norm, given[0], error_if_nonfinite)


def _clip_grads_with_norm_(
    original: Callable[..., None],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    given = _listed(parameters)
    owner = _owner_of(given, "clip_grads_with_norm_")
    norm = None if owner is None else owner.clip(given, math.inf)
    if owner is None or norm is None:
        return original(given, max_norm, total_norm, foreach)
    if float(total_norm) != float(_answer(norm, given[0], False)):
        raise Rejected(
            f"clip_grads_with_norm_(total_norm={float(total_norm)}) of a ballast optimizer's parameters, whose gradient has the "
            f"norm {norm}: give what get_total_norm returns for their gradients, all of them"
        )
    owner.clip(given, _checked("clip_grads_with_norm_", float(max_norm), 2.0))


def _clip_grad_value_(
    original: Callable[..., None], parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any
) -> None:
    given = _listed(parameters)
    if _owner_of(given, "clip_grad_value_") is not None:
        raise Rejected(
            "clip_grad_value_ cannot clip the gradients of a ballast optimizer's parameters, which have left for the daemon: "
            "clip by the norm (clip_grad_norm_, max_grad_norm=), or each tensor by its own (tensor_clip='adagc')"
        )
    original(given, *args, **kwargs)


_GUARDED: dict[str, Callable[..., Any]] = {
    "clip_grad_norm_": _clip_grad_norm_,
    "clip_grad_value_": _clip_grad_value_,
    "get_total_norm": _get_total_norm,
    "_get_total_norm": _get_total_norm,
    "clip_grads_with_norm_": _clip_grads_with_norm_,
    "_clip_grads_with_norm_": _clip_grads_with_norm_,
}
_owners: Patch[Owner] = Patch(
    *(
        (module, name, functools.partial(functools.partial, guarded))
        for name, guarded in _GUARDED.items()
        for module in (torch.nn.utils, clip_grad)
    )
)


# --- what they have in common ---------------------------------------------------------------------------------------


def _listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _owner_of(parameters: list[Tensor], name: str) -> Owner | None:
    """Who trains them; None: nobody. Rejected if some are another's, which have one norm with these."""
    owners = list(_owners)
    trained = [next((one for one in owners if one.trains(p)), None) for p in parameters if p.requires_grad]
    ours = next((one for one in trained if one is not None), None)
    with_gradient = [p for p in parameters if p.requires_grad and p.grad is not None]
    if ours is not None and any(not ours.trains(p) for p in with_gradient):
        raise _mixed(name)
    return ours


def _mixed(name: str) -> Rejected:
    return Rejected(
        f"{name} of parameters of which a ballast optimizer trains some, and others not: the daemon knows the norm of its own "
        "alone. Call it for the parameters of each optimizer"
    )


def _checked(name: str, max_norm: float, norm_type: Any) -> float:
    if float(norm_type) != 2.0:
        raise Rejected(
            f"{name}(norm_type={norm_type}) of a ballast optimizer's parameters: the daemon clips by the L2 norm, 2.0"
        )
    if not max_norm > 0:
        raise Rejected(
            f"{name}(max_norm={max_norm}) of a ballast optimizer's parameters: it must be above 0; inf only measures, and "
            "zero_grad() drops the gradients"
        )
    return max_norm


def _answer(norm: float, like: Tensor, error_if_nonfinite: bool) -> Tensor:
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"The total norm of the gradient is {norm}, so it cannot be clipped. To have the step go on all the same, leave "
            "error_if_nonfinite out; the option nonfinite= says what it does then"
        )
    return replicated(like, torch.tensor(norm, dtype=torch.float32, device=like.device))
