#!/usr/bin/env python3
"""The results file of tests/gpu_check.sh, from what its parts left in a folder.

    gpu_report.py FOLDER RESULTS

FOLDER has machine.txt (a "name: value" a line), parts.tsv (part, outcome, seconds, note), and, where they got that far,
identity.json, bench.jsonl, peers.jsonl and training.txt. A part that left nothing is written down as not measured.
"""

import json
import sys
from pathlib import Path

UNMEASURED = "not measured"


def json_lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            rows.append({"skipped": "the program was stopped while it wrote this line"})
    return rows


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]


def spread(quartiles: list[float], digits: int = 3) -> str:
    low, median, high = (f"{value:.{digits}g}" for value in quartiles)
    return f"{median} ({low} to {high})"


def machine(folder: Path) -> list[str]:
    path = folder / "machine.txt"
    known = dict(line.split(": ", 1) for line in path.read_text().splitlines() if ": " in line) if path.exists() else {}
    return table(["machine", ""], [[name, value or UNMEASURED] for name, value in known.items()])


def parts(folder: Path) -> list[str]:
    path = folder / "parts.tsv"
    rows = [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []
    return table(["part", "outcome", "seconds", "note"], [(row + [""] * 4)[:4] for row in rows])


def identity(folder: Path) -> list[str]:
    rows = json_lines(folder / "identity.json")
    if not rows:
        return [f"CPU against GPU: {UNMEASURED}."]
    found = rows[0]
    lines = [
        f"{found['states']} states compared byte for byte over {found['kernels']} kernels and {found['masters']} masters, "
        f"against the CPU's {found['isa']} isa: **{found['differences']} differences**. "
        f"{found['rejected']} of {found['blocks']} blocks were rejected, on both sides. {found['checks']} other checks."
    ]
    lines += [f"First difference: {found['first']}"] if found["first"] else []
    lines += [f"Stopped by a failure: {found['failure']}"] if found["failure"] else []
    return lines


HEAD = ["B/param", "Gparam/s", "share of copy", "copy GB/s", "rounds"]


def figures(row: dict) -> list[str]:
    if "skipped" in row or "share_of_copy" not in row:
        return [UNMEASURED + ": " + row.get("skipped", "no figures"), "", "", "", ""]
    return [
        f"{row['bytes_per_parameter']:.5g}",
        spread(row["gparams_per_second"]),
        spread(row["share_of_copy"]),
        spread(row["copy_gb_per_second"], 4),
        str(row["rounds"]),
    ]


def bench(folder: Path) -> list[str]:
    rows = json_lines(folder / "bench.jsonl")
    if not rows:
        return [f"Updates: {UNMEASURED}."]
    cells = []
    for row in rows:
        tensors = row.get("tensors", "")
        if row.get("count", 1) > 1 and not tensors.startswith("2^"):
            tensors += f" ({row['count']} tensors)"
        what = [tensors, row.get("rule", ""), row.get("formats", "")]
        cells.append(what + [row.get("rounding", ""), row.get("statistics", ""), *figures(row)])
    return table(["tensors", "rule", "formats", "rounding", "statistics", *HEAD], cells)


def peers(folder: Path) -> list[str]:
    rows = json_lines(folder / "peers.jsonl")
    if not rows:
        return [f"Peers: {UNMEASURED}."]
    cells = []
    for row in rows:
        size = f"2^{row['elements'].bit_length() - 1}" if "elements" in row else ""
        cells.append([row.get("peer", ""), row.get("version", ""), size, *figures(row)])
    return table(["peer", "version", "elements", *HEAD], cells)


def training(folder: Path) -> list[str]:
    path = folder / "training.txt"
    return ["```", path.read_text().strip(), "```"] if path.exists() else [f"Training against a daemon: {UNMEASURED}."]


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    lines = ["# On a GPU, measured", "", "`tests/gpu_check.sh`. Medians, quartiles in brackets.", "", *machine(folder)]
    lines += ["", *parts(folder), "", "## The bits", "", *identity(folder)]
    lines += ["", "## Updates, against a device-to-device copy of the same bytes", "", *bench(folder)]
    lines += ["", "## Optimizers of others", "", *peers(folder)]
    lines += ["", "## Training", "", *training(folder)]
    Path(sys.argv[2]).write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
