"""Loss spikes: what a run looks for, what it does then, and what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ballast.errors import Rejected

KINDS = ("rms", "curvature", "gradient_norm", "nonfinite", "loss")
ACTIONS = ("warn", "skip", "rewind")


@dataclass(frozen=True)
class SpikeEvent:
    """What the daemon found at a step. Python warns of the first of each kind but "gradient_norm", which is only counted, as is
    what is found while a loss spike goes on; of a loss that is not finite it warns again, once a minute at most.

    kind: "rms", RMS_t of a layer is at its limit: its second moment lags behind the gradient, and a loss spike may
        follow within 8 steps; "curvature", the loss curves too much along the last update for its step size, with the
        same consequence; "gradient_norm", the norm lies far above those of the steps before; "nonfinite", a gradient is
        not finite; "loss", the loss lies far above those of the steps before and stays there, or is not finite.
    layer, tensor: where; "" where the whole model is meant.
    value, threshold: what was found, and what it reached; for "nonfinite" the number of tensors, and 0.
    text: all this in a sentence.
    since_step: of "loss" the spike's first step, whose loss is `value`; of the others that of a loss spike that goes on,
        so that they foretell none, or 0.
    """

    kind: str
    layer: str
    tensor: str
    value: float
    threshold: float
    text: str
    since_step: int = 0

    @classmethod
    def from_fields(cls, wire: Mapping[str, Any]) -> SpikeEvent:
        own = {field.name: wire[field.name] for field in fields(cls)}
        return cls(**own | {"kind": wire["kind"].lower()})


@dataclass(frozen=True)
class Spikes:
    """The option `spikes` of the optimizers: how the daemon looks for loss spikes, and what it does about them. None is
    the daemon's default; StableAdamW's paper (arXiv 2304.13013) has rms_margin=0, rms_min_elements=1.

    rms_threshold: of RMS_t; 2.3. RMS_t is at most sqrt(1 / (1 - beta2)): one that cannot be reached is refused.
    rms_margin: times the layer's largest RMS_t of the last 128 steps: an event reaches it too; 2.25. 0: it need not.
    rms_min_elements: of a tensor that is watched, of two dimensions; of one dimension 256 times as many; 4096, and what is
        smaller where a threshold is for nothing else. 1: all.
    layers: {pattern: threshold} for layers whose whole name matches the regular expression; the first holds.
    warmup_steps: in which only "nonfinite" is found, and a loss that is not finite; 100.
    loss_sigmas: how far above the median of the last 128 losses one lies that may begin a spike; 3.2 standard deviations.
        It is a spike once half of the ten losses from there on lie 2 above, or one 16; more where many of the 128 were high.
    norm_sigmas: standard deviations above the mean of the last 128 norms; 6.
    curvature: whether it is measured, on a 16th of the parameters.
    action: "warn": StepResult.spikes and a Python warning tell of it; "skip": the step is SKIPPED for "spike" (needs
        commit="staged", which "auto" then is); "rewind": the run goes back to a snapshot (needs snapshots=).
    act_on: the kinds that the action answers; None: "rms" and "gradient_norm" for "skip", "loss" for "rewind".
    rewind_steps: how far back, at least; 20.
    max_rewinds: of a run, after which it stops; 3.
    max_skips: in a row, after which a step is applied; 5.
    cooldown_steps: without an action after one; 0.
    """

    rms_threshold: float | None = None
    rms_margin: float | None = None
    rms_min_elements: int | None = None
    layers: Mapping[str, float] = field(default_factory=dict)
    warmup_steps: int | None = None
    loss_sigmas: float | None = None
    norm_sigmas: float | None = None
    curvature: bool = False
    action: Literal["warn", "skip", "rewind"] = "warn"
    act_on: Sequence[str] | None = None
    rewind_steps: int | None = None
    max_rewinds: int | None = None
    max_skips: int | None = None
    cooldown_steps: int | None = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise Rejected(f"Spikes(action={self.action!r}): it must be one of {', '.join(map(repr, ACTIONS))}")
        for kind in self.act_on or ():
            if kind not in KINDS:
                raise Rejected(f"Spikes(act_on={self.act_on!r}): {kind!r} is none of {', '.join(map(repr, KINDS))}")

    def spec(self) -> dict[str, Any]:
        """ballast.v1.SpikeSpec, in Protobuf's JSON; the daemon checks the numbers."""
        spelt = ("layers", "curvature", "action", "act_on")
        wire = {name: value for name, value in vars(self).items() if name not in spelt and value is not None}
        if self.layers:
            wire["layers"] = [{"layer": layer, "rms_threshold": value} for layer, value in self.layers.items()]
        if self.curvature:
            wire["curvature"] = True
        if self.action != "warn":
            wire["action"] = f"SPIKE_ACTION_{self.action.upper()}"
        if self.act_on:
            wire["act_on"] = [f"SPIKE_KIND_{kind.upper()}" for kind in self.act_on]
        return wire


def as_spikes(given: Any) -> Spikes:
    if given is None:
        return Spikes()
    if isinstance(given, Spikes):
        return given
    raise Rejected(f"spikes={given!r}: it must be None or a ballast.Spikes")
