"""Real training with the daemon's update: gradients from torch, weights and moments in ballast.numerics.

Two tasks: the quick start's transformer on the King James Bible (byte by byte), and a small convolutional network on
Fashion-MNIST. Each run feeds an exact v (double precision, the same gradients) beside the stored one.
"""

from __future__ import annotations

import functools
import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from ballast import numerics
from torch import nn
from torch.nn import functional as F
from trainer import king_james

FASHION = Path("/usr/share/datasets/fashion-mnist")
EVERY, LAST, SAMPLE = 20, 10, 10  # steps between evaluations, how many count, steps between samples of the weights


@dataclass(frozen=True)
class Recipe:
    """What a run stores, and how it rounds."""

    master: str
    state: str
    rounding: str
    lr_factor: float = 1.0

    @property
    def rule(self) -> str:
        return "collage_plus" if self.master == "mcf" else "adamw"


# --- tasks ----------------------------------------------------------------------------------------------------------


class TextTask:
    """The example's transformer and batches; `width` 128 with 4 layers is the example's own size."""

    learning = {"lr": 2e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}

    def __init__(self, seed: int, width: int, layers: int):
        text = king_james.load_text()
        split = len(text) * 9 // 10
        self._training, held_out = text[:split], text[split:]
        fixed = torch.Generator().manual_seed(0)
        self._evaluation = [king_james.draw_batch(held_out, 32, fixed) for _ in range(2)]
        self._random = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.model = king_james.ByteModel(width, layers, max(1, width // 32))

    def loss(self) -> torch.Tensor:
        return self.model.loss(king_james.draw_batch(self._training, king_james.BATCH, self._random))

    def held_out(self) -> float:
        return king_james.held_out_loss(self.model, self._evaluation)


@functools.cache
def read_images(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Fashion-MNIST's images, scaled to mean 0 and deviation 1, and their classes."""
    if not FASHION.exists():
        raise SystemExit(
            "Fashion-MNIST is missing: install the package dataset-fashion-mnist (deploy/packages.sh study)"
        )
    pixels = gzip.decompress((FASHION / f"{kind}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((FASHION / f"{kind}-labels-idx1-ubyte.gz").read_bytes())
    images = torch.frombuffer(bytearray(pixels[16:]), dtype=torch.uint8).view(-1, 1, 28, 28).float()
    return (images / 255 - 0.286) / 0.353, torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8).long()


class ImageTask:
    """A convolutional network of 0.06 million parameters; batches of 64; held out: 2,000 of the test images."""

    learning = {"lr": 2e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}

    def __init__(self, seed: int):
        self._training, self._evaluation = read_images("train"), read_images("t10k")
        self._random = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16, track_running_stats=False),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 49, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )

    def _loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(images), labels)

    def loss(self) -> torch.Tensor:
        chosen = torch.randint(len(self._training[1]), (64,), generator=self._random)
        return self._loss(self._training[0][chosen], self._training[1][chosen])

    @torch.no_grad()
    def held_out(self) -> float:
        return self._loss(self._evaluation[0][:2000], self._evaluation[1][:2000]).item()


# --- the optimizer --------------------------------------------------------------------------------------------------


class Tensor:
    """One parameter: its weight and moments as the daemon keeps them, and the exact v."""

    def __init__(self, name: str, parameter: nn.Parameter, recipe: Recipe, seed: int):
        self._parameter, self._recipe, self._key = parameter, recipe, numerics.tensor_key(name, seed)
        self._weight = numerics.encode(parameter.detach().numpy(), recipe.master)
        self._moments = numerics.new_state(recipe.rule, tuple(parameter.shape), recipe.master, recipe.state)
        self.exact = np.zeros(tuple(parameter.shape))
        self.wanted_sq = self.stored_dot = 0.0  # of all updates: what EDQ is the quotient of
        self.size = parameter.numel()

    def step(self, t: int, hyper: dict[str, float], sampled: bool) -> tuple[int, float]:
        """(unchanged weights, the largest update in lr, sampled)."""
        grad = self._parameter.grad.numpy()
        before = self._parameter.detach().numpy().copy() if sampled else None
        done = numerics.step(
            self._recipe.rule,
            self._weight,
            grad,
            self._moments,
            hyper,
            t,
            rounding=self._recipe.rounding,
            key=self._key,
            statistics="full",
        )
        self.wanted_sq += done.statistics.update_sq
        self.stored_dot += done.statistics.stored_dot
        self.exact = hyper["beta2"] * self.exact + (1 - hyper["beta2"]) * grad.astype(np.float64) ** 2
        after = numerics.decode(self._weight)
        self._parameter.data.copy_(torch.from_numpy(after))
        largest = 0.0
        if before is not None:
            decayed = before * (1 - hyper["lr"] * hyper["weight_decay"])
            largest = float(np.abs(after - decayed).max()) / hyper["lr"]
        return done.statistics.unchanged, largest

    def variance(self) -> np.ndarray:
        return numerics.decode(self._moments["variance"])


def compare_variance(tensors: list[Tensor]) -> dict:
    """The stored v against the exact one, over all elements that had a gradient."""
    stored = np.concatenate([tensor.variance().ravel() for tensor in tensors]).astype(np.float64)
    exact = np.concatenate([tensor.exact.ravel() for tensor in tensors])
    seen = exact > 0
    ratio = stored[seen] / exact[seen]
    low, middle, high = np.quantile(ratio, (0.05, 0.5, 0.95))
    return {
        "mean": float(stored[seen].sum() / exact[seen].sum()),
        "median": float(middle),
        "low": float(low),
        "high": float(high),
        "zero": float(np.mean(stored[seen] == 0)),
    }


def train(task: str, recipe: dict, seed: int, steps: int, width: int, layers: int) -> dict:
    """One run: held-out losses, v against the exact one, the share of unchanged weights, the share of the wanted
    updates that was stored (Collage's effective descent quality), the largest sampled update."""
    torch.set_num_threads(1)
    chosen = Recipe(**recipe)
    work = TextTask(seed, width, layers) if task == "text" else ImageTask(seed)
    hyper = work.learning | {"lr": work.learning["lr"] * chosen.lr_factor}
    tensors = [Tensor(name, p, chosen, seed) for name, p in work.model.named_parameters()]
    curve, unchanged, largest = [], 0, 0.0
    for t in range(1, steps + 1):
        work.model.zero_grad(set_to_none=True)
        loss = work.loss()
        loss.backward()
        if not math.isfinite(loss.item()):
            break
        for tensor in tensors:
            same, moved = tensor.step(t, hyper, t % SAMPLE == 0)
            unchanged += same
            largest = max(largest, moved)
        if t % EVERY == 0:
            curve.append([t, work.held_out()])
    size = sum(tensor.size for tensor in tensors)
    last = [value for _, value in curve[-LAST:]]
    return {
        "loss": float(np.mean(last)) if t == steps and last else None,  # None: diverged
        "curve": curve,
        "variance": compare_variance(tensors),
        "unchanged": unchanged / (size * t),
        "edq": sum(tensor.stored_dot for tensor in tensors) / sum(tensor.wanted_sq for tensor in tensors),
        "largest": largest,
        "parameters": size,
    }
