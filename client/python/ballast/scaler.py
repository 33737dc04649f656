"""ballast.GradScaler: dynamic loss scaling, with the daemon's verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ballast.errors import Rejected
from ballast.loss_scale import LossScale
from ballast.optimizer import Optimizer


class GradScaler:
    """torch.amp.GradScaler for one ballast optimizer: scales the loss, so that gradients in float16 or a narrow
    gradient_dtype do not vanish, and lets a step be skipped whose gradients overflowed.

        scaler = ballast.GradScaler(optimizer)      # before the first gradient and connect()
        for batch in batches:
            with torch.autocast("cuda", torch.float16):
                loss = model(batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if not optimizer.step_was_skipped:
                scheduler.step()

    Registered as client state it goes on where it was: the daemon keeps what it was in step(), and the update() that came
    after that is made when it is put back.

    The daemon unscales, sees whether anything is NaN or infinite, and skips the step for all ranks or for none; each
    rank's scaler follows that result, so that they stay equal. The run is staged. Not thread-safe.

    optimizer: whose loss_scale it sets. init_scale, growth_factor, backoff_factor, growth_interval, enabled: torch's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ):
        if not isinstance(optimizer, Optimizer):
            raise Rejected(
                f"GradScaler of a {type(optimizer).__name__}: give the ballast optimizer, as GradScaler(optimizer)"
            )
        if not growth_factor > 1:
            raise Rejected(f"growth_factor={growth_factor!r}: it must be above 1")
        if not 0 < backoff_factor < 1:
            raise Rejected(f"backoff_factor={backoff_factor!r}: it must be between 0 and 1")
        self._optimizer = optimizer
        self._scale = _as_float32(init_scale)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = 0
        self._enabled = enabled
        self._before: int | None = None  # the last step when step() was called; None: it was not
        self._within_step = False  # where client state is taken
        if enabled:
            optimizer.use_dynamic_loss_scale()
            self._set(self._scale)

    def scale(self, outputs: Any) -> Any:
        """A tensor, or each of an iterable of tensors, times the scale. As in torch the scale is a tensor of float32 without
        dimensions: a float16 loss without any comes out in float32, in which 65536 does not overflow."""
        if not self._enabled:
            return outputs
        LossScale.use()
        if isinstance(outputs, Tensor):
            return outputs * torch.tensor(self._scale, dtype=torch.float32, device=outputs.device)
        if not isinstance(outputs, Iterable):
            raise Rejected(f"scale() of a {type(outputs).__name__}: give a tensor or an iterable of tensors")
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def unscale_(self, optimizer: Any) -> None:
        """Nothing: the daemon unscales, and what clip_grad_norm_ returns and clips by is the norm of unscaled gradients."""

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """optimizer.step(*args, **kwargs). Returns what that returns, or None if the step was skipped."""
        if optimizer is not self._optimizer:
            raise Rejected("this GradScaler was made for another optimizer: make one for each")
        if self._enabled:
            last = optimizer.last_result
            self._before = last.step if last is not None else 0
            LossScale.use()  # as torch's, which divides what was put into .grad by hand
        self._within_step = self._enabled
        try:
            value = optimizer.step(*args, **kwargs)
        finally:
            self._within_step = False
        return None if self._enabled and optimizer.step_was_skipped else value

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """After step(): lowers the scale if the step overflowed, raises it after growth_interval steps that did not."""
        if not self._enabled:
            return
        if new_scale is not None:
            self._set(float(new_scale))
            return
        if self._before is None:
            raise Rejected("update() before step(): call it once after each step()", "FAILED_PRECONDITION")
        before, self._before = self._before, None
        result = self._optimizer.last_result
        if result is None or result.step <= before:
            return
        self._follow(result.outcome, result.reason)

    def _follow(self, outcome: str, reason: str) -> None:
        """What a step that ended so makes of the scale."""
        if reason == "overflow":
            self._set(self._scale * self._backoff_factor)
            self._growth_tracker = 0
        elif outcome == "APPLIED":
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                self._set(self._scale * self._growth_factor)
                self._growth_tracker = 0

    def _catch_up(self) -> None:
        """Makes the update() after the step() that the state was taken in, and those of the steps since, which were made
        without this rank. The loop's own, if it comes, then changes nothing."""
        for end in self._optimizer.ends_since_state:
            self._follow("APPLIED" if end is None else end.outcome, "" if end is None else end.reason)
        result = self._optimizer.last_result
        self._before = result.step if result is not None else 0

    def get_scale(self) -> float:
        if not self._enabled:
            return 1.0
        LossScale.use()  # by hand
        return self._scale

    def get_growth_factor(self) -> float:
        return self._growth_factor

    def get_backoff_factor(self) -> float:
        return self._backoff_factor

    def get_growth_interval(self) -> int:
        return self._growth_interval

    def is_enabled(self) -> bool:
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and loadable by it. Empty if it is not enabled."""
        if not self._enabled:
            return {}
        state: dict[str, Any] = {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }
        if self._within_step:
            state["_in_step"] = True
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._enabled:
            return
        if not state_dict:
            raise Rejected("this state_dict is of a GradScaler that was not enabled, and is empty")
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._growth_tracker = state_dict["_growth_tracker"]
        self._set(float(state_dict["scale"]))
        if state_dict.get("_in_step"):
            self._catch_up()

    def _set(self, scale: float) -> None:
        """A scale that fp32 cannot hold, or none, keeps the last one: the daemon takes no other. It is rounded to fp32, so
        that gradients are divided by what the loss was multiplied with."""
        scale = _as_float32(scale)
        if math.isfinite(scale) and 2.0**-126 <= scale < 2.0**127:
            self._scale = scale
        self._optimizer.loss_scale = self._scale


def _as_float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()
