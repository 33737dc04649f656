"""What the loss of a step is multiplied by."""

from __future__ import annotations

from typing import Any

from ballast.errors import Rejected
from ballast.options import check_option
from ballast.session import Session

_uses = 0  # of all GradScalers' scales in this process


class LossScale:
    """Of the steps to come; checked when one begins."""

    def __init__(self, scale: Any):
        self._scale = scale
        self._seen: int | None = None  # of _uses, when the last step ended; None: it is no GradScaler's

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

    @staticmethod
    def use() -> None:
        """A GradScaler's was asked for: a loss is multiplied by it. One that several optimizers train needs only one's."""
        global _uses
        _uses += 1

    def expect(self) -> None:
        """Made for a GradScaler: the loss of the next step is to be multiplied by its scale."""
        self._seen = _uses

    def spend(self) -> None:
        """A step has ended: so is the next one's, where there is a GradScaler."""
        if self._seen is not None:
            self.expect()

    def check(self, step: int) -> None:
        """Rejected if it is no scale, or if a GradScaler's is not 1, and no loss was multiplied by it: the gradients of `step`, which
        begins, would be divided nevertheless."""
        check_option("loss_scale", self._scale, "")
        if self._seen == _uses and self._scale != 1:
            raise Rejected(
                f"a gradient came for step {step} of a loss that this optimizer's GradScaler has not scaled, and would be divided by "
                f"{self._scale!r}: write scaler.scale(loss).backward(), or scaler.update(1.0) before steps without it, or give "
                "GradScaler(enabled=False)",
                "FAILED_PRECONDITION",
            )
