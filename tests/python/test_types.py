"""mypy --strict has nothing to say of the package, nor of a script that uses it as it is meant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from daemon import ROOT

SCRIPT = Path(__file__).with_name("typed_script.py")
# What the script above is, with one thing wrong in each line.
WRONG = {
    "ballast.AdamW(model.named_parameters(), run=3)": '"run"',
    "ballast.SGD(model.parameters(), 0.1, commit=True)": '"commit"',
    "ballast.Lion(model.parameters(), learning_rate=0.1)": '"learning_rate"',
    "optimizer.in_step(3)": '"in_step"',
    'optimizer.step(loss="large")': '"step"',
    "optimizer.last_result.outcome": '"outcome"',
}


def mypy(*arguments: str | Path, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--cache-dir", ROOT / "build" / "mypy", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


def test_the_package() -> None:
    found = mypy(folder=ROOT / "client" / "python")  # its pyproject.toml says what
    assert found.returncode == 0, found.stdout + found.stderr


def test_of_two_scripts_what_is_wrong_in_one_is_found_and_nothing_else(tmp_path: Path) -> None:
    lines = ["from torch import nn", "import ballast", "def use(model: nn.Module, optimizer: ballast.AdamW) -> None:"]
    (tmp_path / "wrong.py").write_text("\n".join([*lines, *(f"    {line}" for line in WRONG)]) + "\n")
    checked = mypy("--strict", "--config-file=", SCRIPT, tmp_path / "wrong.py")
    found = checked.stdout.splitlines()
    assert [error for error in found if "wrong.py:" not in error][:-1] == [], checked.stdout + checked.stderr
    for number, (line, names) in enumerate(WRONG.items(), len(lines) + 1):
        of_line = [error for error in found if f"wrong.py:{number}: error" in error]
        assert any(names in error for error in of_line), (line, found)
