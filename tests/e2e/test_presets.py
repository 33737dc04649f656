"""The presets: what deploy/quickstart.sh builds on a fresh machine is what the tests' build compiles, and no test is in none."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from daemon import BUILD, ROOT

# What differs on purpose: points at which tests let a daemon fail, and GPUs. None: there is nothing in its place.
ALTERNATIVES = {
    "failpoint.cc": "failpoint_none.cc",
    "cuda_driver.cc": "cuda_stub.cc",
    "cuda_shared_memory.cc": None,
}


def batches(folder: Path) -> dict[str, list[str]]:
    """Of the programs and libraries that are shipped: each file that g++ is given, and the sources that it includes.

    Files of one batch may not use the same names for their own."""
    return {
        str(batch.relative_to(folder)): [
            source for name in map(Path, named) if (source := ALTERNATIVES.get(name.name, name.name))
        ]
        for part in ("server", "client", "proto", "kernels")
        for batch in (folder / part).rglob("Unity/*.cxx")
        if (named := re.findall(r'#include "(.*)"', batch.read_text()))
    }


def configured(preset: str, folder: Path) -> Path:
    command = ["cmake", "--preset", preset, "-B", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return configured("quick", tmp_path_factory.mktemp("quick"))


def test_the_quick_start_compiles_the_batches_that_the_tests_do(quick):
    tested = batches(BUILD)
    assert sum(map(len, tested.values())) > 200
    shipped = {batch: sources for batch, sources in batches(quick).items() if "ballast_cuda" not in batch}
    assert {batch: tested.get(batch) for batch in shipped} == shipped


def test_the_quick_start_optimizes_as_the_tests_do(quick):
    def flags(folder):
        cache = (folder / "CMakeCache.txt").read_text()
        kind = re.search(r"^CMAKE_BUILD_TYPE:\w+=(\w+)$", cache, re.MULTILINE)[1]
        return re.search(rf"^CMAKE_CXX_FLAGS_{kind.upper()}:\w+=(.*)$", cache, re.MULTILINE)[1].split()

    assert set(flags(quick)) - {"-DNDEBUG"} == set(flags(BUILD)) - {"-g1"}


def test_no_source_asks_whether_assertions_are_on():
    """They are off in the quick start's build alone."""
    sources = [
        path for folder in ("server", "client/cpp", "kernels", "proto") for path in (ROOT / folder).rglob("*.[ch]*")
    ]
    assert len(sources) > 300
    assert [str(path) for path in sources if re.search(r"\bassert\(|\bNDEBUG", path.read_text())] == []


def names(folder: Path, *which: str) -> list[set[str]]:
    """Of each test that ctest has there: its name and its program's. What is not built has no program, but its name is made
    of that."""
    listed = json.loads(subprocess.check_output(["ctest", "--show-only=json-v1", *which], cwd=folder))["tests"]
    return [
        {re.sub(r"_NOT_BUILT$|\.\d$", "", test["name"]), *(Path(word).name for word in test.get("command", [])[:1])}
        for test in listed
    ]


def test_each_test_is_optimized_or_under_sanitizers(tmp_path):
    """As tests/run.sh runs them: the label's in preset dev, all others in preset asan."""
    sanitized = set().union(*names(configured("asan", tmp_path)))
    assert {"server_rpc_test", "client_test", "proto_test", "SessionFuzz.WhateverRanksSay"} <= sanitized
    assert [test for test in names(BUILD, "--label-exclude", "^optimized") if not test & sanitized] == []
    optimized = set().union(*names(BUILD, "--label-regex", "^optimized"))
    assert {"identity_test", "statistics_test", "server_long_test", "kernels_fuzz"} <= optimized
