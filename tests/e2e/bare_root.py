"""A root folder with Python, torch and the C libraries that these two need, and nothing else of the machine: what an
empty container has. Programs run in it by chroot, in namespaces of their own (util-linux, no privileges)."""

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from only_torch import link_torch

PYTHON = Path(sys.executable).resolve()
# Of the programs that run in it: mounts, processes, and a user who may mount.
NAMESPACES = ("/usr/bin/unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child")
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


def libraries_of(files: list[Path]) -> set[Path]:
    """What the loader finds for them outside of their own packages."""
    listed = subprocess.run(["ldd", *files], capture_output=True, text=True, check=True).stdout
    found = {Path(where) for where in re.findall(r"(?:=> |\t)(/\S+) \(0x", listed)}
    return {path for path in found if "site-packages" not in path.parts}


class BareRoot:
    """The folder. `packages` is where it has torch; `site` is empty, for what is to be tried in it."""

    def __init__(self, folder: Path):
        self.root = folder / "root"
        self.packages = folder / "packages"
        self.site = self.root / "site"
        for name in ("dev", "proc", "tmp", "work", "site", "packages"):
            (self.root / name).mkdir(parents=True)
        link_torch(self.packages)
        shutil.copytree(STANDARD_LIBRARY, self._inside(STANDARD_LIBRARY), symlinks=True, ignore=self._of_others)
        binaries = [path for link in self.packages.iterdir() for path in link.resolve().rglob("*.so*")]
        dynamic = [*STANDARD_LIBRARY.glob("lib-dynload/*.so"), *(path for path in binaries if path.is_file())]
        for file in {PYTHON, *libraries_of([PYTHON, *dynamic])}:
            self._copy(file)

    def _inside(self, path: Path) -> Path:
        return self.root / path.relative_to("/")

    def _copy(self, file: Path) -> None:
        self._inside(file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, self._inside(file))

    @staticmethod
    def _of_others(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if name in ("site-packages", "dist-packages", "test", "__pycache__")}

    def python(self, *arguments: str) -> subprocess.CompletedProcess:
        """Runs Python there, with no variable but those by which it finds the packages."""
        steps = [f"mount --rbind /dev {self._quoted('dev')}", f"mount -t proc proc {self._quoted('proc')}"]
        for link in self.packages.iterdir():
            self._make_room(self.root / "packages" / link.name, link.resolve())
            steps.append(f"mount --bind {shlex.quote(str(link.resolve()))} {self._quoted('packages', link.name)}")
        command = shlex.join(
            [shutil.which("chroot", path="/usr/sbin:/usr/bin"), str(self.root), str(PYTHON), *arguments]
        )
        script = " && ".join([*steps, f"exec {command}"])
        return subprocess.run(
            [*NAMESPACES, "/bin/sh", "-c", script],
            capture_output=True,
            text=True,
            timeout=600,
            env={"HOME": "/work", "PYTHONPATH": "/site:/packages"},
        )

    def _quoted(self, *parts: str) -> str:
        return shlex.quote(str(self.root.joinpath(*parts)))

    @staticmethod
    def _make_room(place: Path, target: Path) -> None:
        if target.is_dir():
            place.mkdir(exist_ok=True)
        else:
            place.touch()
