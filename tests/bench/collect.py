#!/usr/bin/env python3
"""Runs the benchmarks listed in benchmarks.json and writes one row a figure. tests/bench/run.sh calls it.

    collect.py --build FOLDER [--only NAME]... [--quick] [--json FILE] [--record]

An entry is a Google Benchmark program of the build (`program`; `bound` is a part of the name of that one of its
benchmarks, measured in the same run, that the others are held against) or a `script` beside this file, which takes
--quick and --json FILE and writes rows of its own; one with `records` takes --record too and keeps a file of its own in
results/. A row: name, value, unit, bound, ratio (value / bound), n, perhaps noise, machine, device, date, commit. --record also writes
results/results.json and results/results.md, which the README quotes; of benchmarks that were not run, or failed, the rows
that are there stay; one that misses a bound of its own (exit status 1, with rows) is recorded, too, and named. Last it says which figures are worse than in results.json by more than the noise (comparison.py).
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import comparison

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results"


def machine() -> str:
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores"


def study_command(program: str, out: Path) -> str:
    """The command line that a study's report names: without where its results went and what was only done with them."""
    told = [word for word in sys.argv[1:] if word not in ("--report-only", "--record", str(out))]
    return shlex.join([f"tests/studies/{program}", "OUT", *told])


def commit() -> str:
    def git(*arguments):
        return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)

    head = git("rev-parse", "--short=12", "HEAD")
    if head.returncode != 0:
        return "uncommitted"
    return head.stdout.strip() + ("-dirty" if git("status", "--porcelain").stdout.strip() else "")


def throughput(entry: dict) -> tuple[float, str]:
    if "bytes_per_second" in entry:
        return entry["bytes_per_second"] / 1e9, "GB/s"
    if "items_per_second" in entry:
        return entry["items_per_second"] / 1e9, "G/s"
    return entry["real_time"], entry["time_unit"]


def google_rows(report: dict, bound_name: str, repetitions: int) -> list[dict]:
    """The median of each benchmark, as a share of the one whose name contains `bound_name`."""
    medians = [entry for entry in report["benchmarks"] if entry.get("aggregate_name", "median") == "median"]
    values = {entry.get("run_name", entry["name"]): throughput(entry) for entry in medians}
    spread = {x["run_name"]: x["real_time"] for x in report["benchmarks"] if x.get("aggregate_name") == "cv"}
    bounds = [value for name, value in values.items() if bound_name and bound_name.lower() in name.lower()]
    rows = []
    for name, (value, unit) in values.items():
        # Held against the bound in the same unit; without one, the row says so.
        bound = next((bound for bound, bound_unit in bounds if bound_unit == unit), None)
        ratio = value / bound if bound else None
        rows.append({"name": name, "value": value, "unit": unit, "bound": bound, "ratio": ratio, "n": repetitions})
        rows[-1] |= {"noise": spread[name]} if name in spread else {}
    return rows


def run_program(entry: dict, build: Path, quick: bool) -> list[dict]:
    repetitions = 3 if quick else 9
    command = [build / entry["program"], f"--benchmark_repetitions={repetitions}"]
    command += ["--benchmark_report_aggregates_only=true", "--benchmark_format=json"]
    if quick:
        command.append("--benchmark_min_time=0.05")
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return google_rows(json.loads(printed), entry.get("bound", ""), repetitions)


def run_script(entry: dict, build: Path, quick: bool, record: bool) -> tuple[list[dict], bool]:
    """Its rows, and whether it says, by its exit status, that one of them misses its bound; without rows it failed."""
    with tempfile.TemporaryDirectory(prefix="ballast-bench-") as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, HERE / entry["script"], "--json", file] + (["--quick"] if quick else [])
        command += ["--record"] if record and entry.get("records") else []
        environment = os.environ | {"BALLAST_BUILD": str(build), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment)
        if not file.exists() or done.returncode not in (0, 1):
            done.check_returncode()
        return json.loads(file.read_text()), done.returncode != 0


def run_entry(entry: dict, options: argparse.Namespace) -> tuple[list[dict], str]:
    """Its rows, and what is to be said of it at the end: "FAILED", "MISSED" a bound of its own, or nothing."""
    print(f"== {entry['name']}", flush=True)
    build = options.build.resolve()
    try:
        if "program" in entry:
            return run_program(entry, build, options.quick), ""
        rows, missed = run_script(entry, build, options.quick, options.record)
        return rows, "MISSED a bound" if missed else ""
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"   failed: {error}", flush=True)
        return [], "FAILED"


def markdown(rows: list[dict]) -> str:
    machines = " and ".join(sorted({row["machine"] for row in rows}))
    lines = [
        "# Measured",
        "",
        f"By `tests/bench/run.sh --record` on {machines}. `bound` was measured in the same run.",
        "",
        "| benchmark | figure | value | unit | bound | ratio | n | date | commit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        bound = "-" if row["bound"] is None else f"{row['bound']:.4g}"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3g}"
        cells = [row["benchmark"], row["name"], f"{row['value']:.4g}", row["unit"], bound, ratio, str(row["n"])]
        cells += [row["date"], row["commit"]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def recorded() -> list[dict]:
    return json.loads((RESULTS / "results.json").read_text())


def record(rows: list[dict], names: list[str]):
    """Beside the rows that are there of the other benchmarks that still exist, in the list's order."""
    fresh = {row["benchmark"] for row in rows}
    rows = [row for row in recorded() if row["benchmark"] not in fresh and row["benchmark"] in names] + rows
    rows.sort(key=lambda row: names.index(row["benchmark"]))
    (RESULTS / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "results.md").write_text(markdown(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", action="store_true")
    entries = json.loads((HERE / "benchmarks.json").read_text())
    names = [entry["name"] for entry in entries]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=", ".join(names))
    options = parser.parse_args()

    about = {"machine": machine(), "device": "cpu", "date": datetime.date.today().isoformat(), "commit": commit()}
    rows, said = [], {}
    for entry in entries:
        if not options.only or entry["name"] in options.only:
            found, said[entry["name"]] = run_entry(entry, options)
            rows += [{"benchmark": entry["name"], **row, **about, "quick": options.quick} for row in found]
    if rows:
        print(markdown(rows))
        print(comparison.report(rows, recorded()))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.record:
        record(rows, names)
    for name in filter(said.get, said):
        print(f"{said[name]}: {name}")
    return 1 if any(said.values()) or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
