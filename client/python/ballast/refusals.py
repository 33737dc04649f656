"""What torch and its tools may ask of an optimizer, and one whose state is in a daemon refuses."""

from __future__ import annotations

from typing import Any, NoReturn

from ballast.errors import Rejected


class Refusals:
    """A base of ballast.Optimizer: each of these raises Rejected, with what to do in its place."""

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        # torch's GradScaler asks for this first of all in step().
        raise Rejected(
            f"torch's GradScaler cannot be used with ballast.{type(self).__name__}: gradients leave during backward, before "
            "it can unscale them, so the step just made was made with scaled gradients. Use ballast.GradScaler(optimizer) in "
            "its place, or bfloat16 without one (enabled=False), and start from a new run"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise Rejected(
            f"ballast.{type(self).__name__} cannot be copied or pickled: it is a connection to a daemon. Save its state_dict(), or make "
            "another optimizer"
        )
