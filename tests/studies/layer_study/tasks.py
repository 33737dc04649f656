"""What is trained: the quick start's transformer on a text, and a transformer over patches of images; both small.

A model is made of Block, whose branches a LayerScale may follow, or of the package unit-scaling's layers.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recipes
from ballast.nn import LayerScale
from trainer import king_james

FASHION = Path("/usr/share/datasets/fashion-mnist")
WIDTH, HEADS = 64, 2


class Scaled(king_james.Block):
    """The quick start's block, each of whose branches is multiplied by a LayerScale of 0."""

    def __init__(self, width: int, heads: int):
        super().__init__(width, heads)
        self.out = nn.Sequential(self.out, LayerScale(width))
        self.down = nn.Sequential(self.down, LayerScale(width))


class Text:
    """The next byte of the King James Bible; batches of 8 pieces."""

    learning = king_james.LEARNING

    def __init__(self, seed: int):
        text = king_james.load_text()
        split = len(text) * 9 // 10
        self._training, held_out = text[:split], text[split:]
        fixed = torch.Generator().manual_seed(0)
        self._held_out = [king_james.draw_batch(held_out, 32, fixed)]
        self._random = torch.Generator().manual_seed(seed)

    def model(self, depth: int, unit_scaled: bool, layer_scale: bool) -> nn.Module:
        if unit_scaled:
            return recipes.UnitScaledByteModel(WIDTH, depth, HEADS)
        made = king_james.ByteModel(WIDTH, depth, HEADS)
        if layer_scale:
            made.layers = nn.ModuleList(Scaled(WIDTH, HEADS) for _ in range(depth))
        return made

    def loss(self, model: Any) -> Tensor:
        loss: Tensor = model.loss(king_james.draw_batch(self._training, 8, self._random))
        return loss

    def held_out(self, model: Any) -> float:
        return king_james.held_out_loss(model, self._held_out)


class PatchModel(nn.Module):
    """A transformer over the 16 patches of an image of 28 x 28, of which it tells the class of ten."""

    def __init__(self, depth: int, block: type[king_james.Block]):
        super().__init__()
        self.patch, self.position = nn.Linear(49, WIDTH), nn.Parameter(0.02 * torch.randn(16, WIDTH))
        self.layers = nn.ModuleList(block(WIDTH, HEADS) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = images.view(-1, 4, 7, 4, 7).transpose(2, 3).reshape(-1, 16, 49)
        x = self.patch(patches.to(self.patch.weight.dtype)) + self.position
        for layer in self.layers:
            x = layer(x)
        classes: Tensor = self.head(self.norm(x).mean(1)).float()
        return classes


class Images:
    """Fashion-MNIST; batches of 64, held out: 2,000 of the test images."""

    learning = king_james.LEARNING | {"betas": (0.9, 0.999), "weight_decay": 0.05}

    def __init__(self, seed: int):
        self._training, (images, labels) = read("train"), read("t10k")
        self._held_out = images[:2000], labels[:2000]
        self._random = torch.Generator().manual_seed(seed)

    def model(self, depth: int, unit_scaled: bool, layer_scale: bool) -> nn.Module:
        assert not unit_scaled, "the text alone is"
        return PatchModel(depth, Scaled if layer_scale else king_james.Block)

    def loss(self, model: Any) -> Tensor:
        images, labels = self._training
        chosen = torch.randint(len(labels), (64,), generator=self._random)
        return F.cross_entropy(model(images[chosen]), labels[chosen])

    @torch.no_grad()
    def held_out(self, model: Any) -> float:
        return F.cross_entropy(model(self._held_out[0]), self._held_out[1]).item()


def read(kind: str) -> tuple[Tensor, Tensor]:
    """Images of mean 0 and deviation 1, and their classes."""
    if not FASHION.exists():
        raise SystemExit(
            "Fashion-MNIST is missing: install the package dataset-fashion-mnist (deploy/packages.sh study)"
        )
    pixels = gzip.decompress((FASHION / f"{kind}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((FASHION / f"{kind}-labels-idx1-ubyte.gz").read_bytes())
    images = torch.frombuffer(bytearray(pixels[16:]), dtype=torch.uint8).view(-1, 28, 28).float()
    return (images / 255 - 0.286) / 0.353, torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8).long()


TASKS = {"text": Text, "images": Images}
