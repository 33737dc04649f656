"""Weights and state that took the place of a run's, or came to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ballast.binding import Binding
    from ballast.moments import Moments
    from ballast.weights import Weights


@dataclass(frozen=True)
class Replaced:
    """What a rank knows of it.

    ended: its session is over. unlike: where it uploaded them, digests of tensors that the daemon serves otherwise than
    they are here; else stored: the digests of what is here, rounded as the daemon would store and serve it.
    """

    ended: bool
    unlike: dict[int, int] = field(default_factory=dict)
    stored: Sequence[int | None] | None = None


@dataclass(frozen=True)
class Amended:
    """What an amendment of a run has left to do. weights: of the session before, whose next step was `step`; added: the
    tensors that came, with these moments."""

    weights: Weights
    step: int
    added: Sequence[Binding]
    moments: Mapping[int, Moments]
