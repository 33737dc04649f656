"""What the benchmarks that train share: a daemon of their own, and the quick start's model and data."""

import argparse
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "e2e"), str(ROOT / "client" / "python" / "examples")]

import daemon  # noqa: E402
import king_james  # noqa: E402, F401


def parse_options(doc: str, quick: str) -> argparse.Namespace:
    """The command line that collect.py has for each; `quick` says what is short then."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="where the rows go")
    return parser.parse_args()


@contextmanager
def own_daemon(*flags: str):
    """A daemon on free ports with one thread: on two cores torch has the other."""
    with tempfile.TemporaryDirectory(prefix="ballast-bench-") as folder:
        with daemon.Daemon(Path(folder), *flags) as running:
            yield running


def quartiles(values: list[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    return tuple(ordered[round(share * (len(ordered) - 1))] for share in (0.25, 0.5, 0.75))
