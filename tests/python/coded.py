"""Models whose layers compute in the codes that a daemon serves, and what is seen of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ballast
from ballast import nn as bnn

Kind = tuple[type[bnn.CodedLinear], dict[str, Any]]

KINDS: dict[str, Kind] = {
    "int8-tensor": (bnn.SwitchBackLinear, {}),
    "int8-row": (bnn.SwitchBackLinear, {"variant": "q"}),
    "fp8-e4m3": (bnn.Float8Linear, {"scale": None}),
}
WIDTH = 32


def model_of(format: str = "int8-tensor", seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH), nn.LayerNorm(WIDTH)).to(dtype)
    layer, options = KINDS[format]
    bnn.switch(model, "*", layer, **options)
    return model


def batch(step: int, dtype: torch.dtype = torch.bfloat16, rank: int = 0) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step)).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - x.float().flip(0)).square().mean()


def train(model: nn.Module, optimizer: ballast.AdamW, steps: range, rank: int = 0) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, batch(step, next(model.parameters()).dtype, rank))
        loss.backward()
        optimizer.step(loss=loss)
        losses.append(loss.item())
    return losses


def codes_of(model: nn.Module) -> dict[str, Tensor]:
    """What its layers multiply, as bytes."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, bnn.CodedLinear)}
    return {name: layer.weight_codes().codes.view(torch.uint8).clone() for name, layer in layers.items()}


def is_coded(model: nn.Module) -> bool:
    return all(layer.weight.stride() == (0, 0) for layer in model.modules() if isinstance(layer, bnn.CodedLinear))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(values, other[name]) for name, values in one.items())


def memory_of(model: nn.Module) -> int:
    """The bytes of all storages that its parameters, and the codes of its layers, are in."""
    served = [layer.served for layer in model.modules() if isinstance(layer, bnn.CodedLinear)]
    codes = [part for one in served if one is not None for part in (one.codes, one.scales)]
    storages = {tensor.untyped_storage() for tensor in (*model.parameters(), *codes)}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
