"""fully_shard (FSDP2), seen when it replaces a module's parameters by its own.

While an optimizer is open that watches, the method with which FSDP2 makes one sharded parameter of another tells it so: by
whatever name fully_shard was imported. A process that cannot shard, for it is alone, does not load FSDP2 for it.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ballast import _core
from ballast.errors import Rejected
from ballast.patch import Patch
from ballast.rank import launched

_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param"


class Watcher(Protocol):
    def before_sharding(self, parameter: Tensor) -> None:
        """A parameter is about to be replaced. What this raises keeps it from that."""

    def sharded(self, parameter: Tensor, made: Tensor) -> None:
        """`made` is in its place now."""


def watch(watcher: Watcher) -> None:
    """From now on it is told, where torch has FSDP2 and the process is, or may become, one of several."""
    global _watchers
    with _lock:
        if _watchers is None and _may_shard():
            kind: Any = getattr(_loaded(), "FSDPParam", None)
            _watchers = Patch((kind, "_init_sharded_param", _telling))
        if _watchers is not None:
            _watchers.hold(watcher)


def release(watcher: Watcher | None) -> None:
    """None: it is gone, and so from here."""
    if _watchers is not None:
        _watchers.release(watcher)


def refuse_in_backward() -> None:
    """Rejected in a backward(): weights or state of sharded parameters should have been gathered before its forward."""
    if torch._C._current_graph_task_id() != -1:
        raise Rejected(
            "the weights of sharded parameters go to the run before a module's forward, and this backward() is of a forward that "
            "the optimizer has not seen: make it, and load its state, before the forward, and call the module itself, not compiled "
            "in place (model.compile()), but by torch.compile(model), or with its blocks compiled",
            "FAILED_PRECONDITION",
        )


def refuse_orphans(parameters: Iterable[Tensor]) -> None:
    """Rejected if fully_shard has replaced these parameters unseen. Goes through all objects."""
    if _orphaned(parameters):
        raise Rejected(
            "no module has any of this optimizer's parameters, and one is sharded by FSDP, which has replaced them: make the "
            "optimizer after fully_shard(model). FullyShardedDataParallel (FSDP1) is not supported: write fully_shard",
            "FAILED_PRECONDITION",
        )


def _orphaned(parameters: Iterable[Tensor]) -> bool:
    """Whether a module of this process is sharded by FSDP, and none has any of these parameters: they were replaced unseen."""
    modules = _core.live_instances(nn.Module)
    kinds = {base.__name__ for kind in {type(module) for module in modules} for base in kind.__mro__}
    if not kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        return False
    held = {id(parameter) for module in modules for parameter in module._parameters.values()}
    return not any(id(parameter) in held for parameter in parameters)


def check_not_gathered(named: Iterable[tuple[str, Tensor]]) -> None:
    """Rejected, naming it, if a parameter is what FSDP2 has gathered for a forward: its memory comes and goes. Goes through all
    objects, a tenth of a second's work, where a process group stands, without which nothing is sharded."""
    kind = getattr(sys.modules.get(_MODULE), "FSDPParam", None)  # torch's compiler loads it, so nearly always there
    if kind is None or not torch.distributed.is_initialized():
        return
    gathered = {id(getattr(one, "_unsharded_param", None)) for one in _core.live_instances(kind)}
    for name, parameter in named:
        if id(parameter) in gathered:
            raise Rejected(
                f"parameter '{name}' is what FSDP has gathered for a forward, and frees after it: call model.reshard() before the "
                "optimizer is made, or make it before the first forward",
                "FAILED_PRECONDITION",
            )


def _may_shard() -> bool:
    if _MODULE in sys.modules:
        return True
    if not torch.distributed.is_available():
        return False
    return torch.distributed.is_initialized() or launched() > 1


def _loaded() -> Any:
    try:
        return importlib.import_module(_MODULE)
    except ModuleNotFoundError:  # a torch without FSDP2
        return None


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    def tell_and_shard(self: Any, parameter: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert _watchers is not None
        watchers = list(_watchers)
        for watcher in watchers:
            watcher.before_sharding(parameter)
        made = original(self, parameter, *args, **kwargs)
        for watcher in watchers:
            watcher.sharded(parameter, self.sharded_param)
        return made

    return tell_and_shard


_lock = threading.Lock()
_watchers: Patch[Watcher] | None = None
