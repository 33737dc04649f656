"""What an optimizer's options say of its run, and the description of the run that comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ballast.changed_weights import changed_weights
from ballast.coded_binding import check_codes
from ballast.commit import StepRules, step_rules
from ballast.errors import Rejected
from ballast.formats import FormatRules, Grouping
from ballast.frameworks import driving_framework
from ballast.moments import slot_names
from ballast.options import check_feedback, check_option, check_scales
from ballast.parameters import NamedParameter, ParameterList
from ballast.rank import rank_of
from ballast.rule import Rule
from ballast.saved_state import saved_state
from ballast.shard import check_shards
from ballast.sharding_watch import check_not_gathered
from ballast.spec import run_spec
from ballast.wrappers import find_wrapped


@dataclass(frozen=True)
class Description:
    """A run as it is created or joined.

    spec: what the daemon is given. tensors: what is trained, in the spec's order; grouping: their groups there.
    sharded: whether each rank holds parts of the tensors, as FSDP2 has sharded them.
    changed_weights, error_feedback: the options, of this trainer alone. state_names: by tensor the slots that its
    rule keeps, with torch's names.
    """

    spec: str
    tensors: Sequence[NamedParameter]
    grouping: Grouping
    step_rules: StepRules
    changed_weights: str
    error_feedback: bool
    state_names: Sequence[dict[str, str]]
    sharded: bool

    @property
    def formats(self) -> list[Mapping[str, Any]]:
        """By tensor, as options.FORMATS."""
        return self.grouping.formats


class RunSettings:
    """The options that say what the run is. Rejected by the constructor if one is wrong, or two contradict each other.

    rule: the optimizer's. rank: which of the run's trainers this one is. step_rules: what the run fixes of its steps.
    saved_state: the option.
    """

    def __init__(self, rule: Rule, options: Mapping[str, Any]):
        self.rule = rule
        self.rank = rank_of(options)
        self.step_rules = step_rules(options)
        self._dynamic_loss_scale = self._has_scaler = self._goes_on_staged = False
        self._changed_weights = changed_weights(options.get("changed_weights"))
        self._error_feedback = options.get("error_feedback") or False
        check_option("error_feedback", self._error_feedback, "")
        self.saved_state = saved_state(options.get("saved_state"))
        self._options = options
        self._formats = FormatRules(options.get("formats"))
        self._lr_scales = dict(options.get("lr_scales") or {})
        self._seed = options.get("seed", 0)
        if isinstance(self._seed, bool) or not isinstance(self._seed, int) or not 0 <= self._seed < 2**64:
            raise Rejected(f"seed={self._seed!r}: it must be a whole number from 0 to 2**64 - 1")

    def scale_loss_dynamically(self) -> None:
        """loss_scale follows the results, which makes the run staged. Rejected with commit="release"."""
        self.step_rules = step_rules(self._options, dynamic_loss_scale=True)
        self._dynamic_loss_scale = self._has_scaler = True

    def go_on_as(self, spec: Mapping[str, Any]) -> None:
        """Of a run that is joined before its trainer is known, the GradScaler and the framework that are made after the
        optimizer: what those would ask for is what the run has."""
        if self._options.get("commit") != "release":
            self._goes_on_staged = spec["commit"] == "STAGED"
            self._dynamic_loss_scale = spec["dynamic_loss_scale"]

    def check_scaler(self) -> None:
        if self._dynamic_loss_scale and not self._has_scaler:
            raise Rejected(
                f"run '{self.rank.run}' was begun with a ballast.GradScaler, and this trainer has none: make "
                "GradScaler(optimizer) before the first gradient, and scale the loss by it",
                "FAILED_PRECONDITION",
            )

    def describe(
        self, parameters: ParameterList, groups: Sequence[Mapping[str, Any]], order: Sequence[str] = ()
    ) -> Description:
        """The run that trains those of `parameters` that require a gradient, first those that `order` names. Rejected, naming
        which, if it cannot."""
        framework = driving_framework() or ("the run" if self._goes_on_staged else None)
        self.step_rules = step_rules(self._options, self._dynamic_loss_scale, framework)
        places = {name: place for place, name in enumerate(order)}
        tensors = sorted(parameters.trainable(), key=lambda entry: places.get(entry.name, len(places)))
        names = [entry.name for entry in parameters]
        self._formats.check_used(names)
        check_scales(self._lr_scales, names)
        find_wrapped()
        check_not_gathered((t.name, t.parameter) for t in tensors)
        sharded = check_shards(((t.name, t.parameter) for t in tensors), self.rank.number, self.rank.world)
        if sharded and self._changed_weights == "upload":
            raise Rejected(
                "changed_weights='upload' with sharded parameters: the ranks would have to agree at every step on what each has "
                "changed of its part. Leave it out, and load other weights together with load_state_dict() of the optimizer"
            )
        grouping = self._formats.group(tensors, groups)
        check_codes(tensors, grouping.formats)
        spec = self._spec(tensors, groups, grouping, sharded)
        check_feedback(self._error_feedback, [group.formats["gradient_dtype"] for group in grouping.groups])
        own = self._changed_weights, self._error_feedback
        return Description(spec, tensors, grouping, self.step_rules, *own, self._slots(tensors, groups), sharded)

    def describe_again(
        self, run: Description, parameters: ParameterList, groups: Sequence[Mapping[str, Any]]
    ) -> Description:
        """The run as it is to go on: with its tensors, those that require a gradient by now behind them, and the groups as
        they are. Rejected, naming which, if it cannot."""
        known = {entry.name for entry in run.tensors}
        tensors = [*run.tensors, *(entry for entry in parameters.trainable() if entry.name not in known)]
        check_not_gathered((t.name, t.parameter) for t in tensors)
        check_shards(((t.name, t.parameter) for t in tensors), self.rank.number, self.rank.world)
        grouping = self._formats.group(tensors, groups)
        check_codes(tensors, grouping.formats)
        spec, slots = self._spec(tensors, groups, grouping, run.sharded), self._slots(tensors, groups)
        return replace(run, spec=spec, tensors=tensors, grouping=grouping, state_names=slots)

    def _slots(self, tensors: Sequence[NamedParameter], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        return [slot_names(self.rule.of(groups[tensor.group]).name) for tensor in tensors]

    def _spec(
        self, tensors: Sequence[NamedParameter], groups: Sequence[Mapping[str, Any]], grouping: Grouping, sharded: bool
    ) -> str:
        scales, seed, rules = self._lr_scales, self._seed, self.step_rules
        return run_spec(self.rank, self.rule, tensors, groups, grouping, scales, seed, rules, sharded)
