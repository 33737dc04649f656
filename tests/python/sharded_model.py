"""A model that fully_shard (FSDP2) shards, its data, and its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import ballast
from forks import Order

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
EXACT: dict[str, Any] = {"master": "fp32", "state": "fp32", "gradient_dtype": "fp32"}
WORDS = 11
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Blocks(nn.Module):
    """A small language model. Its sizes are odd, so that ranks have unequal parts, and at 8 ranks some have none."""

    def __init__(self, case: dict[str, Any]):
        super().__init__()
        torch.manual_seed(case.get("seed", 1))
        self._checkpointed = bool(case.get("checkpointed"))
        self.embed = nn.Embedding(WORDS, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 6)) for _ in range(3))
        self.head = nn.Linear(6, WORDS, bias=False)
        if case.get("tied"):
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self._checkpointed else block(x))
        scores: Tensor = self.head(x)
        return scores


def shard(model: Blocks, case: dict[str, Any]) -> None:
    world = distributed.get_world_size()
    if case.get("mesh"):
        mesh = DeviceMesh("cpu", case["mesh"], mesh_dim_names=("replicate", "shard"))
    elif case.get("replicas"):
        shape = (case["replicas"], world // case["replicas"])
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    formats = {name: DTYPES[value] for name, value in case.get("mixed", {}).items()}
    how: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**formats)}
    if case.get("offloaded"):
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in [] if case.get("one group") else model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    tokens = torch.randint(WORDS, (2, 9), generator=random)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    tokens, wanted = batch(step, micro, rank)
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), wanted.flatten())


def whole(model: nn.Module) -> dict[str, list[float]]:
    """The weights, which all ranks put together."""
    return {name: full(parameter).flatten().tolist() for name, parameter in model.named_parameters()}


def full(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def made_again(order: Order) -> tuple[nn.Module, ballast.Optimizer]:
    """The case's "kind" is the optimizer's name in ballast; AdamW if it has none."""
    case = order["case"]
    model = Blocks(case)
    shard(model, case)
    options = {**ADAMW, "server": order["server"], "run": order["run"], **case.get("options", {})}
    return model, getattr(ballast, case.get("kind", "AdamW"))(model.named_parameters(), **options)
