"""Modules wrapped in DistributedDataParallel: while a ballast optimizer trains one, its own reduction of gradients is off,
for the daemon takes the mean over the ranks.

A parameter does not tell what wraps it. So while an optimizer is open, DistributedDataParallel.forward is replaced by one
that looks whose parameters the module has, whichever was made first; and when a run is joined, live modules are looked
through once, for the sake of a forward before the optimizer was made. What DDP does to buffers, and to parameters when it is
made, stays (codes that are in a parameter's place become weights for that). Of options that change how gradients are reduced, those that would be lost are refused by name.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed
from torch import Tensor, nn

from ballast import _core
from ballast.errors import Rejected
from ballast.patch import Patch
from ballast.rank import MAKE_IT_LATER, Rank
from ballast.reducer import SilentReducer
from ballast.weight_codes import give_weights_back

DDP = nn.parallel.DistributedDataParallel


class Trainer(Protocol):
    """What an open optimizer is to the modules that it trains."""

    @property
    def rank(self) -> Rank:
        """Which of its run's it is."""

    def trains(self, parameter: Tensor) -> bool: ...

    def hear(self, synchronized: bool) -> None:
        """A module with its parameters begins a forward that makes a graph, under no_sync() or not."""


_silent: weakref.WeakKeyDictionary[DDP, SilentReducer] = weakref.WeakKeyDictionary()


def watch(trainer: Trainer) -> None:
    """From now on modules in DDP that `trainer` trains do not reduce gradients; Rejected in the forward of one that must."""
    _trainers.hold(trainer)


def release(trainer: Trainer | None) -> None:
    """Its modules reduce again; with the last one DDP is torch's own. None: it is gone, and so from here."""
    _trainers.release(trainer)
    for module in list(_silent):
        if not _trainers_of(module):
            _restore(module)


