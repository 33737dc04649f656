"""What `cmake --install` lays down, used from outside of the tree: headers, the CMake package, the pkg-config file."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from daemon import BUILD, ROOT, Daemon, plain_environment

PROJECT = """
cmake_minimum_required(VERSION 3.22)
project(outside LANGUAGES CXX)
find_package(ballast 0.1 CONFIG REQUIRED)
add_executable(trainer trainer.cc)
target_link_libraries(trainer PRIVATE ballast::client)
"""
COMPILER = ["g++", "-std=c++20"]


def run(*command, cwd: Path, **environment: str) -> str:
    command = [str(part) for part in command]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=cwd, env={**plain_environment(), **environment}
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The prefix, moved to where it was not installed."""
    folder = tmp_path_factory.mktemp("install")
    run("cmake", "--install", BUILD, "--prefix", folder / "first", cwd=folder)
    return (folder / "first").rename(folder / "prefix")


@pytest.fixture
def outside(tmp_path) -> Path:
    """A folder with a trainer: the example, copied."""
    shutil.copy(ROOT / "client" / "cpp" / "examples" / "example.cc", tmp_path / "trainer.cc")
    return tmp_path


def flags(installed: Path, cwd: Path, *wanted: str) -> list[str]:
    """What pkg-config says of the package."""
    path = os.pathsep.join([str(installed / "lib" / "pkgconfig"), os.environ.get("PKG_CONFIG_PATH", "")])
    return shlex.split(run("pkg-config", *wanted, "ballast", cwd=cwd, PKG_CONFIG_PATH=path.rstrip(os.pathsep)))


def learns(trainer: Path, tmp_path: Path) -> None:
    """It trains with a daemon, and its loss falls."""
    with Daemon(tmp_path) as daemon:
        losses = [float(loss) for loss in re.findall(r"loss (\S+)", run(trainer, daemon.server, cwd=tmp_path))]
    assert len(losses) == 11 and losses[-1] < losses[0] / 100, losses


def test_the_programs_are_there(installed, tmp_path):
    for name in ("ballastd", "ballastctl"):
        assert run(installed / "bin" / name, "--version", cwd=tmp_path).startswith(f"{name} ")


def test_nothing_names_the_tree_or_the_build(installed):
    for file in (installed / "lib").rglob("*"):
        if file.suffix in (".cmake", ".pc"):
            assert str(ROOT) not in file.read_text() and str(BUILD) not in file.read_text(), file


def test_each_header_compiles_by_itself(installed, tmp_path):
    headers = sorted((installed / "include").rglob("*.h"))
    assert {header.name for header in headers} == {
        "client.h",
        "shard.h",
        "rewound.h",
        "subscriber.h",
        "admin.pb.h",
        "follow.pb.h",
        "nccl.pb.h",
        "run.pb.h",
        "trainer.pb.h",
    }
    cflags = flags(installed, tmp_path, "--cflags")
    for header in headers:
        (tmp_path / "alone.cc").write_text(f'#include "{header}"\n')
        run(*COMPILER, "-fsyntax-only", *cflags, "alone.cc", cwd=tmp_path)


def test_a_trainer_is_built_by_cmake_and_trains(installed, outside):
    (outside / "CMakeLists.txt").write_text(PROJECT)
    run("cmake", "-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={installed}", cwd=outside)
    cache = (outside / "build" / "CMakeCache.txt").read_text()
    assert f"ballast_DIR:PATH={installed}/lib/cmake/ballast" in cache
    run("cmake", "--build", "build", cwd=outside)
    learns(outside / "build" / "trainer", outside)


def test_a_trainer_is_built_by_pkg_config_and_trains(installed, outside):
    cflags, libs = flags(installed, outside, "--cflags"), flags(installed, outside, "--libs")
    run(*COMPILER, *cflags, "trainer.cc", "-o", "trainer", *libs, cwd=outside)
    learns(outside / "trainer", outside)
