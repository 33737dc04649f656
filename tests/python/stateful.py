"""A training whose every step depends on state outside of the weights: a schedule, random numbers, a place in the data."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import ballast
from models import perceptron, spirals, weights_of


class Place:
    """Where the data is read."""

    def __init__(self) -> None:
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Stateful:
    def __init__(self, server: str, run: str):
        self.model = nn.Sequential(perceptron(seed=1), nn.Dropout(0.5))
        torch.manual_seed(7)
        self.data = Place()
        joined = ballast.AdamW(self.model.named_parameters(), lr=1e-2, server=server, run=run, takeover=True)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(joined, 0.9)
        joined.register_client_state("data", self.data)
        joined.register_client_state("scheduler", self.scheduler)
        joined.register_client_state("rng", torch.get_rng_state, torch.set_rng_state)
        self.restored = bool(joined.connect())
        if self.restored:
            self.scheduler.step()
        self.optimizer = joined

    def step(self) -> int:
        points, labels = spirals(seed=self.data.next)
        self.data.next += 1
        loss = F.cross_entropy(self.model(points), labels)
        loss.backward()
        self.optimizer.step(loss=loss)
        self.scheduler.step()
        assert self.optimizer.last_result is not None
        return self.optimizer.last_result.step

    def digest(self) -> str:
        """A digest of the weights and of everything that the next step depends on."""
        whole = hashlib.sha256()
        for weight in (*weights_of(self.model), torch.get_rng_state()):
            whole.update(weight.numpy().tobytes())
        whole.update(repr((self.data.next, self.optimizer.param_groups[0]["lr"])).encode())
        return whole.hexdigest()
