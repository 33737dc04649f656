"""Weights and state that took the place of a run's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Replaced:
    """What a rank knows of it.

    ended: its session is over. unlike: where it uploaded them, digests of tensors that the daemon serves otherwise than
    they are here; else stored: the digests of what is here, rounded as the daemon would store and serve it.
    """

    ended: bool
    unlike: dict[int, int] = field(default_factory=dict)
    stored: Sequence[int | None] | None = None
