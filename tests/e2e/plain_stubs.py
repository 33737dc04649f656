"""Python stubs of proto/, as users of other languages have them made."""

import subprocess
import sys
from pathlib import Path

from daemon import ROOT


def make_stubs(folder: Path) -> Path:
    """The folder, to be put on a program's PYTHONPATH."""
    protos = sorted(str(path) for path in (ROOT / "proto").rglob("*.proto"))
    flags = [f"--proto_path={ROOT / 'proto'}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
    made = subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *flags, *protos], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    for package in (folder / "ballast", folder / "ballast" / "v1"):  # ahead of the client's package of that name
        (package / "__init__.py").touch()
    return folder
