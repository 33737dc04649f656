"""tests/run.sh itself, in a tree whose ctest is made up: what it repeats, counts and lists, and that its load ends with it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from daemon import ROOT

# Fails the second time, and notes how it was called and how many busy loops run beside it.
CTEST = """#!/usr/bin/env bash
set -euo pipefail
printf 'ctest %s\\n' "$*" >>called
while [[ $1 != --output-junit ]]; do shift; done
printf 'x' >>times
ps -o args= -s "$(ps -o sid= -p $$ | tr -d ' ')" | grep -c '^bash -c while' >>loops || true
status=run
if [[ $(<times) == xx ]]; then status=fail; fi
cat >"$2" <<REPORT
<testsuite><testcase name="Stream.Cut" status="$status"><system-out>$(cat printed 2>/dev/null || true)</system-out></testcase>
<testcase name="Stream.Whole" status="run"/></testsuite>
REPORT
[[ $status == run ]]
"""


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def tree(tmp_path):
    for name in ("tests/run.sh", "tests/count.py", "deploy/options.sh", "deploy/stages.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("deploy/packages.sh", "deploy/setup.sh"):
        write_program(tmp_path / name, f'#!/bin/sh\necho "{Path(name).name} $*" >>called\n')
    write_program(tmp_path / "bin" / "ctest", CTEST)
    # No test of Python's is there.
    write_program(
        tmp_path / ".venv" / "bin" / "python", f'#!/bin/sh\n[ "$2" = pytest ] || exec {sys.executable} "$@"\n'
    )
    return tmp_path


def run(tree: Path, *flags: str) -> tuple[int, str, list[str]]:
    """The command's exit code, what it printed, and the processes that it left."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # nproc heeds it
    with subprocess.Popen(
        [tree / "tests" / "run.sh", *flags],
        env={**environment, "PATH": f"{tree / 'bin'}:{environment['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as script:
        said, _ = script.communicate(timeout=60)
    listed = subprocess.run(["ps", "-o", "args=", "-s", str(script.pid)], capture_output=True, text=True).stdout
    return script.returncode, said, listed.splitlines()


def test_repetitions_are_summed_and_what_failed_is_named_with_its_own(tree):
    code, said, left = run(tree, "--only", "ctest", "--repeat", "3")
    lines = said.splitlines()
    assert code == 1 and left == []
    assert lines[-1] == "5 passed, 1 failed, 0 skipped", said
    assert lines[-2] == "FAILED   ctest 2: Stream.Cut", said
    assert (tree / "loops").read_text().split() == ["0"] * 3


PRINTED = """[ RUN      ] Lane.IsCut
lane_test.cc:12: Failure
Expected equality of these values:
  1
  2
[  FAILED  ] Lane.IsCut (3 ms)
[ RUN      ] Lane.Stays
[       OK ] Lane.Stays (1 ms)"""


@pytest.mark.parametrize(
    ("printed", "listed"),
    [(PRINTED, PRINTED.splitlines()[1:]), ("a start\nSegmentation fault", ["a start", "Segmentation fault"])],
)
def test_what_a_failed_program_printed_of_its_failure_stands_under_it(tree, printed, listed):
    (tree / "printed").write_text(printed)
    _, said, _ = run(tree, "--only", "ctest", "--repeat", "2")
    lines = said.splitlines()
    assert lines[lines.index("FAILED   ctest 2: Stream.Cut") + 1 : -1] == [f"    {line}" for line in listed], said


RAISES = """
def test_it():
    assert False, "a start\\n" + "\\n".join(f"{line} of its lines" for line in range(1, 31))
"""


def test_the_end_of_what_a_test_of_pytest_raised_stands_under_it(tree):
    (tree / "test_raises.py").write_text(RAISES)
    report = tree / "pytest-python.xml"
    subprocess.run([sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", tree / "test_raises.py"], cwd=tree)
    counted = subprocess.run([sys.executable, tree / "tests" / "count.py", tree], capture_output=True, text=True)
    said = counted.stdout.splitlines()
    listed = [f"    {line} of its lines" for line in range(12, 31)] + ["    assert False"]
    assert said[0].startswith("FAILED   pytest: test_raises.test_it (AssertionError: a start"), counted
    assert (said[1:-1], said[-1]) == (listed, "0 passed, 1 failed, 0 skipped"), counted


def test_once_is_as_without(tree):
    code, said, _ = run(tree, "--only", "ctest")
    assert code == 0 and said.splitlines()[-1] == "2 passed, 0 failed, 0 skipped", said
    assert (tree / "build" / "test-logs" / "ctest-dev.xml").exists()


SANITIZED = [["setup.sh build asan all_tests"], ["--preset asan"]]


@pytest.mark.parametrize(
    ("flags", "built", "tested"),
    [
        ([], ["setup.sh build dev programs optimized_tests", *SANITIZED[0]], ["--preset dev", *SANITIZED[1]]),
        (["--no-asan"], ["setup.sh build dev"], ["--preset dev"]),
        (["--load"], ["setup.sh build dev", *SANITIZED[0]], ["--preset dev", *SANITIZED[1]]),
        (["--only", "ctest"], ["setup.sh build dev"], ["--preset dev"]),
        (["--only", "asan"], SANITIZED[0], SANITIZED[1]),
        (["--only", "python"], ["setup.sh build dev programs"], []),
    ],
)
def test_what_is_tested_under_sanitizers_is_not_built_twice(tree, flags, built, tested):
    run(tree, *flags)
    called = (tree / "called").read_text().splitlines()
    assert [line for line in called if line.startswith("setup.sh build")] == built
    ctests = [line.removeprefix("ctest ") for line in called if line.startswith("ctest ")]
    assert [line.split(" --parallel")[0] for line in ctests] == tested
    assert [line for line in ctests if "--label-regex ^optimized" in line] == (ctests[:1] if not flags else [])


@pytest.mark.parametrize(
    ("code", "closing"), [(0, "1 passed, 0 failed, 0 skipped"), (1, "0 passed, 1 failed, 0 skipped")]
)
def test_the_gpu_build_is_one_test(tree, code, closing):
    write_program(tree / "bin" / "nvcc", "#!/bin/sh\n")
    write_program(tree / "tests" / "gpu_check.sh", f"#!/bin/sh\nexit {code}\n")
    ended, said, _ = run(tree, "--only", "gpu")
    assert (ended, said.splitlines()[-1]) == (code, closing), said


def test_the_load_is_beside_the_tests_and_ends_with_them(tree):
    code, said, left = run(tree, "--only", "ctest", "--load")
    assert code == 0, said
    assert (tree / "loops").read_text().split() == [str(len(os.sched_getaffinity(0)))]
    assert left == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--repeat"], "--repeat wants a whole number of at least 1, not ''"),
        (["--repeat", "0"], "not '0'"),
        (["--repeat", "often"], "not 'often'"),
        (["--only", "tidy", "--repeat", "2"], "not for 'tidy'"),
        (["--only", "everything"], "--only wants ctest, asan, python, e2e, tidy or gpu, not 'everything'"),
        (["--loud"], "unknown flag '--loud'"),
    ],
)
def test_wrong_flags_are_named(tree, flags, says):
    code, said, _ = run(tree, *flags)
    assert code == 2 and says in said, said
