"""One training, and what is seen in it."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor, nn

import recipes
from arms import ARMS
from ballast import nn as layers
from tasks import TASKS

EVERY, LAST = 10, 5  # steps between evaluations, how many count
BINS = list(range(-40, 21))  # of log2 |gradient|


def train(task: str, arm: str, seed: int, steps: int, depth: int) -> dict[str, Any]:
    """Held-out losses; the trainer's bytes a parameter, of weights and codes; in the last step the mean magnitude of each
    block's output, and the magnitudes of the gradients that go to fp8."""
    torch.set_num_threads(1)
    way, work = ARMS[arm], TASKS[task](seed)
    torch.manual_seed(seed)
    model = work.model(depth, way.unit_scaled, way.layer_scale)
    optimizer = way.optimizer(model, work.learning, f"study-{seed}")
    seen = Seen(model)
    curve = []
    for step in range(1, steps + 1):
        if step == steps:
            seen.watch()
        loss = work.loss(model)
        (loss * float(getattr(optimizer, "loss_scale", 1.0))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            curve.append([step, work.held_out(model)])
        if not math.isfinite(loss.item()):
            break
    last = [value for _, value in curve[-LAST:]]
    finite = step == steps and all(map(math.isfinite, last))
    held = [*model.parameters(), *recipes.codes_of(model)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "loss": statistics.fmean(last) if finite else None,  # None: diverged
        "curve": curve,
        "parameters": parameters,
        "bytes": sum(storages.values()) / parameters,
        "in_layers": bytes_in_layers(model),
        **seen.told(),
    }


def bytes_in_layers(model: nn.Module) -> float | None:
    """What a trainer holds for each weight of the layers that multiply codes: their memory, and the codes and scales."""
    found = [layer for layer in model.modules() if isinstance(layer, layers.CodedLinear)]
    if not found:
        return None
    nbytes = sum(layer.weight.untyped_storage().nbytes() for layer in found)
    nbytes += sum(part.nbytes for part in recipes.codes_of(model))
    return nbytes / sum(layer.weight.numel() for layer in found)


class Seen:
    """What is looked at in one step, by hooks that change nothing."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._features: list[float] = []
        self._gradients: list[Tensor] = []

    def watch(self) -> None:
        for block in self._model.layers:  # type: ignore[union-attr]
            block.register_forward_hook(
                lambda _module, _inputs, y: self._features.append(y.float().abs().mean().item())
            )
        for layer in self._model.layers.modules():  # type: ignore[union-attr]
            if isinstance(layer, nn.Linear):
                layer.register_full_backward_hook(lambda _module, _inputs, outputs: self._see(outputs[0]))

    def _see(self, gradient: Tensor) -> None:
        self._gradients.append(gradient.detach().float().flatten())

    def told(self) -> dict[str, Any]:
        depth = len(self._model.layers)  # type: ignore[arg-type]
        found: dict[str, Any] = {"features": self._features[:depth]}
        if self._gradients:
            values = torch.cat(self._gradients)
            exponents = values[values != 0].abs().log2().floor().clamp(BINS[0], BINS[-1])
            found["exponents"] = torch.histc(exponents, len(BINS), BINS[0], BINS[-1]).div(values.numel()).tolist()
            found["beyond"], found["gone"] = layers.fp8_losses(values)
        return found
