"""A run's description as the daemon is given it: ballast.v1.RunSpec in Protobuf's JSON.

What may change from step to step (lr, weight_decay, betas, momentum) is left out: each step sends its own, so a trainer
that is started again in the middle of a schedule describes the same run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ballast.commit import StepRules
from ballast.formats import Grouping, WireGroup
from ballast.options import hyper_values
from ballast.parameters import DTYPES, NamedParameter
from ballast.rank import Rank
from ballast.rule import Rule


def run_spec(
    rank: Rank,
    rule: Rule,
    tensors: Sequence[NamedParameter],
    param_groups: Sequence[Mapping[str, Any]],
    grouping: Grouping,
    lr_scales: Mapping[str, float],
    seed: int,
    step_rules: StepRules,
    sharded: bool,
) -> str:
    """sharded: FSDP has taken the mean of the gradients over the ranks, and each rank sends a part."""
    return json.dumps(
        {
            "run_id": rank.run,
            "tensors": [
                _tensor(tensor, index, param_groups[tensor.group], lr_scales.get(tensor.name, 1.0))
                for tensor, index in zip(tensors, grouping.of_tensor)
            ],
            "groups": [_group(rule, group, param_groups[group.origin]) for group in grouping.groups],
            "seed": str(seed),
            "ranks": rank.most,
            **({"reduction": "REDUCTION_SUM"} if sharded else {}),
            **step_rules.spec(),
        }
    )


def with_ranks(spec: str, ranks: int) -> str:
    """The same of a run that reserves memory for so many."""
    return json.dumps({**json.loads(spec), "ranks": ranks})


def follow_of(spec: str) -> dict[str, Any] | None:
    """What it says of readers: ballast.v1.FollowSpec; None: there may be none."""
    follow: dict[str, Any] | None = json.loads(spec).get("follow")
    return follow


def with_follow(spec: str, follow: Mapping[str, Any] | None) -> str:
    """The same of a run that is followed so."""
    fields = {name: value for name, value in json.loads(spec).items() if name != "follow"}
    return json.dumps(fields if follow is None else {**fields, "follow": follow})


def _tensor(tensor: NamedParameter, group: int, options: Mapping[str, Any], lr_scale: float) -> dict[str, Any]:
    spec = {
        "name": tensor.name,
        "shape": [str(extent) for extent in tensor.parameter.shape],
        "dtype": DTYPES[tensor.parameter.dtype],
        "group": group,
    }
    scales = {"lr_scale": float(options["lr_scale"]) * lr_scale, "wd_scale": float(options["wd_scale"])}
    return spec | {key: scale for key, scale in scales.items() if scale != 1}


def _group(rules: Rule, group: WireGroup, options: Mapping[str, Any]) -> dict[str, Any]:
    rule = rules.of(options)
    wire = {
        "rule": rule.name,
        "hyper": hyper_values(options, rule),
        "master": group.formats["master"],
        "state": group.formats["state"],
        "rounding": group.formats["rounding"],
        "serving": group.formats["serving"],
        "gradient": group.formats["gradient_dtype"],
    }
    return {key: value for key, value in wire.items() if value is not None}
