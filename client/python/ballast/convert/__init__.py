"""Converts the state of optimizers between the formats that trainers save: offline, without a daemon, a tensor at a
time.

    python -m ballast.convert checkpoint-500 optimizer.safetensors --to safetensors --verify

    from ballast.convert import convert
    convert("optimizer.pt", "optimizer_dcp", "dcp", names=["pytorch_model.bin"])

Formats, in and out: "torch" (files of torch.save), "safetensors", "dcp" (folders of torch.distributed.checkpoint,
FSDP's), "hf-trainer" (Trainer's folders), "flashoptim" and "bitsandbytes" (files of torch.save with state in 8 bits).
Between them everything is torch's state_dict: step, exp_avg, exp_avg_sq or momentum_buffer of each parameter, "master"
where a format has master weights of its own, and param_groups. Files are read without running anything that is in
them. Needs torch; to read safetensors, the package of that name.

Memory: while a tensor is written it is in memory, and what it is decoded from, besides pages of mapped files, which the
system takes back when it needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ballast.convert.conversion import Report, VerifyFailed, convert
    from ballast.convert.formats import FORMATS

__all__ = ["FORMATS", "Report", "VerifyFailed", "convert"]


def __getattr__(name: str) -> Any:
    """Imported when they are used: --help needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'ballast.convert' has no attribute '{name}'")
    return getattr(import_module("ballast.convert.conversion"), name)


def __dir__() -> list[str]:
    return list(__all__)