def find_wrapped() -> None:
    """Switches off the reduction of live modules without waiting for their next forward. Rejected as that would be."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    for module in _core.live_instances(DDP):
        if trainers := _trainers_of(module):
            _silence(module, trainers)


def _announced(forward: Callable[..., Any]) -> Callable[..., Any]:
    def announce(self: DDP, *inputs: Any, **kwargs: Any) -> Any:
        _before_forward(self)
        return forward(self, *inputs, **kwargs)

    return announce


def _with_weights(make: Callable[..., Any]) -> Callable[..., Any]:
    """DDP's constructor sends rank 0's parameters to the others: those for which codes stand in have weights meanwhile."""

    def make_with_weights(self: DDP, module: nn.Module, *options: Any, **more: Any) -> Any:
        for parameter in module.parameters():
            give_weights_back(parameter)
        return make(self, module, *options, **more)

    return make_with_weights


_trainers: Patch[Trainer] = Patch((DDP, "forward", _announced), (DDP, "__init__", _with_weights))


def _before_forward(module: DDP) -> None:
    trainers = _trainers_of(module)
    if not trainers:
        _restore(module)
        return
    _silence(module, trainers)
    _check_join(module)
    if torch.is_grad_enabled():
        _check_all_trained(module)
        for trainer in trainers:
            trainer.hear(module.require_backward_grad_sync)


def _trainers_of(module: DDP) -> list[Trainer]:
    return [t for t in _trainers if any(p.requires_grad and t.trains(p) for p in module.parameters())]


def _silence(module: DDP, trainers: list[Trainer]) -> None:
    for trainer in trainers:
        _check_world(module, trainer)
    _check_options(module)
    if module not in _silent:
        _check_ignored(module)
        _silent[module] = SilentReducer(module)


def _restore(module: DDP) -> None:
    silent = _silent.pop(module, None)
    if silent is not None:
        silent.restore(module)


# --- what is refused ------------------------------------------------------------------------------------------------


def _check_world(module: DDP, trainer: Trainer) -> None:
    size, rank = module.process_group.size(), trainer.rank
    if size == rank.world:
        return
    if rank.world_given:
        fix = "Give rank= and world= as they are in that group, and each group a run of its own; or leave process_group= out"
    else:
        fix = f"That is the default, for torch.distributed was not initialized when the optimizer was made: {MAKE_IT_LATER}"
    raise Rejected(
        f"a DistributedDataParallel module's process group has {size} ranks, and the run has world={rank.world}: the "
        f"daemon takes the mean over all ranks of the run. {fix}",
        "FAILED_PRECONDITION",
    )


def _check_options(module: DDP) -> None:
    """Rejected if the module was told to do something with gradients that would not be done."""
    in_backward = any(hasattr(parameter, "_in_backward_optimizers") for parameter in module._module_parameters)
    for given, what, instead in (
        (
            in_backward,
            "parameters with an optimizer of their own (apply_optimizer_in_backward)",
            "Leave that out",
        ),
        (
            _hooked(module),
            "a communication hook (register_comm_hook)",
            "Leave it out; gradient_dtype='bf16', of the optimizer, sends gradients in 2 bytes",
        ),
        (module.mixed_precision, "mixed_precision=", "Leave it out and use torch.autocast"),
        (
            module._delay_all_reduce_params,
            "delay_all_reduce_named_params=",
            "Leave it and param_to_hook_all_reduce= out",
        ),
        (
            getattr(module, "_use_python_reducer", False),
            "torch._dynamo.config.optimize_ddp='python_reducer'",
            "Set it to True before the module is made",
        ),
    ):
        if given:
            raise Rejected(
                f"a DistributedDataParallel module has {what}, which works on gradients as the module reduces them: a ballast "
                f"optimizer's are not, they go to the daemon. {instead}",
                "FAILED_PRECONDITION",
            )


def _hooked(module: DDP) -> bool:
    if module.logger is None:  # it leaves its constructor early where all parameters are delayed
        return False
    if module._comm_hooks:
        return True
    return module not in _silent and "comm_hook" in module._get_ddp_logging_data()  # type: ignore[no-untyped-call]


def _check_join(module: DDP) -> None:
    if module._join_config.enable:
        raise Rejected(
            "join() of a DistributedDataParallel module: a rank that has run out of batches makes no steps, and those of the "
            "others would wait for it. Give every rank the same number of batches, as DistributedSampler does, or loop over "
            "optimizer.in_step(loader), and leave join() out",
            "FAILED_PRECONDITION",
        )


def _check_ignored(module: DDP) -> None:
    for name, parameter in module.module.named_parameters():
        if name in module.parameters_to_ignore and any(t.trains(parameter) for t in _trainers):
            raise Rejected(
                f"parameter '{name}' is one that a DistributedDataParallel module ignores, so that each rank has its own; a "
                "run has one for all ranks. Do not have it ignored, or give it to another optimizer",
                "FAILED_PRECONDITION",
            )


def _check_all_trained(module: DDP) -> None:
    trainers = list(_trainers)
    for parameter in module._module_parameters:
        if parameter.requires_grad and not any(trainer.trains(parameter) for trainer in trainers):
            name = next(name for name, p in module.named_parameters() if p is parameter)
            raise Rejected(
                f"parameter '{name}' of a DistributedDataParallel module is trained by no ballast optimizer, and others of the "
                f"module are: it does not reduce gradients then, and this one's would differ from rank to rank. {_advice()}",
                "FAILED_PRECONDITION",
            )


def _advice() -> str:
    loaded = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if loaded is not None and _core.live_instances(loaded.ZeroRedundancyOptimizer):
        return (
            "A ZeroRedundancyOptimizer gives each rank a part of the parameters: leave it out, and give a ballast optimizer all of "
            "them; their state is in the daemon"
        )
    return "Give it to a ballast optimizer, freeze it (requires_grad_(False)), or wrap it apart from the others"
