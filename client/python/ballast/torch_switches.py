"""Switches of torch's optimizers that a param_group may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ballast.errors import Rejected
from ballast.rule import Rule

# Those that choose an implementation, and so nothing here.
IMPLEMENTATION = ("fused", "foreach", "capturable")
# Those that change what is computed, and that these rules do not have: why, and what to write.
_ABSENT = {
    "amsgrad": "the daemon keeps no maximum of second moments; leave it out",
    "maximize": "the daemon goes down the gradient; leave it out, and call backward() on the loss times -1",
    "differentiable": "the update is made by the daemon, where autograd does not see it; leave it out",
}


def check_switches(group: Mapping[str, Any], rule: Rule, where: str) -> None:
    """Rejected if one asks for what the rule does not compute."""
    for option, reason in _ABSENT.items():
        if group.get(option):
            raise Rejected(f"{option}={group[option]!r}{where} is not supported: {reason}")
    for option in IMPLEMENTATION:
        if group.get(option) not in (None, True, False):
            raise Rejected(f"{option}={group[option]!r}{where}: it must be None, True or False")
    _check_decay(group, rule, where)


def _check_decay(group: Mapping[str, Any], rule: Rule, where: str) -> None:
    decoupled = group.get("decoupled_weight_decay")
    if rule.name == "adam" and decoupled:
        raise Rejected(f"decoupled_weight_decay=True{where} is AdamW's rule: write ballast.AdamW in place of Adam")
    if rule.name == "adamw" and decoupled is False and float(group["weight_decay"]) != 0:
        raise Rejected(f"decoupled_weight_decay=False{where} is Adam's rule: write ballast.Adam in place of AdamW")
