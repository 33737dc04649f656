"""What the benchmarks that train share: a daemon of their own, and the quick start's model and data."""

import argparse
import json
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "e2e"), str(ROOT / "client" / "python" / "examples")]

import daemon  # noqa: E402
import king_james  # noqa: E402, F401


def make_parser(doc: str, quick: str) -> argparse.ArgumentParser:
    """The command line that collect.py has for each; `quick` says what is short then."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="where the rows go")
    return parser


def parse_options(doc: str, quick: str) -> argparse.Namespace:
    return make_parser(doc, quick).parse_args()


def recording_parser(doc: str, quick: str, rounds: int) -> argparse.ArgumentParser:
    """The same, of one that keeps a file of its own in results/."""
    parser = make_parser(doc, quick)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser


@contextmanager
def own_daemon(*flags: str):
    """A daemon on free ports with one thread: on two cores torch has the other."""
    with tempfile.TemporaryDirectory(prefix="ballast-bench-") as folder:
        with daemon.Daemon(Path(folder), *flags) as running:
            yield running


def publish(options: argparse.Namespace, page: str, text: str, rows: list[dict]) -> None:
    """Prints the text; writes it to the results' page where that is recorded, and the rows to where collect.py reads them."""
    print(text)
    if options.record:
        (Path(__file__).parent / "results" / f"{page}.md").write_text(text)
    if options.json:
        options.json.write_text(json.dumps(rows))


def quartiles(values: list[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    return tuple(ordered[round(share * (len(ordered) - 1))] for share in (0.25, 0.5, 0.75))
