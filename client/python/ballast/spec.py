"""A run's description as the daemon is given it: ballast.v1.RunSpec in Protobuf's JSON.

lr, weight_decay and betas are left out: each step sends its own, so a trainer that is started again in the middle of a
schedule describes the same run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ballast.options import MASTERS
from ballast.parameters import FORMATS, NamedParameter


def run_spec(run: str, tensors: Sequence[NamedParameter], groups: Sequence[Mapping[str, Any]], seed: int) -> str:
    return json.dumps(
        {
            "run_id": run,
            "tensors": [_tensor(tensor, groups[tensor.group]) for tensor in tensors],
            "groups": [_group(group) for group in groups],
            "seed": str(seed),
        }
    )


def _tensor(tensor: NamedParameter, group: Mapping[str, Any]) -> dict[str, Any]:
    spec = {
        "name": tensor.name,
        "shape": [str(extent) for extent in tensor.parameter.shape],
        "dtype": FORMATS[tensor.parameter.dtype],
        "group": tensor.group,
    }
    scales = {key: float(group[key]) for key in ("lr_scale", "wd_scale") if group[key] != 1}
    return spec | scales


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rule": "adamw",
        "hyper": {"eps": float(group["eps"])},
        "master": MASTERS[group["master_weight_bits"]],
        "state": group["state_dtype"],
        "rounding": group["rounding"],
    }
