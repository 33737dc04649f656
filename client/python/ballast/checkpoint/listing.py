"""What checkpoints are, for people and as JSON: what `show` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ballast.checkpoint.checkpoint import Checkpoint
from ballast.checkpoint.errors import CheckpointError, Damaged
from ballast.checkpoint.files import check_size, open_plain
from ballast.checkpoint.folders import Place
from ballast.checkpoint.manifest import Manifest, read_manifest

# --- many -----------------------------------------------------------------------------------------------------------


def list_places(places: Sequence[Place]) -> list[dict[str, Any]]:
    """A row for each, by run and number: folder, run, number, step, generation, written_at, bytes, state.

    Of the data nothing is read: what is damaged is so by its manifest, or by a file that is missing or has another
    size. The newest of a run is the last that is kept and not damaged.
    """
    rows = [_row(place) for place in places]
    newest = {row["run"]: row for row in rows if row["state"] == "kept"}
    for row in newest.values():
        row["state"] = "newest"
    return rows


def _row(place: Place) -> dict[str, Any]:
    row: dict[str, Any] = {"folder": str(place.folder), "run": place.run, "number": place.number, "step": place.step}
    try:
        manifest = read_manifest(place.folder)
        _check_sizes(place, manifest)
    except CheckpointError as fault:
        how = "damaged" if isinstance(fault, Damaged) else "cannot be read"
        return row | {"generation": 0, "written_at": "", "bytes": 0, "state": f"{how}: {fault}"}
    return row | {
        "run": manifest.run_id,
        "step": manifest.step,
        "generation": manifest.generation,
        "written_at": manifest.written_at,
        "bytes": manifest.nbytes,
        "state": place.state,
    }


def _check_sizes(place: Place, manifest: Manifest) -> None:
    for entry in manifest.files:
        with open_plain(place.folder / entry.name) as (_, size):
            check_size(place.folder / entry.name, size, entry.nbytes)


def table_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of a table."""
    names = ("run", "number", "step", "written_at", "bytes", "state")
    cells = [
        ("run", "number", "step", "written", "bytes", "state"),
        *(tuple(str(row[n]) for n in names) for row in rows),
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
    numbers = (1, 2, 4)
    lines = []
    for row in cells:
        aligned = [
            cell.rjust(width) if c in numbers else cell.ljust(width) for c, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(aligned).rstrip())
    return lines


# --- one ------------------------------------------------------------------------------------------------------------


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What there is to know without reading the data. Numbers that are not finite are text, as in run.json."""
    manifest = checkpoint.manifest
    result, record = checkpoint.run.get("result", {}), checkpoint.run.get("record", {})
    elements = sum(tensor.elements for tensor in checkpoint.parsed_spec.tensors)
    stored = sum(_stored_bytes(checkpoint).values())
    return {
        "folder": str(checkpoint.folder),
        "run": manifest.run_id,
        "step": manifest.step,
        "generation": manifest.generation,
        "written_at": manifest.written_at,
        "version": manifest.version,
        "revision": manifest.revision,
        "parameters": elements,
        "tensors": len(checkpoint.tensors()),
        "bytes_per_parameter": round(stored / elements, 4),
        "groups": _groups(checkpoint),
        "last_result": {
            "outcome": str(result.get("outcome", "")).removeprefix("STEP_OUTCOME_"),
            "loss": record.get("loss"),
            "grad_norm": result.get("gradNorm", 0.0),
        },
        "client_state": [
            {"rank": rank, "bytes": state.nbytes, "step": state.step}
            for rank, state in enumerate(checkpoint.client_states)
            if state.step > 0
        ],
        "files": [{"name": file.name, "bytes": file.nbytes, "sha256": file.sha256} for file in manifest.files],
    }


def _stored_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    """Of the planes of each tensor, without padding."""
    return {
        tensor.name: sum(-(-tensor.elements // plane.per) * plane.itemsize for plane in tensor.group.planes)
        for tensor in checkpoint.parsed_spec.tensors
    }


def _groups(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """By the spec's groups that have the same optimizer: a table is short that way, whatever their learning rates."""
    stored, sums = _stored_bytes(checkpoint), dict[str, list[int]]()
    for tensor in checkpoint.parsed_spec.tensors:
        elements, nbytes = sums.setdefault(str(tensor.group), [0, 0])
        sums[str(tensor.group)] = [elements + tensor.elements, nbytes + stored[tensor.name]]
    return [
        {"optimizer": optimizer, "parameters": elements, "bytes_per_parameter": round(nbytes / elements, 4)}
        for optimizer, (elements, nbytes) in sums.items()
    ]


def text_of(facts: dict[str, Any]) -> list[str]:
    """The lines that describe() leads to."""
    result = facts["last_result"]
    loss = "" if result["loss"] is None else f"loss {_number(result['loss'])}, "
    lines = [
        f"run {facts['run']}, step {facts['step']}, generation {facts['generation']}",
        f"written {facts['written_at']} by ballastd {facts['version']} ({facts['revision']})",
        f"{facts['parameters']} parameters in {facts['tensors']} tensors, {facts['bytes_per_parameter']:g} bytes each",
        *(f"  {g['optimizer']}: {g['parameters']}, {g['bytes_per_parameter']:g} bytes each" for g in facts["groups"]),
        f"last result {result['outcome']}, {loss}grad norm {_number(result['grad_norm'])}",
    ]
    for state in facts["client_state"]:
        lines.append(f"client_state of rank {state['rank']}: {state['bytes']} bytes, of step {state['step']}")
    if not facts["client_state"]:
        lines.append("client_state: none")
    width = max(len(str(file["bytes"])) for file in facts["files"])
    return lines + [f"  {file['bytes']:{width}}  {file['name']}" for file in facts["files"]]


def _number(value: Any) -> str:
    """Protobuf writes what is not finite as text."""
    return f"{value:.6g}" if isinstance(value, int | float) and math.isfinite(value) else str(value)
