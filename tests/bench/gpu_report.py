#!/usr/bin/env python3
"""The results file of tests/gpu_check.sh, from what its parts left in a folder.

    gpu_report.py FOLDER RESULTS

FOLDER has machine.txt (a "name: value" a line), parts.tsv (part, outcome, seconds, note), and, where they got that far,
identity.json, bench.jsonl, clocks.csv, device.jsonl, peers.jsonl, training.txt, trainer.jsonl, follower.jsonl and layers.jsonl. A part that left
nothing is written down as not measured.
"""

import json
import re
import statistics
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
    for row in [row for row in rows if "matrix" not in row]:
        tensors = row.get("tensors", "")
        if row.get("count", 1) > 1 and not tensors.startswith("2^"):
            tensors += f" ({row['count']} tensors)"
        what = [tensors, row.get("rule", ""), row.get("formats", "")]
        cells.append(what + [row.get("rounding", ""), row.get("statistics", ""), *figures(row)])
    return table(["tensors", "rule", "formats", "rounding", "statistics", *HEAD], cells)


CLOCKS = ["clock of the multiprocessors", "clock of the memory", "power", "temperature"]


def clocks(folder: Path) -> list[str]:
    """clocks.csv has a sample a line, in the order of CLOCKS: "1980 MHz, 2619 MHz, 512.30 W, 54"."""
    path = folder / "clocks.csv"
    samples = [line.split(", ") for line in path.read_text().splitlines()] if path.exists() else []
    rows = []
    for name, cells in zip(CLOCKS, zip(*(line for line in samples if len(line) == len(CLOCKS)), strict=True)):
        found = [match for match in (re.fullmatch(r"([\d.]+) ?(\w*)", cell) for cell in cells) if match]
        if not found:
            rows.append([name, UNMEASURED, "", "", ""])
            continue
        values = [float(match[1]) for match in found]
        unit = found[0][2] or "degrees Celsius"
        of_all = (min(values), statistics.median(values), max(values))
        rows.append([f"{name}, {unit}", *(f"{value:.4g}" for value in of_all), str(len(values))])
    if not rows:
        return [f"Clocks and power meanwhile: {UNMEASURED}."]
    return table(["meanwhile", "least", "median", "most", "samples"], rows)


def device_bits(row: dict) -> str:
    line = (
        f"{row['kernels']} of {row['of']} kernels trained on the CPU and on the GPU: {row['pieces']} pieces of weights in "
        f"five formats and the statistics of {row['statistics']} tasks compared; **{row['differences']} kernels differ**."
    )
    return line + (f" First difference: {row['first']}" if row["first"] else "")


def device_copies(row: dict) -> str:
    if "skipped" in row:
        return f"Copies of pinned memory: {UNMEASURED}: {row['skipped']}."
    rates = [spread(row[f"{way}_gb_per_second"]) for way in ("in", "out", "both")]
    return (
        f"Copies of {row['bytes'] / (1 << 30):.3g} GiB of pinned memory, GB/s: {rates[0]} to the GPU, {rates[1]} from it, "
        f"{rates[2]} both at once, in all."
    )


def device_queue(row: dict) -> list[str]:
    what = [row["what"], str(row["tensors"]), str(row["elements"])]
    if "skipped" in row:
        return [*what, UNMEASURED + ": " + row["skipped"], "", "", "", ""]
    share = spread(row["share_of_copies"]) if "share_of_copies" in row else UNMEASURED
    rates = [spread(row["microseconds_per_tensor"]), spread(row["gparams_per_second"])]
    return [*what, row["served"], *rates, share, str(row["rounds"])]


def device_stalls(row: dict) -> str:
    if "skipped" in row:
        return f"Steps while another run is made and deleted: {UNMEASURED}: {row['skipped']}."
    (alone, most_alone), (beside, most_beside), (taking, _) = (row[f"{w}_ms"] for w in ("alone", "beside", "taking"))
    return (
        f"A step of few tensors takes {alone:.3g} ms, at most {most_alone:.3g}; while memory of 1 GiB is taken and given back "
        f"beside it, {taking:.3g} ms each time, {beside:.3g} ms, at most {most_beside:.3g}, of {row['steps']} steps."
    )


def device(folder: Path) -> list[str]:
    rows = json_lines(folder / "device.jsonl")
    if not rows:
        return [f"The device layer: {UNMEASURED}."]
    lines = [device_bits(row) for row in rows if row.get("part") == "bits"] or [f"Bits: {UNMEASURED}."]
    lines += ["", *(device_copies(row) for row in rows if row.get("part") == "copies")]
    head = [
        "updates",
        "tensors",
        "elements each",
        "weights served",
        "us a tensor",
        "Gparam/s",
        "share of what copies allow",
    ]
    cells = [device_queue(row) for row in rows if row.get("part") == "queue"]
    lines += ["", *table([*head, "rounds"], cells)] if cells else []
    lines += ["", *(device_stalls(row) for row in rows if row.get("part") == "stalls")]
    cut = [row["skipped"] for row in rows if "part" not in row]
    return lines + [f"Stopped: {why}" for why in cut]


