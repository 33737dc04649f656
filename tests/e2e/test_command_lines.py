"""What the shell scripts make of a command line, by deploy/options.sh; nothing of what they do is done."""

import subprocess

import pytest
from daemon import ROOT

SCRIPTS = [
    "deploy/packages.sh",
    "deploy/quickstart.sh",
    "deploy/setup.sh",
    "deploy/wheel.sh",
    "tests/bench/run.sh",
    "tests/emulated/kernels.sh",
    "tests/emulated/run.sh",
    "tests/gpu_check.sh",
    "tests/run.sh",
    "tests/soak.sh",
]


def run(script: str, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run([ROOT / script, *words], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_the_comment_at_the_head(script):
    lines = (ROOT / script).read_text().splitlines()
    head = lines[1 : lines.index("set -euo pipefail")]
    result = run(script, "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [line.removeprefix("#").removeprefix(" ") for line in head]
    assert any(script in line for line in head)


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_unknown_flag_is_named(script):
    result = run(script, "--no-such-flag")
    # The emulator's other exit codes are those of the program that it runs.
    assert result.returncode == (125 if script == "tests/emulated/run.sh" else 2)
    assert "unknown flag '--no-such-flag'" in result.stderr and result.stderr.startswith(script.split("/")[-1])


@pytest.mark.parametrize(
    ("script", "words", "says"),
    [
        ("deploy/packages.sh", ["--check", "no-such-group"], "unknown group 'no-such-group'"),
        ("deploy/quickstart.sh", ["--steps", "0"], "--steps wants a whole number of at least 1, not '0'"),
        ("deploy/quickstart.sh", ["--results"], "--results wants a folder, not ''"),
        ("deploy/quickstart.sh", ["--results", "--keep"], "--results wants a folder, not '--keep'"),
        ("deploy/setup.sh", ["no-such-part"], "unknown part 'no-such-part'"),
        ("deploy/setup.sh", ["python", "walk"], "python takes the word run or none, not 'walk'"),
        ("deploy/wheel.sh", ["--preset", "tsan"], "--preset wants release, quick or dev, not 'tsan'"),
        ("deploy/setup.sh", ["build"], "build wants the name of a preset"),
        ("tests/gpu_check.sh", ["--build-only", "--arch", "9.0"], "--arch wants a compute capability without its dot"),
        ("tests/gpu_check.sh", ["--build-only", "--built"], "--build-only and --built exclude each other"),
        ("tests/soak.sh", ["--seed", "7", "--minutes", "-1"], "--minutes wants a whole number, not '-1'"),
    ],
)
def test_what_is_wrong_is_named(script, words, says):
    result = run(script, *words)
    assert result.returncode == 2 and says in result.stderr, result.stderr
