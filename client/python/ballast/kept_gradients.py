"""Gradients that have left, and that the trainer keeps nevertheless."""

from __future__ import annotations

from weakref import ref

from torch import Tensor


class KeptGradients:
    """Of the open step: those whose memory lives on after they have left, as a buffer's, of which a loop had put parts into
    `.grad` before backward(). What is written there then reaches torch's optimizers, and not the daemon. One thread at a time.
    """

    def __init__(self) -> None:
        # By id of a tensor, or of that which it is a part of: all parts have one version, which autograd moves with each.
        self._kept: dict[int, tuple[ref[Tensor], int, str]] = {}

    def note(self, gradient: Tensor, name: str) -> None:
        """It has left, as it is now. name: of its parameter."""
        if type(gradient) is not Tensor or gradient.is_inference():  # which have no version, or one for each part
            return
        whole = gradient if gradient._base is None else gradient._base
        self._kept[id(whole)] = (ref(whole), whole._version, name)

    def written(self) -> str | None:
        """The parameter of one that was written to since, which is told once; None: none was."""
        for key, (whole, version, name) in list(self._kept.items()):
            now = whole()
            if now is not None and now._version != version:
                del self._kept[key]
                return name
        return None

    def clear(self) -> None:
        self._kept.clear()
