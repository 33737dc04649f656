"""torch's average of a model's weights, which the daemon's is held against."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class TorchsAverage:
    """AveragedModel in double precision, and how far the weights have been from the average."""

    def __init__(self, model: torch.nn.Module, decay: float):
        self.decay = decay
        self._model = AveragedModel(copy.deepcopy(model).double(), multi_avg_fn=get_ema_multi_avg_fn(decay))
        self._far = [torch.zeros_like(p) for p in self._model.parameters()]
        self._most = [torch.zeros_like(p) for p in self._model.parameters()]

    def update(self, model: torch.nn.Module) -> None:
        for far, most, average, p in zip(self._far, self._most, self._model.parameters(), model.parameters()):
            torch.maximum(far, (p.detach().double() - average.detach()).abs(), out=far)
            torch.maximum(most, torch.maximum(p.detach().double().abs(), average.detach().abs()), out=most)
        self._model.update_parameters(copy.deepcopy(model).double())

    def check(self, averaged: dict[str, Tensor]) -> None:
        """The daemon's average is unbiased: each step adds an error of at most one last place of 16 bits, u, with a variance
        of at most |move| u, where |move| <= (1 - d) far; what a step adds is forgotten by d a step. So the variance is
        at most far u (1 - d) / (1 - d^2) = far u / (1 + d), and the first copy adds half of u."""
        squares, elements = 0.0, 0
        for name, far, most, average in zip(averaged, self._far, self._most, self._model.parameters()):
            place = most * 2.0**-15
            deviation = (far * place / (1 + self.decay)).sqrt() + place / 2
            error = (averaged[name].double() - average.detach()).abs()
            assert bool((error <= 7 * deviation).all()), name
            squares += float(((error / deviation.clamp(min=1e-300)) ** 2).sum())
            elements += error.numel()
        assert math.sqrt(squares / elements) < 1.1, "of the deviations that are stated"
