"""What `.grad` is of a parameter whose gradient has left for the daemon."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ballast.errors import Rejected
from ballast.shard import is_sharded, local_of


def _refused(method: str) -> Any:
    """In the place of a method of torch's that reads or writes memory itself, without a word to __torch_dispatch__."""

    def refuse(self: SentGradient, *args: Any, **kwargs: Any) -> NoReturn:
        raise Rejected(_refusal(self, f"{method}()"))

    return refuse


class SentGradient(Tensor):
    """Stands in `.grad` from when a gradient has left until step(). It has the parameter's shape, dtype and device, and
    no values: a norm, a check or a change made by hand raises Rejected, which names the parameter, and would else find
    nothing and go on. `.grad is not None` tells that there is a gradient; setting it to None takes the gradient back.

    parameter: calling it gives the parameter; None once that is deleted.

    Of a sharded parameter it is of this rank's part, and `.grad` a DTensor of it: see sent_in().

    A further backward() adds its gradient to this: take_arrived() hands it out. Nobody else adds to it.

    Written by autograd's threads and by the trainer's, never at one time.
    """

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str, staged: bool) -> SentGradient:
        make: Any = Tensor._make_wrapper_subclass  # torch declares no types for it
        local = local_of(parameter)
        sent: SentGradient = make(
            cls,
            local.shape,
            strides=local.stride(),
            dtype=local.dtype,
            device=local.device,
            requires_grad=False,
        )
        return sent

    def __init__(self, parameter: Tensor, name: str, staged: bool):
        """staged: nothing is updated before step()."""
        self.parameter_name = name
        self.staged = staged
        self.parameter = weakref.ref(parameter)
        self._arrived: Tensor | None = None

    def take_arrived(self) -> Tensor | None:
        """The gradient that was added since the last call."""
        arrived, self._arrived = self._arrived, None
        return arrived

    @property
    def data(self) -> Tensor:
        raise Rejected(_refusal(self, ".data"))

    @data.setter
    def data(self, values: Tensor) -> None:
        if not isinstance(values, SentGradient):  # as model.to() sets it, to where it is
            raise Rejected(_refusal(self, "setting .data"))

    def share_memory_(self) -> SentGradient:
        """Nothing, as a module's share_memory() asks for: there is no memory, and torch's own would read it."""
        return self

    numpy = _refused("numpy")
    tolist = _refused("tolist")
    apply_ = _refused("apply_")
    map_ = _refused("map_")
    map2_ = _refused("map2_")
    __dlpack__ = _refused("__dlpack__")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Rejected(_refusal(self, "pickling"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SentGradient('{self.parameter_name}', shape={tuple(self.shape)}, dtype={self.dtype})"

    # torch's functions come to __torch_dispatch__, without a step in between.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in _ADDS and _is_autograds(args, kwargs, cls):
            args[0]._arrived = args[1]
            # create_graph=True: autograd puts the sum in .grad, in place of this
            return args[0] if function is torch.ops.aten.add_.Tensor else args[1]
        raise Rejected(_refusal(_first([*args, *(kwargs or {}).values()], cls), str(function)))


# By which autograd adds a gradient to .grad.
_ADDS = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)


def _is_autograds(args: Sequence[Any], kwargs: Mapping[str, Any] | None, kind: type[SentGradient]) -> bool:
    """Whether it is autograd that adds: within a backward(), a gradient as it is. Who adds by hand, noise or a decay, would
    else be told that it is done."""
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward and not kwargs and len(args) == 2 and isinstance(args[0], kind) and not isinstance(args[1], kind)


def sent_in(grad: Tensor | None) -> SentGradient | None:
    """The SentGradient that `.grad` is, or that a DTensor there is made of; None: it is another."""
    local = grad if grad is None or not is_sharded(grad) else local_of(grad)
    return local if isinstance(local, SentGradient) else None


def _first(values: Any, kind: type[SentGradient]) -> SentGradient | None:
    """The first one of its kind, in lists too."""
    for value in values:
        if isinstance(value, kind):
            return value
        if isinstance(value, (list, tuple)) and (found := _first(value, kind)) is not None:
            return found
    return None


def _refusal(sent: SentGradient | None, function: str) -> str:
    name = "a parameter" if sent is None else f"'{sent.parameter_name}'"
    if "_amp_" in function:
        return (
            f"torch's GradScaler cannot unscale the gradient of {name}, which has left for the daemon: use "
            "ballast.GradScaler(optimizer) in its place, or bfloat16 without one (enabled=False). The gradients of this step are "
            "scaled: drop them with zero_grad(), or, of a release run, which may have applied them, start from a new run"
        )
    if sent is not None and sent.staged:
        norm = "optimizer.clip_grad_norm_(max_norm) clips, and returns the norm of the whole gradient; with inf it only measures"
    else:
        norm = (
            "with commit='staged' optimizer.clip_grad_norm_(max_norm) clips, and returns the norm of the whole gradient"
        )
    return (
        f"the gradient of {name} has left for the daemon, and .grad holds no values: {function} cannot be computed of it. "
        f"{norm[0].upper()}{norm[1:]}. A hook that the parameter's register_hook() adds sees its gradient when it is made"
    )