def peers(folder: Path) -> list[str]:
    rows = json_lines(folder / "peers.jsonl")
    if not rows:
        return [f"Peers: {UNMEASURED}."]
    cells = []
    for row in [row for row in rows if "matrix" not in row]:
        size = f"2^{row['elements'].bit_length() - 1}" if "elements" in row else ""
        cells.append([row.get("peer", ""), row.get("version", ""), size, *figures(row)])
    return table(["peer", "version", "elements", *HEAD], cells)


def matrices(folder: Path) -> list[str]:
    rows = [row for name in ("bench", "peers") for row in json_lines(folder / f"{name}.jsonl") if "matrix" in row]
    if not rows:
        return [f"Updates over matrices: {UNMEASURED}."]
    rows.sort(key=lambda row: row["matrix"])
    cells = []
    for row in rows:
        ms = spread(row["ms"]) if "ms" in row else f"{UNMEASURED}: {row.get('skipped')}"
        cells.append([row["matrix"], row["what"], ms, str(row.get("rounds", ""))])
    return table(["matrix", "what", "ms", "rounds"], cells)


def training(folder: Path) -> list[str]:
    path = folder / "training.txt"
    return ["```", path.read_text().strip(), "```"] if path.exists() else [f"Training against a daemon: {UNMEASURED}."]


def trainer(folder: Path) -> list[str]:
    rows = json_lines(folder / "trainer.jsonl")
    if not rows:
        return [f"A trainer on the GPU: {UNMEASURED}."]
    return [*checks(rows), "", *steps([row for row in rows if "side" in row])]


def checks(rows: list[dict]) -> list[str]:
    def said(row: dict) -> str:
        if "skipped" in row:
            return f"{UNMEASURED}: {row['skipped']}"
        return "yes" if row["holds"] else f"NO {row.get('error', '')}"

    rows = [row for row in rows if "check" in row]
    return table(["check", "holds"], [[row["check"], said(row)] for row in rows])


def steps(rows: list[dict]) -> list[str]:
    head = ["tokens a step", "optimizer", "ms a step", "of torch's, fp32", "ms until backward() returned"]
    head += ["GPU memory at most, GB", "pushed in backward()", "pulled in backward()"]
    torchs = {row["tokens"]: row["step_s"] for row in rows if row["side"].startswith("torch fp32") and "step_s" in row}
    cells = []
    for row in rows:
        if "step_s" not in row:
            cells.append([str(row["tokens"]), row["side"], f"{UNMEASURED}: {row.get('skipped')}", *[""] * 5])
            continue
        ratio = f"{row['step_s'] / torchs[row['tokens']]:.2f}" if row["tokens"] in torchs else "-"
        cell = [str(row["tokens"]), row["side"], f"{1e3 * row['step_s']:.1f}", ratio, f"{1e3 * row['backward_s']:.1f}"]
        cell.append(f"{row['gpu_bytes'] / 1e9:.2f}" if "gpu_bytes" in row else "-")
        for name in ("pushed_in_backward", "pulled_in_backward"):
            cell.append(f"{100 * row[name]:.0f} %" if name in row else "-")
        cells.append(cell)
    return table(head, cells)


def follower(folder: Path) -> list[str]:
    rows = json_lines(folder / "follower.jsonl")
    if not rows:
        return [f"A module on the GPU that follows a run: {UNMEASURED}."]
    head = ["what lands", "MB", "ms after the trainer has it", "ms of a copy of as much", "rounds"]
    cells = []
    for row in [row for row in rows if "landing" in row]:
        figures = [f"{row['bytes'] / 1e6:.4g}", spread(row["ms"]), spread(row["copy_ms"]), str(row["rounds"])]
        cells.append([row["landing"], *figures])
    return [*checks(rows), "", *table(head, cells)]


def layers(folder: Path) -> list[str]:
    rows = json_lines(folder / "layers.jsonl")
    if not rows:
        return [f"Layers in 8 bits: {UNMEASURED}."]
    head = ["layer", "tokens", "width", "ms forward and backward", "as fast as nn.Linear in bf16", "rounds"]
    cells = []
    for row in [row for row in rows if "layer" in row]:
        if "ms" in row:
            figures = [f"{row['ms']:.3g}", f"{spread(row['speed'])} times", str(row["rounds"])]
        else:
            figures = [f"{UNMEASURED}: {row.get('skipped')}", "", ""]
        cells.append([row["layer"], str(row.get("tokens", "-")), str(row["width"]), *figures])
    return [*checks(rows), "", *table(head, cells)]


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    lines = ["# On a GPU, measured", "", "`tests/gpu_check.sh`. Medians, quartiles in brackets.", "", *machine(folder)]
    lines += ["", *parts(folder), "", "## The bits", "", *identity(folder)]
    lines += [
        "",
        "## Updates, against a device-to-device copy of the same bytes",
        "",
        *bench(folder),
        "",
        *clocks(folder),
    ]
    lines += ["", "## The daemon's device layer", "", *device(folder)]
    lines += ["", "## Optimizers of others", "", *peers(folder)]
    lines += ["", "## Updates over matrices", "", *matrices(folder)]
    lines += ["", "## Training", "", *training(folder)]
    lines += ["", "## A trainer whose model is on the GPU", "", *trainer(folder)]
    lines += ["", "## A module on the GPU that follows a run", "", *follower(folder)]
    lines += ["", "## Layers in 8 bits on the GPU", "", *layers(folder)]
    Path(sys.argv[2]).write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
