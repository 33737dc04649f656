"""The optimizers that are compared, each with the same learning rate, betas and decay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

LEARNING = {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
FP32 = {"master": "fp32", "state": "fp32"}
BF16 = {"gradient_dtype": "bf16"}
REFERENCE = "torch AdamW, fused"


def torch_adamw(model: torch.nn.Module, _server: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **LEARNING, fused=True)


def torchao_offload(model: torch.nn.Module, _server: str) -> torch.optim.Optimizer:
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **LEARNING, fused=True)


def bitsandbytes_8bit(model: torch.nn.Module, _server: str) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(model.parameters(), **LEARNING)


def through_ballast(commit: str, **options: str) -> Callable[[torch.nn.Module, str], torch.optim.Optimizer]:
    def make(model: torch.nn.Module, server: str) -> torch.optim.Optimizer:
        import ballast

        chosen = {"run": "minilm", "commit": commit, "gradient_accumulation_steps": 1, **options}
        return ballast.AdamW(model.named_parameters(), **LEARNING, server=server, **chosen)

    return make


@dataclass(frozen=True)
class Arm:
    name: str
    make: Callable[[torch.nn.Module, str], torch.optim.Optimizer]  # of the model and the daemon's address
    remote: bool = False  # has a daemon, of its own
    quick: bool = False  # is in the short form, too


ARMS = [
    Arm(REFERENCE, torch_adamw, quick=True),
    Arm("torchao CPUOffloadOptimizer", torchao_offload),
    Arm("bitsandbytes AdamW8bit", bitsandbytes_8bit),
    Arm("Ballast, release", through_ballast("release"), remote=True, quick=True),
    Arm("Ballast, staged", through_ballast("staged"), remote=True),
    Arm("Ballast, release, gradients in bf16", through_ballast("release", **BF16), remote=True),
    Arm("Ballast, release, fp32 formats", through_ballast("release", **FP32), remote=True, quick=True),
    Arm("Ballast, staged, fp32 formats", through_ballast("staged", **FP32), remote=True, quick=True),
]


def arm_named(name: str) -> Arm:
    return next(arm for arm in ARMS if arm.name == name)
