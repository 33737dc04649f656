"""The files of a checkpoint, compared with one another: all but the data themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ballast.checkpoint.errors import CheckpointError, Damaged
from ballast.checkpoint.fields import MOST_JSON, parse_object
from ballast.checkpoint.files import read_whole
from ballast.checkpoint.headers import check_header
from ballast.checkpoint.layout import DataFile, client_state_file, model_files, optimizer_files
from ballast.checkpoint.manifest import INDEX, MANIFEST, RUN, SPEC, Manifest
from ballast.checkpoint.run_state import ClientState, read_client_states
from ballast.checkpoint.spec import Spec, read_spec


@dataclass(frozen=True)
class Contents:
    """spec_values and run_values: spec.json and run.json as they are. data: the safetensors files. starts: where the
    data of each begin. faults: what is wrong with the files that follow from spec.json and run.json."""

    spec_values: dict[str, Any]
    run_values: dict[str, Any]
    spec: Spec
    client_states: tuple[ClientState, ...]
    data: tuple[DataFile, ...]
    starts: dict[str, int]
    faults: tuple[CheckpointError, ...]


def read_contents(folder: Path, manifest: Manifest, known_faults: Collection[str] = ()) -> Contents:
    """Raises Damaged or TooNew if spec.json or run.json cannot be used. Files in known_faults are not looked at."""
    spec_values, run_values = (_read_json(folder, manifest, name) for name in (SPEC, RUN))
    spec = read_spec(spec_values, folder / SPEC)
    if spec.run_id != manifest.run_id:
        raise Damaged(folder / SPEC, f"it is of run {spec.run_id!r}, and the manifest of {manifest.run_id!r}")
    client_states = read_client_states(run_values, spec, manifest, folder / RUN)
    models, states = model_files(spec), client_state_file([state.nbytes for state in client_states])
    data = (*models, *optimizer_files(spec), *([states] if states else []))
    faults = _compare_names(folder, manifest, data)
    starts = {}
    for file in data:
        entry = manifest.file(file.name)
        if entry is None or file.name in known_faults:
            continue
        try:
            starts[file.name] = check_header(folder / file.name, file, entry.nbytes)
        except CheckpointError as fault:
            faults.append(fault)
    if manifest.file(INDEX) and INDEX not in known_faults:
        faults += _check_index(folder, manifest, models)
    return Contents(spec_values, run_values, spec, client_states, data, starts, tuple(faults))


def _read_json(folder: Path, manifest: Manifest, name: str) -> dict[str, Any]:
    path, entry = folder / name, manifest.file(name)
    text = read_whole(path, MOST_JSON)
    if entry is None or hashlib.sha256(text).hexdigest() != entry.sha256:
        raise Damaged(path, "its SHA-256 is not what the manifest says")
    return parse_object(text, path)


def _compare_names(folder: Path, manifest: Manifest, data: tuple[DataFile, ...]) -> list[CheckpointError]:
    wanted = {SPEC, RUN, INDEX, *(file.name for file in data)}
    listed = {file.name for file in manifest.files}
    path = folder / MANIFEST
    faults: list[CheckpointError] = [
        Damaged(path, f"it lists no {name}, and {SPEC} and {RUN} lead to one") for name in sorted(wanted - listed)
    ]
    return faults + [
        Damaged(path, f"it lists {name}, and {SPEC} and {RUN} lead to none") for name in sorted(listed - wanted)
    ]


def _check_index(folder: Path, manifest: Manifest, models: list[DataFile]) -> list[CheckpointError]:
    path = folder / INDEX
    try:
        found = _read_json(folder, manifest, INDEX)
    except CheckpointError as fault:
        return [fault]
    wanted = {entry.key: file.name for file in models for entry in file.entries}
    metadata = {"total_size": sum(file.data_bytes for file in models)}
    if found.get("weight_map") != wanted:
        return [Damaged(path, f"its weight_map is not what {SPEC} leads to")]
    if found.get("metadata") != metadata:
        return [Damaged(path, f"its metadata is not {metadata}, to which {SPEC} leads")]
    return []
