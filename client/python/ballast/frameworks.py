"""Frameworks that drive this process's training loop, and what they say of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ballast.errors import Rejected

if TYPE_CHECKING:
    from typing_extensions import Self

# Those that clip, accumulate or skip after backward(), as they are told, without telling the optimizer before.
_LOOPS = {"lightning.pytorch": "Lightning", "pytorch_lightning": "Lightning", "torchtune": "torchtune"}


def driving_framework() -> str | None:
    """The name of the one that makes this process's steps, as far as can be known: Accelerate, which HF Trainer and TRL
    stand on, once it is set up; the others once they are imported. None: there is none."""
    if _accelerates("PartialState"):
        return "Accelerate"
    return next((name for module, name in _LOOPS.items() if module in sys.modules), None)


def synchronizes() -> bool | None:
    """Whether Accelerate makes a step of what the backward() under way leaves; None without it."""
    shared = _accelerates("GradientState")
    return bool(shared["sync_gradients"]) if "sync_gradients" in shared else None


def _accelerates(kind: str) -> Mapping[str, Any]:
    """What Accelerate's state of this class holds for the process; nothing where it is not set up."""
    state = sys.modules.get("accelerate.state")
    held: Mapping[str, Any] = getattr(getattr(state, kind, None), "_shared_state", None) or {}
    return held


def _refuse_scaled_losses() -> None:
    """Rejected if Accelerate multiplies losses for float16, which its own wrapper of an optimizer would divide out again."""
    if _accelerates("AcceleratorState").get("_mixed_precision") == "fp16":
        raise Rejected(
            "mixed_precision='fp16' of Accelerate (fp16=True of HF Trainer) multiplies losses, and has torch's GradScaler divide "
            "gradients again, which have left for the daemon by then: give 'bf16', or 'no' with torch.autocast and "
            "ballast.GradScaler(optimizer)",
            "FAILED_PRECONDITION",
        )


class Prepared:
    """An optimizer that Accelerate takes as it is. Its own wrapper would hide skipped steps from schedulers; what it does
    besides, passing over step() and zero_grad() within accumulate(), the optimizer does as synchronized() says."""

    _prepared = False

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Asked by Accelerate, and nobody else, when it prepares the optimizer. Rejected if it scales losses."""
        _refuse_scaled_losses()
        self._prepared = True
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        self._prepared = prepared

    @property
    def synchronized(self) -> bool | None:
        """As synchronizes(), of an optimizer that Accelerate has prepared: another one is none of its own, as in torch."""
        return synchronizes() if self._prepared else None

    @property
    def optimizer(self) -> Self:
        """Itself: where its wrapper has the optimizer."""
        return self


class PreparedLoader:
    """The loader of Accelerate's that a loop goes through, itself or in a wrapper (tqdm). Where there is none, nothing.

    batches: what the loop goes through, of which no batch was taken yet.
    """

    def __init__(self, batches: object):
        self._before = _active_loader()
        module = sys.modules.get("accelerate.data_loader")
        self._loader: Any = batches if module and isinstance(batches, module.DataLoaderStateMixin) else None

    @property
    def at_last(self) -> bool:
        """Whether the batch that it gave is its last: then a shorter accumulation ends with it."""
        if self._loader is None and (active := _active_loader()) is not self._before:
            self._loader = active
        return self._loader is not None and bool(self._loader.end_of_dataloader)

    def make_last(self) -> None:
        """The batch that it gave is to be its last."""
        if self._loader is not None:
            self._loader.end_of_dataloader = True

    def leave(self) -> None:
        """Does what it does at its end, of which its other batches are missing: its next epoch is another."""
        if self._loader is not None:
            self._loader.iteration += 1
            self._loader.end()


def _active_loader() -> Any:
    if not _accelerates("GradientState"):
        return None
    return sys.modules["accelerate.state"].GradientState().active_dataloader
