"""The hyperparameters of param_groups on their way to the daemon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ballast.errors import Rejected
from ballast.formats import Grouping
from ballast.options import COMMON, check_group
from ballast.rule import Rule
from ballast.scaled_rates import ScaledRates

Groups = Sequence[Mapping[str, Any]]
# Options of the run's description that cannot change in it: why, and what to write.
_LASTING = {
    "rule": "a tensor keeps its rule; set it back, and give such parameters to another group from the beginning",
    "decouple_lr": "it only says what lr_peak begins with; set it back, and set lr_peak, to None where decay is to follow lr",
}


class Hyperparameters:
    """Which of them the run has in its description, and which the open step was begun with.

    `groups` are the optimizer's param_groups as they are at the call: torch replaces them, and schedulers change them.
    What is sent is by group of the run, of which a param_group may have several. One thread at a time.
    """

    def __init__(self, rule: Rule):
        self._rule = rule
        self._scaled_rates = ScaledRates()
        self._fixed: list[dict[str, Any]] = []
        self._sent: list[dict[str, float]] = []  # by param_group
        self._last: list[dict[str, float]] = []  # likewise, of the step before
        self._grouping = Grouping([], [])

    @property
    def sent(self) -> bool:
        """Whether a step was begun, since the run was rewound if it was."""
        return bool(self._sent)

    def add(self, group: Mapping[str, Any]) -> None:
        """The optimizer has it, as it is now, after those that it had."""
        self._scaled_rates.note(group["lr"])

    def fix(self, groups: Groups, grouping: Grouping) -> None:
        """The run was joined, or amended, with these groups."""
        self._fixed = [self._described(group) for group in groups]
        self._grouping = grouping

    def unfix(self) -> None:
        """The run is no longer as these groups are, nor is it known with which it was so: all of them count as added."""
        self._fixed = []

    def _described(self, group: Mapping[str, Any]) -> dict[str, Any]:
        rule = self._rule.of(group)
        described = {option: group.get(option) for option in (*rule.fixed, *COMMON)}
        plain = {option: value.item() if isinstance(value, Tensor) else value for option, value in described.items()}
        return {"rule": rule.name, **plain}

    def begin(self, groups: Groups) -> list[dict[str, float]]:
        """What a step is begun with. Rejected if a value cannot be one."""
        values = self._read(groups)
        self._refuse_momentum(self._sent, values, groups)
        self._last, self._sent = self._sent, values
        return self._by_wire_group(self._sent)

    def end(self, groups: Groups, step: int, staged: bool) -> list[dict[str, float]]:
        """What the open step is ended with: in a staged run the values as they are now. In another none are sent, for
        weights were updated already: Rejected if they are no longer those that the step was begun with. Rejected if what the
        run has in its description was changed since."""
        values = self._read(groups)
        change = self.changed(groups)
        if change is not None:
            raise Rejected(
                f"{change} since the first gradient of step {step}, and the run has the old one until the next: change it after "
                "step()",
                "FAILED_PRECONDITION",
            )
        if staged:
            self._refuse_momentum(self._last, values, groups)
            self._sent = values
            return self._by_wire_group(values)
        self._check_unchanged(values, step)
        return []

    def forget(self) -> None:
        """The step that was begun is gone, with the run's rewinding."""
        self._sent = []

    def _read(self, groups: Groups) -> list[dict[str, float]]:
        for group in groups:
            check_group(group, self._rule)
        self._scaled_rates.refuse_scaled(groups)
        return [_step_values(group, self._rule.of(group)) for group in groups]

    def _refuse_momentum(self, before: list[dict[str, float]], values: list[dict[str, float]], groups: Groups) -> None:
        """Rejected if SGD's momentum becomes 0, or was it in the step before. torch keeps its buffer as it is then, or has none,
        which begins with the next gradient; the daemon's follows the gradient."""
        for number, (then, now, group) in enumerate(zip(before, values, groups)):
            if self._rule.of(group).name in ("sgd", "sgdw") and (then["momentum"] == 0) != (now["momentum"] == 0):
                raise Rejected(
                    f"momentum of param_groups[{number}] changed from {then['momentum']} to {now['momentum']}: a momentum of 0 goes "
                    "with no buffer, and a run has one or has none. Keep it above 0, or make another optimizer, with a run of its "
                    "own, for the steps that have the other",
                    "FAILED_PRECONDITION",
                )

    def _by_wire_group(self, values: list[dict[str, float]]) -> list[dict[str, float]]:
        return [values[group.origin] for group in self._grouping.groups]

    def _check_unchanged(self, values: list[dict[str, float]], step: int) -> None:
        for number, (then, now) in enumerate(zip(self._sent, values)):
            for key in then:
                if now[key] != then[key]:
                    raise Rejected(
                        f"{key} of param_groups[{number}] changed from {then[key]} to {now[key]} since the first "
                        f"gradient of step {step}, and weights were updated with the old value: change it after step()",
                        "FAILED_PRECONDITION",
                    )

    def changed(self, groups: Groups) -> str | None:
        """What was changed since fix() of all that the run has in its description, or that groups were added: the first of it,
        in words; None: nothing. Rejected if that cannot change, or a value cannot be one."""
        first = None if len(groups) == len(self._fixed) else f"param_groups[{len(self._fixed)}] was added"
        for number, (then, group) in enumerate(zip(self._fixed, groups)):
            now = self._described(group)
            for key in (key for key in then if now.get(key) != then[key]):
                change = f"{key} of param_groups[{number}] changed from {then[key]!r} to {now.get(key)!r}"
                if key in _LASTING:
                    raise Rejected(f"{change}: {_LASTING[key]}", "FAILED_PRECONDITION")
                first = first or change
        if first is not None:
            for group in groups:
                check_group(group, self._rule)
        return first


def _step_values(group: Mapping[str, Any], rule: Rule) -> dict[str, float]:
    """What a step sends of a group."""
    values: dict[str, float] = {}
    for option in rule.steps:
        if option == "betas":
            values["beta1"], values["beta2"] = map(float, group["betas"])
        else:
            values[option] = float(group[option])
    return values
