"""A daemon that is ended again and again at random moments of a training, which goes on each time.

    .venv/bin/python tests/python/lives.py kills COUNT [--seed N]
    .venv/bin/python tests/python/lives.py drains COUNT [--seed N]

kills: kill -9, 20 to 2000 ms after it was started, as often as not while it reads back or writes a checkpoint. What is
durable never goes back, and what was promised is there.
drains: SIGTERM, and half of the times a second one up to 50 ms later. It ends by itself; after one SIGTERM the last step
that was applied is there, after two what was promised.

In the end the digests are those of a training that was never disturbed. The last line sums up.
"""

from __future__ import annotations

import argparse
import random
import signal
import tempfile
from pathlib import Path

import torch

import ballast
from crashing import Promises, Training, come_back, finish, go_on
from daemon import Daemon

# A million parameters; a checkpoint may be left out while another is being written.
ENDLESS = Training(last=10**9, width=577, every=10, awaited=False)
Signals = list[tuple[float, int]]


def live(storage: Path, signals: Signals) -> tuple[Promises, int | None]:
    """A daemon's life until the signals end it. What its trainer was told, and the exit code; None: it ended before it
    served."""
    promises = Promises()
    try:
        started = Daemon(storage=storage, signals=signals)
    except RuntimeError:
        return promises, None
    with started as daemon:
        try:
            go_on(daemon, ENDLESS, promises)
        except ballast.BallastError:
            pass
        return promises, daemon.wait()


def kills(storage: Path, count: int, draw: random.Random) -> str:
    durable = further = 0
    for _ in range(count):
        promises, code = live(storage, [(draw.uniform(0.02, 2), signal.SIGKILL)])
        assert code in (None, -signal.SIGKILL), f"the daemon ended with {code}"
        found = come_back(storage, max(durable, promises.durable))
        further += found > durable
        durable = found
    return f"{count} kills, step {durable}, further after {further} of them"


def drains(storage: Path, count: int, draw: random.Random) -> str:
    durable = early = 0
    for number in range(count):
        first_s = draw.uniform(0.3, 2)
        signals: Signals = [(first_s, signal.SIGTERM)]
        if number % 2 == 1:
            signals.append((first_s + draw.uniform(0, 0.05), signal.SIGTERM))
        promises, code = live(storage, signals)
        assert code in ((None, 0) if number % 2 == 0 else (None, 0, 75)), f"the daemon ended with {code}"
        early += code == 75
        found = come_back(storage, max(durable, promises.applied if code == 0 else promises.durable))
        # The trainer may not hear of the last step that a daemon applies.
        assert code != 0 or promises.applied == 0 or found <= promises.applied + 1, (found, promises.applied)
        durable = found
    return f"{count} drains, {early} of them cut short by a second signal, step {durable}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["kills", "drains"])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ballast-lives-") as made:
        disturbed = Path(made) / "disturbed"
        disturbed.mkdir()
        draw = random.Random(options.seed)
        said = (kills if options.what == "kills" else drains)(disturbed, options.count, draw)
        whole = Training(come_back(disturbed, 0) + 5, ENDLESS.width, ENDLESS.every, ENDLESS.awaited)
        assert finish(disturbed, whole) == finish(Path(made) / "whole", whole), "another training came out"
    print(f"{said}; the digests of {whole.last} steps are those of an undisturbed training")


if __name__ == "__main__":
    main()
