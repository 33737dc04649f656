"""An optimizer as the daemon knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ballast.errors import Rejected


@dataclass(frozen=True)
class Rule:
    """An optimizer as the daemon knows it, and the options of a param_group that are its hyperparameters."""

    name: str
    steps: tuple[str, ...]  # may change from step to step
    fixed: tuple[str, ...] = ()  # in the description of the run
    decoupled: bool = False  # its decay is multiplied by lr, or by lr / lr_peak
    others: tuple[Rule, ...] = ()  # that a param_group may have in its stead: it names one as its "rule"
    values: Mapping[str, Any] = field(default_factory=dict)  # of a group with it, in place of the optimizer's defaults
    needs: Mapping[str, str] = field(default_factory=dict)  # what a group must give or `values` have, and why
    only: Mapping[str, Any] = field(default_factory=dict)  # options of which the daemon has one value

    def of(self, group: Mapping[str, Any]) -> Rule:
        """The group's. Rejected if there is none of the name that it gives."""
        if not self.others:
            return self
        name, rules = group.get("rule", self.name), (self, *self.others)
        for rule in rules:
            if rule.name == name:
                return rule
        valid = ", ".join(repr(rule.name) for rule in rules)
        raise Rejected(f"rule={name!r} of a param_group: it must be one of {valid}")
