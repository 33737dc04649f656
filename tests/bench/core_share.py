"""A process that the kernel holds to a share of a core (cgroups, of either version)."""

from contextlib import contextmanager
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
PERIOD_US = 10_000  # short against what is timed; the kernel takes no less than a tenth of it


class CannotHold(Exception):
    """Nobody can be held to a share here: why."""


def hierarchy() -> tuple[Path, int]:
    """Where groups with a share of the cores are made, and the version."""
    for line in MOUNTS.read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(where), 1
        if kind == "cgroup2" and "cpu" in (Path(where) / "cgroup.controllers").read_text().split():
            return Path(where), 2
    raise CannotHold("no cgroup hierarchy with the controller cpu is mounted")


def group_of(pid: int) -> Path:
    return hierarchy()[0] / f"ballast-bench-{pid}"


def limit(group: Path, version: int, cores: float) -> None:
    quota = round(cores * PERIOD_US)
    if version == 2:
        (group.parent / "cgroup.subtree_control").write_text("+cpu")
        (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota))


@contextmanager
def held(pid: int, cores: float):
    """All threads of the process, and what it starts, use at most so many cores together. Raises CannotHold. At the end the
    process is in the root of the hierarchy, without a limit."""
    root, version = hierarchy()
    group = group_of(pid)
    try:
        group.mkdir()
        try:
            limit(group, version, cores)
            (group / "cgroup.procs").write_text(str(pid))
        except OSError:
            group.rmdir()
            raise
    except OSError as error:
        raise CannotHold(f"{error}; root may, where the hierarchy is not mounted read-only") from error
    try:
        yield
    finally:
        for member in (group / "cgroup.procs").read_text().split():
            (root / "cgroup.procs").write_text(member)
        group.rmdir()
