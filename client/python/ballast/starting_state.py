"""What a trainer brings to its run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ballast.errors import Rejected
from ballast.moments import Moments
from ballast.options import WEIGHTS
from ballast.weights import Weights


class StartingState:
    """Whether the run takes its weights from this trainer, or the trainer from the run, and the moments that are uploaded
    with the weights.

    policy: the option `weights`; Rejected if it cannot be one.
    """

    def __init__(self, policy: Any):
        if policy not in WEIGHTS:
            raise Rejected(f"weights={policy!r}: it must be 'client', 'server', 'match' or None")
        self._policy: str | None = policy
        self._moments: Mapping[int, Moments] = {}

    @property
    def from_daemon(self) -> bool:
        """Whether the trainer's weights are overwritten before anything else."""
        return self._policy == "server"

    def bring(self, moments: Mapping[int, Moments]) -> None:
        """By id(parameter), in place of those brought before: to be uploaded with the weights."""
        self._moments = moments

    def brought(self, parameters: Iterable[Tensor]) -> dict[int, dict[str, Tensor]]:
        """The "state" of a torch state_dict of these parameters, in their order: what waits to be uploaded, if any does."""
        if not self._moments:
            return {}
        found = ((index, self._moments.get(id(parameter))) for index, parameter in enumerate(parameters))
        return {index: moments.as_state() for index, moments in found if moments is not None}

    def settle(self, weights: Weights) -> None:
        """Makes the state here and there the same, before the first gradient; later nothing."""
        weights.settle(self._policy, self._moments)
        self._moments = {}
