"""What the loss of a step is multiplied by."""

from __future__ import annotations

from typing import Any

from ballast.errors import Rejected
from ballast.options import check_option
from ballast.session import Session


class LossScale:
    """Of the steps to come; checked when one begins."""

    def __init__(self, scale: Any):
        self._scale = scale

    def __float__(self) -> float:
        return float(self._scale)

    def set(self, scale: Any, session: Session | None) -> None:
        """Rejected if a step is open, to whose gradients another scale belongs."""
        if session is not None and session.begun and scale != self._scale:
            raise Rejected(
                f"loss_scale was set to {scale!r} in step {session.step}, whose gradients are divided by the {self._scale!r} that it "
                "was begun with: set it after step()",
                "FAILED_PRECONDITION",
            )
        self._scale = scale

    def check(self) -> None:
        check_option("loss_scale", self._scale, "")
