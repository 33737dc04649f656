"""When a step's updates are made, and what may keep them from being made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ballast.averages import as_decays
from ballast.durability import Checkpoints, checkpoints
from ballast.errors import Rejected
from ballast.following import Follow, as_follow
from ballast.spikes import Spikes, as_spikes

# What a step of a staged run may have where gradient_accumulation_steps is left out: as many as the wire takes.
_MOST_MICRO_BATCHES = 1024

# The first is the default.
COMMITS = ("auto", "release", "staged")
TENSOR_CLIPS = (None, "adagc")
NONFINITE = ("skip_tensor", "skip_step", "stop")
ON_TORN = ("close", "rewind")
ON_LOST_RANK = ("wait", "continue")


@dataclass(frozen=True)
class StepRules:
    """What a run fixes of its steps.

    commit: "release", each tensor is updated when its gradient is complete, or "staged", all after the verdict.
    accumulation: micro-batches a step, at most; a staged step may have fewer, and its end tells how many.
    snapshots: of past steps, kept at most; snapshot_every: one after each step that is a multiple of it.
    checkpoints: when the run is written to the daemon's disk.
    follow: that readers may follow it; None: they may not.
    averages: of the weights, that the daemon keeps, by their decays.
    """

    commit: str
    max_grad_norm: float | None = None
    nonfinite: str = "skip_tensor"
    dynamic_loss_scale: bool = False
    accumulation: int = 1
    tensor_clip: str | None = None
    spikes: Spikes = Spikes()
    snapshots: int = 0
    snapshot_every: int = 50
    on_torn: str = "close"
    rank_timeout: float = 60.0
    step_timeout: float | None = None
    on_lost_rank: str = "wait"
    checkpoints: Checkpoints = Checkpoints()
    follow: Follow | None = None
    averages: tuple[float, ...] = ()

    @property
    def staged(self) -> bool:
        return self.commit == "staged"

    def spec(self) -> dict[str, Any]:
        """Its fields of ballast.v1.RunSpec, in Protobuf's JSON; those that are the default left out."""
        fields: dict[str, Any] = {}
        if self.staged:
            fields["commit"] = "COMMIT_MODE_STAGED"
        if self.max_grad_norm is not None:
            fields["max_grad_norm"] = self.max_grad_norm
        if self.nonfinite != "skip_tensor":
            fields["nonfinite"] = f"NONFINITE_POLICY_{self.nonfinite.upper()}"
        if self.dynamic_loss_scale:
            fields["dynamic_loss_scale"] = True
        if self.accumulation > 1:
            fields["accumulation"] = self.accumulation
        if self.tensor_clip is not None:
            fields["tensor_clip"] = {}
        if spikes := self.spikes.spec():
            fields["spikes"] = spikes
        if self.snapshots > 0:
            fields["rewind"] = {"snapshots": self.snapshots, "every": self.snapshot_every}
        if checkpoint := self.checkpoints.spec():
            fields["checkpoint"] = checkpoint
        if self.follow is not None:
            fields["follow"] = self.follow.spec()
        if self.averages:
            fields["averages"] = list(self.averages)
        if self.on_torn != "close":
            fields["on_torn"] = f"TORN_POLICY_{self.on_torn.upper()}"
        if self.rank_timeout != 60:
            fields["rank_timeout_s"] = self.rank_timeout
        if self.step_timeout is not None:
            fields["step_timeout_s"] = self.step_timeout
        if self.on_lost_rank != "wait":
            fields["on_lost_rank"] = f"LOST_RANK_POLICY_{self.on_lost_rank.upper()}"
        return fields


def step_rules(options: Mapping[str, Any], dynamic_loss_scale: bool = False, framework: str | None = None) -> StepRules:
    """framework: what drives the loop, and may clip, accumulate or skip after backward(): commit="auto" is staged then.

    From the options commit, max_grad_norm, tensor_clip, nonfinite, gradient_accumulation_steps, spikes, snapshots, on_torn,
    rank_timeout, step_timeout, on_lost_rank, follow, ema, and those of checkpoints. Rejected if one is wrong, or two contradict each other.
    """
    commit, nonfinite = _one_of(options, "commit", COMMITS), _one_of(options, "nonfinite", NONFINITE)
    norm, tensor_clip = _norm(options.get("max_grad_norm")), _one_of(options, "tensor_clip", TENSOR_CLIPS)
    on_torn, snapshots = _one_of(options, "on_torn", ON_TORN), _whole(options, "snapshots", 0, least=0)
    if on_torn == "rewind" and snapshots == 0:
        raise Rejected(
            "on_torn='rewind' goes back to a snapshot, but snapshots=0 and none is kept: set it to 1 or more"
        )
    if tensor_clip is not None and norm is not None:
        raise Rejected(
            f"tensor_clip={tensor_clip!r} and max_grad_norm={norm}: the one clips each tensor by its own norm, the other "
            "all by the norm of them together; leave one of them out"
        )
    spikes = as_spikes(options.get("spikes"))
    staged_for = {
        f"max_grad_norm={norm}": norm is not None,
        f"nonfinite={nonfinite!r}": nonfinite == "skip_step",
        "Spikes(action='skip')": spikes.action == "skip",
        "a GradScaler": dynamic_loss_scale,
    }
    needs = [what for what, needed in staged_for.items() if needed]
    if needs and commit == "release":
        raise Rejected(
            f"commit='release' and {needs[0]}: a tensor is updated before the whole step's gradients are known; leave "
            "commit out, or give commit='staged'"
        )
    staged = bool(needs) or commit == "staged" or (commit == "auto" and framework is not None)
    return StepRules(
        commit="staged" if staged else "release",
        max_grad_norm=norm,
        nonfinite=nonfinite,
        dynamic_loss_scale=dynamic_loss_scale,
        accumulation=_whole(options, "gradient_accumulation_steps", _MOST_MICRO_BATCHES if staged else 1, least=1),
        snapshots=snapshots,
        snapshot_every=_whole(options, "snapshot_every", 50, least=1),
        on_torn=on_torn,
        rank_timeout=_seconds(options, "rank_timeout", 60.0),
        on_lost_rank=_one_of(options, "on_lost_rank", ON_LOST_RANK),
        step_timeout=_seconds(options, "step_timeout", None),
        tensor_clip=tensor_clip,
        spikes=spikes,
        checkpoints=checkpoints(options),
        follow=as_follow(options.get("follow")),
        averages=as_decays(options.get("ema")),
    )


def _one_of(options: Mapping[str, Any], name: str, choices: tuple[Any, ...]) -> Any:
    given = options.get(name, choices[0])
    if given not in choices:
        raise Rejected(f"{name}={given!r}: it must be one of {', '.join(map(repr, choices))}")
    return given


def _norm(given: Any) -> float | None:
    if given is None:
        return None
    if isinstance(given, (int, float)) and math.isfinite(given) and given > 0:
        return float(given)
    raise Rejected(f"max_grad_norm={given!r}: it must be None or a finite number above 0")


def _seconds(options: Mapping[str, Any], name: str, default: float | None) -> Any:
    given = options.get(name, default)
    if given is default:
        return given
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given <= 1e6:
        return float(given)
    raise Rejected(
        f"{name}={given!r}: it must be {'None or ' if default is None else ''}above 0 and at most 1e6 seconds"
    )


def _whole(options: Mapping[str, Any], name: str, default: int, least: int) -> int:
    given = options.get(name, default)
    if isinstance(given, int) and not isinstance(given, bool) and given >= least:
        return given
    raise Rejected(f"{name}={given!r}: it must be a whole number of at least {least}")
