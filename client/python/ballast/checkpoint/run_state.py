"""run.json, as far as it must agree with the spec, the manifest and the folder's other files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ballast.checkpoint.fields import Fields
from ballast.checkpoint.manifest import Manifest
from ballast.checkpoint.spec import Spec


@dataclass(frozen=True)
class ClientState:
    """Of a rank: of which step it is, 0 if there is none, and its bytes."""

    step: int
    nbytes: int


def read_client_states(values: dict[str, Any], spec: Spec, manifest: Manifest, path: Path) -> tuple[ClientState, ...]:
    """By rank. Damaged if the file is not of this spec and step."""
    fields = Fields(values, path)
    for name, wanted in (("step", manifest.step), ("generation", manifest.generation)):
        if fields.integer(name) != wanted:
            raise fields.wrong(name, f"is {fields.integer(name)}, and the manifest's {wanted}")
    result = fields.message("result").integer("step")
    if result != manifest.step:
        raise fields.wrong("result.step", f"is {result}, and the manifest's {manifest.step}")
    _check_tensors(fields, spec, manifest.step)
    _check_detector(fields.message("detector"))
    return _client_states(fields, spec, manifest.step)


def _check_tensors(fields: Fields, spec: Spec, step: int) -> None:
    tensors = len(spec.tensors)
    fields.integers("updates")
    _check_count(fields, "updates", tensors)
    _check_count(fields, "updatedIn", tensors)
    _check_count(fields, "averaged", tensors if spec.averages else 0)
    _check_count(fields, "norms", tensors if spec.clips_tensors else 0)
    if fields.count("lastLr") > 0:
        _check_count(fields, "lastLr", tensors)
    _check_steps(fields, "updatedIn", step)
    result = fields.message("result")
    if any(number >= tensors for number in result.integers("tensorsNotApplied")):
        raise result.wrong("tensorsNotApplied", f"has a number past the last of {tensors} tensors")


def _check_detector(fields: Fields) -> None:
    """How many layers there are depends on the daemon's limits, too: so the two lists of them are compared."""
    if fields.count("rms") != fields.count("curvature"):
        raise fields.wrong("curvature", f"has {fields.count('curvature')} entries, and rms {fields.count('rms')}")


def _client_states(fields: Fields, spec: Spec, step: int) -> tuple[ClientState, ...]:
    for name in ("clientStateSteps", "clientStateBytes"):
        _check_count(fields, name, spec.ranks)
    _check_steps(fields, "clientStateSteps", step)
    pairs = zip(fields.integers("clientStateSteps"), fields.integers("clientStateBytes"))
    states = tuple(ClientState(taken, nbytes) for taken, nbytes in pairs)
    for rank, state in enumerate(states):
        if state.step == 0 and state.nbytes > 0:
            raise fields.wrong(f"clientStateBytes[{rank}]", f"is {state.nbytes}, and it is of no step")
    return states


def _check_count(fields: Fields, name: str, wanted: int) -> None:
    if fields.count(name) != wanted:
        raise fields.wrong(name, f"has {fields.count(name)} entries: the spec leads to {wanted}")


def _check_steps(fields: Fields, name: str, last: int) -> None:
    if any(step > last for step in fields.integers(name)):
        raise fields.wrong(name, f"names a step after {last}, the last")
