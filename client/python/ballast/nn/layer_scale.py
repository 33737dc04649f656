"""The factor of a residual branch."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LayerScale(nn.Module):
    """Multiplies each feature by a trained factor: x + scale(block(x)), as of CaiT (arXiv 2103.17239).

    With init=0 a deep model begins as the identity, and its features stay small enough for fp8 with one scale a tensor:
    "zero-initialized layer-scale" of SwitchBack (arXiv 2304.13013, section 2.3).

    features: of the last dimension. init: of each factor. Input and output: [..., features].
    """

    def __init__(
        self, features: int, init: float = 0.0, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ):
        super().__init__()
        self.init = float(init)
        self.gamma = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.init)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma

    def extra_repr(self) -> str:
        return f"{self.gamma.numel()}, init={self.init}"
