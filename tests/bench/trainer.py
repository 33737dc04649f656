"""What the benchmarks that train share: a daemon of their own, and the quick start's model and data."""

import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "e2e"), str(ROOT / "client" / "python" / "examples")]

import daemon  # noqa: E402
import king_james  # noqa: E402, F401


@contextmanager
def own_daemon(*flags: str):
    """A daemon on free ports with one thread: on two cores torch has the other."""
    with tempfile.TemporaryDirectory(prefix="ballast-bench-") as folder:
        with daemon.Daemon(Path(folder), *flags) as running:
            yield running


def quartiles(values: list[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    return tuple(ordered[round(share * (len(ordered) - 1))] for share in (0.25, 0.5, 0.75))
