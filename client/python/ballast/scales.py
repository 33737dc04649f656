"""Learning rates of unit-scaled models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ballast.errors import Rejected

_EMBEDDINGS = ("*embed*", "*wte*", "*wpe*")
_OUTPUTS = ("*head.*", "output.*", "*.output.weight")


def umup_scales(
    parameters: Iterable[tuple[str, Any]] | Mapping[str, Any],
    depth: int,
    *,
    embedding: Sequence[str] = _EMBEDDINGS,
    output: Sequence[str] = _OUTPUTS,
) -> dict[str, float]:
    """The factor of lr for each tensor of a unit-scaled model under u-muP (arXiv 2407.17465), for Adam and its kin:

        ballast.AdamW(model.named_parameters(), lr=1.0,
                      lr_scales=ballast.umup_scales(model.named_parameters(), depth=24))

    Weights have fan_in^-1/2 depth^-1/2, biases and norms depth^-1/2, the output 1, an embedding d^-1/2.

    parameters: (name, tensor or shape) pairs, or a dict of them. Weights have two dimensions or more, the first being
        the outputs (nn.Linear, convolutions), an embedding's last dimension is d.
    depth: residual layers of the stack, for all tensors.
    embedding, output: patterns (fnmatch) of the names of the embeddings and of the output layer.
    """
    if depth < 1:
        raise Rejected(f"depth={depth!r}: it must be a whole number of at least 1")
    given = parameters.items() if isinstance(parameters, Mapping) else parameters
    scales = {}
    for name, tensor in given:
        shape = tuple(tensor.shape if hasattr(tensor, "shape") else tensor)
        if any(fnmatchcase(name, pattern) for pattern in output):
            scales[name] = 1.0
        elif any(fnmatchcase(name, pattern) for pattern in embedding) and len(shape) > 1:
            scales[name] = shape[-1] ** -0.5
        elif len(shape) > 1:
            scales[name] = (math.prod(shape[1:]) * depth) ** -0.5
        else:
            scales[name] = depth**-0.5
    return scales
