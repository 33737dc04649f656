"""A trainer that follows its run wherever that goes back to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import ballast
from models import perceptron, spirals, weights_of
from stateful import Place

AdamW = Callable[..., ballast.AdamW]
KEPT = {"snapshots": 2, "snapshot_every": 3}
# The first step's checkpoint begins the journal, and no other is written unless it is asked for.
SYNC: dict[str, Any] = {"durability": "journal_sync", "checkpoint_every_seconds": 1e6}
SELDOM: dict[str, Any] = {"checkpoint_every_seconds": 1e6}
KINDS: dict[str, dict[str, Any]] = {
    "release": {},
    "staged": {"commit": "staged", "max_grad_norm": 0.05},
    "accumulation": {"gradient_accumulation_steps": 2},
    "overlap": {"overlap_forward": True},
}


class Training:
    """A loop whose every step depends on weights, moments, a schedule, random numbers and a place in the data."""

    def __init__(self, adamw: AdamW, model: nn.Module | None = None, **options: Any):
        self.model = nn.Sequential(model or perceptron(seed=1), nn.Dropout(0.2))
        self.data = Place()
        self.optimizer = adamw(self.model.named_parameters(), lr=1e-2, **(KEPT | options))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.optimizer.register_client_state("data", self.data)
        self.optimizer.register_client_state("scheduler", self.scheduler)
        self.optimizer.register_client_state("rng", torch.get_rng_state, torch.set_rng_state)
        self.optimizer.connect()
        self.rewound: list[int] = []
        self.micros = options.get("gradient_accumulation_steps", 1)

    def step(self) -> str:
        """Digest of all that the next step depends on."""
        try:
            for _ in range(self.micros):
                points, labels = spirals(seed=self.data.next)
                self.data.next += 1
                F.cross_entropy(self.model(points), labels).backward()
            self.optimizer.step()
            self.optimizer.wait()  # with overlap_forward the news may come after step()
        except ballast.RunRewound as rewound:
            self.rewound.append(rewound.step)
            assert rewound.client_state is not None and rewound.client_state["data"] == self.data.state_dict()
        self.scheduler.step()
        return self.digest()

    def digest(self) -> str:
        self.optimizer.wait()
        whole = hashlib.sha256()
        for weight in (*weights_of(self.model), torch.get_rng_state()):
            whole.update(weight.numpy().tobytes())
        whole.update(repr((self.data.next, self.optimizer.param_groups[0]["lr"])).encode())
        return whole.hexdigest()

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]
