"""The portable folder starts where there is nothing else: an empty root with glibc in it, and no /proc, /dev or /etc."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from daemon import BUILD, Daemon, plain_environment

LOADER = "/lib64/ld-linux-x86-64.so.2"
GLIBC = re.compile(r"(ld-linux-x86-64|lib(c|m|mvec|pthread|dl|rt|resolv))\.so\.\d")
PROGRAMS = ("ballastd", "ballastctl")


def run(*command):
    command = [str(part) for part in command]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=plain_environment())


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A root folder that holds the installed folder at /portable and nothing else."""
    root = tmp_path_factory.mktemp("root")
    result = run("cmake", "--install", BUILD, "--prefix", root / "portable", "--component", "portable")
    assert result.returncode == 0, result.stdout + result.stderr
    return root


def libraries_of_the_machine(root: Path) -> set[str]:
    """Paths of the libraries that the loader takes from outside the folder for one of the programs."""
    found = set()
    for program in (root / "portable" / "bin").iterdir():  # gpu_device_bench too, where it was built
        listed = run("ldd", program)
        assert listed.returncode == 0 and "not found" not in listed.stdout, listed.stdout + listed.stderr
        found |= set(re.findall(r"(/\S+) \(0x", listed.stdout))
    return {path for path in found if not Path(path).resolve().is_relative_to(root.resolve())}


@pytest.fixture(scope="module")
def enter(root) -> list[str]:
    """The command that runs another inside the root, which now has glibc too."""
    for path in libraries_of_the_machine(root) | {LOADER}:
        (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path[1:])
    refusals = []
    for rights in ([], ["--map-root-user"]):
        # The loader reads $ORIGIN from /proc/self/exe. Mounting /proc takes more rights than chroot does, so it is told;
        # that it finds $ORIGIN by itself is what ldd shows in test_only_glibc_is_taken_from_the_machine.
        command = ["env", "LD_ORIGIN_PATH=/portable/bin", "unshare", *rights, "--root", str(root)]
        # The loader alone: whether a root may be entered here, not whether the folder is good.
        attempt = run(*command, LOADER, "--version")
        if attempt.returncode == 0:
            return command
        refusals.append(attempt.stderr.strip())
    pytest.skip(f"!! NOT CHECKED that the portable folder starts alone; chroot is refused: {'; '.join(refusals)}")


@pytest.fixture
def programs_inside(enter, tmp_path, monkeypatch):
    """Daemon starts the folder's programs inside the root."""
    for program in PROGRAMS:
        script = tmp_path / program
        script.write_text(f'#!/bin/sh\nexec {" ".join(enter)} /portable/bin/{program} "$@"\n')
        script.chmod(0o755)
        monkeypatch.setattr(f"daemon.{program.upper()}", script)


def test_only_glibc_is_taken_from_the_machine(root):
    names = {Path(path).name for path in libraries_of_the_machine(root)}
    assert {name for name in names if not GLIBC.fullmatch(name)} == set()
    carried = {path.name for path in (root / "portable" / "lib").iterdir()}
    assert {name for name in carried if GLIBC.fullmatch(name)} == set()
    assert {"libstdc++.so.6", "libgcc_s.so.1"} <= carried


def test_the_programs_are_stripped(root):
    for program in PROGRAMS:
        sections = run("readelf", "--section-headers", "--wide", root / "portable" / "bin" / program)
        assert " .dynsym " in sections.stdout and " .symtab " not in sections.stdout, sections.stdout + sections.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_starts_alone(enter, program):
    result = run(*enter, f"/portable/bin/{program}", "--version")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{program} "), result.stdout


def test_a_missing_library_is_noticed(root, enter, tmp_path):
    """The root has no second copy that would hide an incomplete folder."""
    library = next((root / "portable" / "lib").glob("libyaml-cpp.so.*"))
    moved = library.rename(tmp_path / library.name)
    try:
        result = run(*enter, "/portable/bin/ballastd", "--version")
    finally:
        moved.rename(library)
    assert result.returncode == 127 and "libyaml-cpp" in result.stderr, result.stderr


def test_the_daemon_serves_alone(programs_inside, tmp_path):
    with Daemon(tmp_path) as daemon:
        assert daemon.get("/livez")[0] == 200
        runs = daemon.ctl("runs")
        assert runs.returncode == 0, runs.stdout + runs.stderr
        assert daemon.stop() == 0, daemon.log.read_text()
