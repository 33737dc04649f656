"""What is trained: a byte-level language model, two image classifiers, and a contrastive model of images and captions.

A task has `model(seed)`, a module whose `loss(batch)` is a scalar, and `draw(random, size, source)`. Sources: "usual";
"shifted", the same kind of data from elsewhere; "bad", what no data is.
"""

from __future__ import annotations

import functools
import gzip
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "client" / "python" / "examples"))

import king_james  # noqa: E402

FASHION = Path("/usr/share/datasets/fashion-mnist")
LICENCES = Path("/usr/share/common-licenses")
CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
HELD_OUT = 512  # samples; a tenth of that of texts


class Text:
    """The quick start's transformer, narrower. Shifted: from the King James Bible to licences of software."""

    lr = 3e-3
    size = 16

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return king_james.ByteModel(width=32, layers=2, heads=2)

    @functools.cached_property
    def sources(self) -> dict[str, torch.Tensor]:
        licences = b"\n".join(file.read_bytes() for file in sorted(LICENCES.iterdir()) if file.is_file())
        return {
            "usual": king_james.load_text(),
            "shifted": torch.frombuffer(bytearray(licences), dtype=torch.uint8).long(),
            "bad": torch.randint(256, (1 << 20,), generator=torch.Generator().manual_seed(7)),
        }

    def draw(self, random: torch.Generator, size: int, source: str):
        return king_james.draw_batch(self.sources[source], size, random)

    def held_out(self):
        return self.draw(torch.Generator().manual_seed(0), HELD_OUT // 10, "usual")


@functools.cache
def fashion() -> tuple[torch.Tensor, torch.Tensor]:
    pixels = gzip.decompress((FASHION / "train-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((FASHION / "train-labels-idx1-ubyte.gz").read_bytes())[8:]
    images = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(-1, 28, 28).float() / 255
    return images, torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()


def draw_images(random: torch.Generator, size: int, source: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Shifted: negatives, turned by a quarter. Bad: labels of other images, pixels of ten times their brightness."""
    images, labels = fashion()
    chosen = torch.randint(len(labels), (size,), generator=random)
    x, y = images[chosen], labels[chosen]
    if source == "shifted":
        x = 1 - x.transpose(1, 2)
    if source == "bad":
        x, y = 10 * x, y[torch.randperm(size, generator=random)]
    return x, y


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(784, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 10))

    def loss(self, batch):
        images, labels = batch
        return F.cross_entropy(self.layers(images.flatten(1)), labels)


class Image:
    """A perceptron on Fashion-MNIST."""

    lr = 2e-3
    size = 64

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Classifier()

    def draw(self, random: torch.Generator, size: int, source: str):
        return draw_images(random, size, source)

    def held_out(self):
        return self.draw(torch.Generator().manual_seed(0), HELD_OUT, "usual")


class ConvolutionalNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.second = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.third = nn.Conv2d(32, 32, 3, padding=1)
        self.norm = nn.GroupNorm(4, 32)
        self.head = nn.Linear(32 * 49, 10)

    def loss(self, batch):
        images, labels = batch
        seen = F.gelu(self.second(F.gelu(self.first(images[:, None]))))
        seen = self.norm(seen + F.gelu(self.third(seen)))
        return F.cross_entropy(self.head(seen.flatten(1)), labels)


class Convolution(Image):
    """A convolutional network on Fashion-MNIST."""

    size = 32

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return ConvolutionalNetwork()


class ImageCaption(nn.Module):
    """CLIP in small (arXiv 2103.00020): patches of an image and bytes of its caption, each through a transformer layer,
    meet in one space; the temperature is learned."""

    WIDTH, PATCH, CAPTION = 48, 7, 32

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Linear(self.PATCH**2, self.WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(16, self.WIDTH))
        self.token = nn.Embedding(256, self.WIDTH)
        self.caption_place = nn.Parameter(0.02 * torch.randn(self.CAPTION, self.WIDTH))
        self.seeing, self.reading = king_james.Block(self.WIDTH, 2), king_james.Block(self.WIDTH, 2)
        self.image_head = nn.Linear(self.WIDTH, self.WIDTH, bias=False)
        self.caption_head = nn.Linear(self.WIDTH, self.WIDTH, bias=False)
        self.temperature = nn.Parameter(torch.tensor(2.66))  # log(1 / 0.07)

    def loss(self, batch):
        images, captions = batch
        patches = images.unfold(1, self.PATCH, self.PATCH).unfold(2, self.PATCH, self.PATCH).flatten(1, 2).flatten(2)
        seen = self.image_head(self.seeing(self.patch_embed(patches) + self.place).mean(1))
        read = self.caption_head(self.reading(self.token(captions) + self.caption_place).mean(1))
        logits = self.temperature.exp() * F.normalize(seen, dim=1) @ F.normalize(read, dim=1).T
        own = torch.arange(len(images))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


class Caption:
    """Which caption is which image's: "a photo of a coat, number 7" says its class, and how bright it is."""

    lr = 2e-3
    size = 48

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return ImageCaption()

    def draw(self, random: torch.Generator, size: int, source: str):
        images, labels = draw_images(random, size, source)
        texts = [f"a {CLASSES[y]}, {x.mean():.2f} bright" for x, y in zip(images, labels.tolist())]
        length = ImageCaption.CAPTION
        return images, torch.tensor([list(text.encode().ljust(length)[:length]) for text in texts])

    def held_out(self):
        return self.draw(torch.Generator().manual_seed(0), 128, "usual")


# The detector was tuned on the first two.
TASKS = {"text": Text(), "image": Image(), "caption": Caption(), "convolution": Convolution()}
TUNED = ("text", "image")
