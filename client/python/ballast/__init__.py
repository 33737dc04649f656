"""Ballast: an optimizer that lives on another device. See ballast.AdamW and ballast.Optimizer.

ballast.numerics is imported by itself and needs numpy alone; what trains needs torch, and imports it when first used.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ballast.errors import BallastError, Rejected, RunFenced, RunRewound, Unavailable
from ballast.following import Follow
from ballast.joined import Joined
from ballast.result import StepResult, StepTiming
from ballast.scales import umup_scales
from ballast.spikes import SpikeEvent, Spikes

if TYPE_CHECKING:
    from ballast.follower import Follower, follow
    from ballast.optimizer import Optimizer
    from ballast.options import RunOptions
    from ballast.rules import SGD, Adam, AdamW, CollageLight, CollagePlus, Lion, Muon, StableAdamW
    from ballast.runs import delete_run
    from ballast.scaler import GradScaler
    from ballast.subscriber import Subscriber, Version
    from ballast.tls import Tls
    from ballast.weight_patch import WeightPatch

__version__ = version("ballast-optim")

# What is public: dir(ballast), and what `from ballast import *` brings.
__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "BallastError",
    "CollageLight",
    "CollagePlus",
    "Follow",
    "Follower",
    "GradScaler",
    "Joined",
    "Lion",
    "Muon",
    "Optimizer",
    "Rejected",
    "RunFenced",
    "RunOptions",
    "RunRewound",
    "SpikeEvent",
    "Spikes",
    "StableAdamW",
    "StepResult",
    "StepTiming",
    "Subscriber",
    "Tls",
    "Unavailable",
    "Version",
    "WeightPatch",
    "__version__",
    "delete_run",
    "follow",
    "nn",
    "numerics",
    "umup_scales",
]

_MODULES = {
    "Follower": "ballast.follower",
    "GradScaler": "ballast.scaler",
    "Optimizer": "ballast.optimizer",
    "RunOptions": "ballast.options",
    "Subscriber": "ballast.subscriber",
    "Tls": "ballast.tls",
    "Version": "ballast.subscriber",
    "WeightPatch": "ballast.weight_patch",
    "delete_run": "ballast.runs",
    "follow": "ballast.follower",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ballast' has no attribute '{name}'")
    if name == "numerics":
        return import_module("ballast.numerics")
    _check_torch()
    if name == "nn":
        return import_module("ballast.nn")
    return getattr(import_module(_MODULES.get(name, "ballast.rules")), name)


def _check_torch() -> None:
    """ImportError where there is none, or one under which training has been seen to go wrong."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("ballast needs torch 2.4 or later: pip install torch (or ballast-optim[torch])") from error
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4):
        raise ImportError(f"ballast needs torch 2.4 or later, and this is {torch.__version__}: pip install -U torch")


def __dir__() -> list[str]:
    return list(__all__)
