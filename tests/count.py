"""Adds the JUnit reports of one run up: names what failed and what was skipped, and prints the closing line.

    count.py FOLDER [FAILED_STAGE...]

A stage that failed without any failed test in a report (a build, a crash of the runner) counts as one failure. Of a stage
that was repeated, "ctest 2" say, the report is ctest-dev-2.xml. Under a GoogleTest program that failed stand its failed
checks and a sanitizer's report, under a test of pytest the end of its error. Exits non-zero if anything failed or no test
ran at all.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

# The stage that writes each report.
REPORTS = {
    "ctest": "ctest-dev.xml",
    "ctest asan": "ctest-asan.xml",
    "gpu build": "gpu-build.xml",
    "tidy": "pytest-tidy.xml",
    "pytest": "pytest-python.xml",
    "end to end": "pytest-e2e.xml",
}

# What says in a GoogleTest program's output why it failed, and how many lines after it belong to it.
TELLING = {": Failure": 6, "Sanitizer: ": 12, "runtime error: ": 6, "[  FAILED  ] ": 0}
MOST_LINES = 60
MOST_OF_AN_ERROR = 20
WIDEST = 300


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    """(passed | failed | skipped, why) of one <testcase>; ctest says it in an attribute, pytest in a child."""
    for child in case:
        if child.tag in ("failure", "error"):
            return "failed", child.get("message") or ""
        if child.tag == "skipped":
            return "skipped", child.get("message") or ""
    status = case.get("status", "run")
    if status in ("notrun", "disabled"):
        return "skipped", "not run"
    return ("failed", "") if status == "fail" else ("passed", "")


def telling(output: str) -> list[str]:
    """The lines of a failed program's output that say why; its last ones where none does."""
    lines, kept = output.splitlines(), set()
    for at, line in enumerate(lines):
        for mark, more in TELLING.items():
            if mark in line:
                kept.update(range(at, min(at + more + 1, len(lines))))
    return [lines[at] for at in sorted(kept)[:MOST_LINES]] or lines[-10:]


def error(case: ElementTree.Element) -> list[str]:
    """The end of what a failed test of pytest raised; its first line stands beside the test's name."""
    failure = next((child.text for child in case if child.tag in ("failure", "error")), None) or ""
    raised = [line[1:].strip()[:WIDEST] for line in failure.splitlines() if re.match("E( |$)", line)]
    return raised[1:][-MOST_OF_AN_ERROR:]


def read_report(path: Path) -> list[tuple[str, str, str, list[str]]]:
    """(outcome, name, why, what it printed of that) of every test in one report."""
    cases = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        result, why = outcome(case)
        owner = case.get("classname", "")
        name = case.get("name", "") if owner in ("", case.get("name")) else f"{owner}.{case.get('name')}"
        printed = telling(case.findtext("system-out") or "") if case.get("status") == "fail" else error(case)
        cases.append((result, name, why.splitlines()[0] if why else "", printed))
    return cases


def reports(folder: Path) -> list[tuple[str, Path]]:
    """(stage, its report), the repetitions of a stage in order."""
    found = []
    for stage, file in REPORTS.items():
        times = {}
        for path in folder.glob(f"{Path(file).stem}*.xml"):
            if match := re.fullmatch(rf"{Path(file).stem}(?:-(\d+))?", path.stem):
                times[int(match[1] or 0)] = path
        found += [(f"{stage} {time}" if time else stage, path) for time, path in sorted(times.items())]
    return found


def total(folder: Path, failed_stages: list[str]) -> tuple[dict[str, int], list[str]]:
    counts, lines = {"passed": 0, "failed": 0, "skipped": 0}, []
    for stage, path in reports(folder):
        try:
            cases = read_report(path)
        except ElementTree.ParseError as error:
            counts["failed"] += 1
            lines.append(f"FAILED   {stage}: {path.name} cannot be read: {error}")
            continue
        for result, name, why, printed in cases:
            counts[result] += 1
            if result != "passed":
                lines.append(
                    "\n    ".join([f"{result.upper():8} {stage}: {name}" + (f" ({why})" if why else ""), *printed])
                )
        if stage in failed_stages and any(result == "failed" for result, *_ in cases):
            failed_stages = [other for other in failed_stages if other != stage]
    for stage in failed_stages:
        counts["failed"] += 1
        lines.append(f"FAILED   the stage '{stage}' itself")
    return counts, lines


def main() -> int:
    counts, lines = total(Path(sys.argv[1]), sys.argv[2:])
    for line in sorted(lines, key=lambda line: not line.startswith("SKIPPED")):
        print(line)
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
