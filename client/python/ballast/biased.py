"""Moments of Adam's kin and of StableAdamW, which are the same but for their bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ballast.moments import Moments

UNBIASED = "stable_adamw"
_BIASED = ("adam", "adamw", "collage_light", "collage_plus")


def as_kept(moments: Moments, saved: Mapping[str, Any], rule: str) -> Moments:
    """As the daemon's `rule` keeps them. saved: the param_group that they were saved with.

    StableAdamW divides by 1 - beta^t what it keeps, all others do so when they take it: what one has saved is short of the
    other's by that, a long time with beta2 = .999.
    """
    ours = rule == UNBIASED
    if (
        not moments.slots
        or moments.updates == 0
        or rule not in (UNBIASED, *_BIASED)
        or _is_unbiased(saved, ours) == ours
    ):
        return moments
    slots = dict(moments.slots)
    for slot, beta in zip(("momentum", "variance"), saved["betas"]):
        factor = 1 - float(beta) ** moments.updates
        values = slots[slot].double()
        slots[slot] = (values / factor if ours else values * factor).to(torch.float32)
    return replace(moments, slots=slots)


def _is_unbiased(saved: Mapping[str, Any], ours: bool) -> bool:
    """A param_group of StableAdamW names its rule, but for those of versions that did not; they have Ballast's options. What
    torch's Adam has trained has "amsgrad", too."""
    if "amsgrad" in saved:
        return False
    return bool(saved["rule"] == UNBIASED) if "rule" in saved else ours and "lr_scale" in saved
