"""Formats chosen by the tensors' names, and the groups on the wire that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ballast.errors import Rejected
from ballast.options import ALIASES, FORMATS, MASTERS, check_option, format_values
from ballast.parameters import NamedParameter

_UNNAMED = (
    "Parameters that are given without names are called so: give model.named_parameters(), to HF's Trainer by "
    "optimizers=(ballast.AdamW(model.named_parameters(), ...), None)"
)

# What a tensor travels in: None is a choice, of the parameter's dtype.
_TRAVELS = ("serving", "gradient_dtype")


@dataclass(frozen=True)
class WireGroup:
    """Tensors of one param_group with the same formats: a group of the run."""

    origin: int  # index of the param_group, whose lr and other values it has
    formats: Mapping[str, Any]  # by options.FORMATS


@dataclass(frozen=True)
class Grouping:
    groups: Sequence[WireGroup]  # first one for each param_group, then those split from them
    of_tensor: Sequence[int]  # index into groups, by tensor

    @property
    def formats(self) -> list[Mapping[str, Any]]:
        """By tensor, as options.FORMATS."""
        return [self.groups[group].formats for group in self.of_tensor]


class FormatRules:
    """{pattern: {option: value}}: a tensor has the formats of the first pattern that matches its name, and those of its
    param_group where no pattern matches or the pattern does not say; "serving": None and "gradient_dtype": None say."""

    def __init__(self, given: Mapping[str, Mapping[str, Any]] | None):
        self._rules: list[tuple[str, dict[str, Any]]] = []
        if given is not None and not isinstance(given, Mapping):
            raise Rejected(f"formats={given!r}: give a dict of patterns, such as {{'*embed*': {{'master': 'fp32'}}}}")
        for pattern, options in (given or {}).items():
            if not isinstance(options, Mapping):
                raise Rejected(f"formats[{pattern!r}] is {options!r}: give a dict of {', '.join(FORMATS)}")
            self._rules.append((pattern, _resolve(pattern, options)))

    def check_used(self, names: Iterable[str]) -> None:
        """Rejected, naming it, if a pattern matches none of the names."""
        all_names = list(names)
        unnamed = all(name.startswith("param.") for name in all_names)  # as ParameterList calls those given without
        for pattern, _ in self._rules:
            if not any(fnmatchcase(name, pattern) for name in all_names):
                raise Rejected(
                    f"formats: the pattern '{pattern}' matches no parameter; there are {', '.join(all_names[:8])}"
                    + (", ..." if len(all_names) > 8 else "")
                    + (f". {_UNNAMED}" if unnamed else "")
                )

    def group(self, tensors: Sequence[NamedParameter], param_groups: Sequence[Mapping[str, Any]]) -> Grouping:
        groups = [WireGroup(index, format_values(group)) for index, group in enumerate(param_groups)]
        split: dict[tuple[int, int], int] = {}
        of_tensor = []
        for tensor in tensors:
            rule = self._first_match(tensor.name)
            if rule is None:
                of_tensor.append(tensor.group)
                continue
            if (tensor.group, rule) not in split:
                split[tensor.group, rule] = len(groups)
                groups.append(WireGroup(tensor.group, {**groups[tensor.group].formats, **self._rules[rule][1]}))
            of_tensor.append(split[tensor.group, rule])
        return Grouping(groups, of_tensor)

    def _first_match(self, name: str) -> int | None:
        return next((i for i, (pattern, _) in enumerate(self._rules) if fnmatchcase(name, pattern)), None)


def _resolve(pattern: str, options: Mapping[str, Any]) -> dict[str, Any]:
    where = f" of formats[{pattern!r}]"
    for option, value in options.items():
        if option not in FORMATS and option not in ALIASES:
            raise Rejected(f"{option}={value!r}{where}: it may have {', '.join((*FORMATS, *ALIASES))}")
        check_option(option, value, where)
    resolved = {o: value for o, value in options.items() if o in _TRAVELS or (o in FORMATS and value is not None)}
    if "master_weight_bits" in options:
        resolved.setdefault("master", MASTERS[options["master_weight_bits"]])
    if "state_dtype" in options:
        resolved.setdefault("state", options["state_dtype"])
    return resolved
