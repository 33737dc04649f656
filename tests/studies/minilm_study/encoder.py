"""all-MiniLM-L6-v2 as a plain torch module: BERT's encoder, six layers of width 384, 22.6 million parameters.

Parameters have the names that they have in the checkpoint, so that it is loaded as it is. Left out: BERT's pooler,
which sentence embeddings do not use, and dropout, so that optimizers differ in nothing but themselves.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

VOCABULARY, POSITIONS, WIDTH, LAYERS, HEADS = 30522, 512, 384, 6, 12
UNUSED = ("pooler.", "embeddings.position_ids")


def norm() -> nn.LayerNorm:
    return nn.LayerNorm(WIDTH, eps=1e-12)


def projection(inputs: int) -> nn.ModuleDict:
    """Back to the width, added to what came in."""
    return nn.ModuleDict({"dense": nn.Linear(inputs, WIDTH), "LayerNorm": norm()})


class Layer(nn.Module):
    """Attention, then a perceptron of two layers; each is added to its input, and the sum is normalized."""

    def __init__(self) -> None:
        super().__init__()
        heads = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value")})
        self.attention = nn.ModuleDict({"self": heads, "output": projection(WIDTH)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, 4 * WIDTH)})
        self.output = projection(4 * WIDTH)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        split = [head(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for head in self.attention["self"].values()]
        mixed = F.scaled_dot_product_attention(*split, attn_mask=seen[:, None, None, :]).transpose(1, 2).flatten(2)
        back = self.attention["output"]
        x = back["LayerNorm"](x + back["dense"](mixed))
        return self.output["LayerNorm"](x + self.output["dense"](F.gelu(self.intermediate["dense"](x))))


class Encoder(nn.Module):
    """Sentence embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(VOCABULARY, WIDTH),
                "position_embeddings": nn.Embedding(POSITIONS, WIDTH),
                "token_type_embeddings": nn.Embedding(2, WIDTH),
                "LayerNorm": norm(),
            }
        )
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer() for _ in range(LAYERS))})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 [sentences, length], 0 where one has ended. Returns fp32 [sentences, width], of length 1."""
        seen = tokens != 0
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        named = self.embeddings
        x = named["word_embeddings"](tokens) + named["position_embeddings"](places)
        x = named["LayerNorm"](x + named["token_type_embeddings"](torch.zeros_like(tokens)))
        for layer in self.encoder["layer"]:
            x = layer(x, seen)
        weight = seen.unsqueeze(2).to(x.dtype)
        return F.normalize((x * weight).sum(1) / weight.sum(1), dim=1)


def load(checkpoint: Path) -> Encoder:
    """The model with the weights of the checkpoint, a file of safetensors; both must name the same parameters."""
    weights = {name: value.float() for name, value in load_file(checkpoint).items() if not name.startswith(UNUSED)}
    model = Encoder()
    model.load_state_dict(weights)
    return model
