"""Real power cuts: a daemon whose storage lies on a file system of its own, which is shut down without its log being
flushed (the ioctl that file systems are tested with), and mounted again.

    unshare --mount .venv/bin/python tests/python/power.py [--fs ext4,xfs] [--seed N] [--short]

The power is cut at each failpoint, the first, the second and a drawn time that a daemon comes there; when somebody has just
been told that a step is durable, that the run was taken back to an earlier one, or that it was deleted; when the daemon has
drained; and at any moment. Each time the daemon must come back at what was promised, without damage, and end with the
digests of a training that was never cut off. Then with syncs left out, which must be noticed: with each, and one by one.
(A single one may be made good by a later one: these file systems write their log in order. So that is looked at without a
journal.)

Needs root, loop devices and mkfs; --missing says what is not here, with exit code 1. Passes if its exit code is 0; the
last line sums up.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread, Timer

import torch

import ballast
from ballast import _core
from crashing import FAILPOINTS, RUN, SMALL, Promises, Training, come_back, finish, go_on
from daemon import Daemon

SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32), which ext4 has from XFS
NOLOGFLUSH = 2
LAST = SMALL.last
WIDE = 1000  # three million parameters: files of several blocks of 4 MiB
VISITS = 4  # that a short training makes to each place, at least
SYNCS = 13  # before its first checkpoint counts, at most
KINDS = {"ext4": ("128M", ["mkfs.ext4", "-q", "-F"]), "xfs": ("320M", ["mkfs.xfs", "-q", "-f"])}


def missing(kinds: list[str]) -> list[str]:
    """What is needed and not here, and how to have it."""
    known = Path("/proc/filesystems").read_text().split()
    wants = {
        "root": os.geteuid() == 0,
        "loop devices (/dev/loop-control)": Path("/dev/loop-control").exists(),
        **{f"{kind} in the kernel": kind in known for kind in kinds},
        **{f"{KINDS[kind][1][0]} (deploy/packages.sh tests)": shutil.which(KINDS[kind][1][0]) for kind in kinds},
    }
    return [what for what, there in wants.items() if not there]


class Disk:
    """A file system on a loop device, whose power can be cut. `training`: of the run that is kept on it."""

    def __init__(self, folder: Path, kind: str, training: Training) -> None:
        self.kind = kind
        self.training = training
        self._image, self._mounted = folder / f"{kind}.image", folder / kind
        self._mounted.mkdir()
        self._is_mounted = False  # os.path.ismount cannot tell after a cut
        self.storage = self._mounted / "storage"

    def make(self) -> None:
        """Anew, with a folder for a daemon that outlives a cut."""
        size, command = KINDS[self.kind]
        subprocess.run(["truncate", "--size", size, self._image], check=True)
        subprocess.run([*command, self._image], check=True)
        self.mount()
        self.storage.mkdir()
        subprocess.run(["sync", "--file-system", self.storage], check=True)

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self._image, self._mounted], check=True)
        self._is_mounted = True

    def cut(self) -> None:
        """From now on nothing comes to the disk, neither what is in memory nor what is still to be written."""
        folder = os.open(self._mounted, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, SHUTDOWN, struct.pack("I", NOLOGFLUSH))
        finally:
            os.close(folder)

    def unmount(self) -> None:
        if self._is_mounted:
            subprocess.run(["umount", self._mounted], check=True)
        self._is_mounted = False


@dataclass(frozen=True)
class Kept:
    """The step at which the daemon must be again, from the one to the other."""

    least: int
    most: int = LAST


def cut_off(disk: Disk, daemon: Daemon) -> None:
    try:
        disk.cut()
    finally:
        daemon.kill()


def train_until_cut(disk: Disk, daemon: Daemon, on_step: Callable[[int, int], None] = lambda step, count: None) -> Kept:
    """Trains, and drains the daemon, unless the power is cut in the middle."""
    promises = Promises(on_step)
    try:
        go_on(daemon, disk.training, promises)
        daemon.stop()
    except ballast.BallastError:
        pass
    return Kept(LAST if daemon.wait() == 0 else promises.durable)


def at_failpoint(disk: Disk, place: str, visit: int) -> Kept:
    """Cut when the daemon comes there."""

    def wait_and_cut() -> None:
        if daemon.stands_still():
            cut_off(disk, daemon)

    with Daemon(storage=disk.storage, TEST_FAILPOINT=f"{place}={visit}:stop") as daemon:
        watcher = Thread(target=wait_and_cut)
        watcher.start()
        kept = train_until_cut(disk, daemon)
        watcher.join()
        assert daemon.wait() == -signal.SIGKILL, f"{place} was not come to {visit} times"
    return kept


def when_promised(disk: Disk, count: int, **variables: str) -> Kept:
    """Cut as soon as the trainer has been told so many times that a step is durable."""

    def cut(step: int, promises: int) -> None:
        if promises == count:
            cut_off(disk, daemon)

    with Daemon(storage=disk.storage, **variables) as daemon:
        kept = train_until_cut(disk, daemon, cut)
        assert daemon.wait() == -signal.SIGKILL, f"fewer than {count} steps became durable"
    return kept


def when_answered(disk: Disk, request: Callable[[_core.Client], object], left_at: int) -> Kept:
    """Cut as soon as the daemon has answered what leaves the run at this step. 0: it is no more."""
    with Daemon(storage=disk.storage) as daemon:
        go_on(daemon, disk.training, Promises())
        client = _core.Client.connect(daemon.server, 5.0, 5.0)
        request(client)
        cut_off(disk, daemon)
        client.close()
    return Kept(left_at, left_at)


def when_drained(disk: Disk) -> Kept:
    with Daemon(storage=disk.storage) as daemon:
        kept = train_until_cut(disk, daemon)
        disk.cut()
    return kept


def after(disk: Disk, seconds: float) -> Kept:
    """Cut so long after the daemon serves; perhaps when it has ended."""
    with Daemon(storage=disk.storage) as daemon:
        timer = Timer(seconds, cut_off, [disk, daemon])
        timer.start()
        kept = train_until_cut(disk, daemon)
        timer.join()
    return kept


def lost(disk: Disk, uncut: str, train: Callable[[Disk], Kept]) -> str:
    """What was lost by a cut in the middle of it; empty: nothing."""
    disk.make()
    try:
        kept = train(disk)
        disk.unmount()
        disk.mount()
        found = come_back(disk.storage, kept.least, kept.most)
        if finish(disk.storage, disk.training) != uncut:
            return f"the training went on otherwise from step {found}"
    except AssertionError as loss:
        return str(loss)
    finally:
        disk.unmount()
    return ""


Cut = tuple[str, Callable[[Disk], Kept]]


def rewind(client: _core.Client) -> None:
    client.rewind(RUN, LAST - 3, None, "a test")


def rewind_past_checkpoints(client: _core.Client) -> None:
    """Those that are kept are of later steps."""
    client.checkpoint(RUN)
    rewind(client)


def delete(client: _core.Client) -> None:
    client.delete_run(RUN, force=True)


def cuts(draw: random.Random, length_s: float, short: bool) -> list[Cut]:
    """length_s: that a training takes which is not cut off."""
    places = [(place, visit) for place in FAILPOINTS for visit in (1, 2, draw.randint(3, VISITS))]
    moments = [draw.uniform(0, length_s) for _ in range(2 if short else 60)]
    if short:
        places = [*draw.sample(places, 2), ("checkpoint.published", 2)]
    return [
        *((f"{place}, visit {visit}", partial(at_failpoint, place=place, visit=visit)) for place, visit in places),
        *((f"promise {count}", partial(when_promised, count=count)) for count in ((1,) if short else (1, 2, 3, 4))),
        ("rewound", partial(when_answered, request=rewind, left_at=LAST - 3)),
        ("rewound past all checkpoints", partial(when_answered, request=rewind_past_checkpoints, left_at=LAST - 3)),
        ("deleted", partial(when_answered, request=delete, left_at=0)),
        ("drained", when_drained),
        *((f"after {seconds:.3f} s", partial(after, seconds=seconds)) for seconds in moments),
    ]


def check(disk: Disk, uncut: str, made: list[Cut], short: bool) -> str:
    """All cuts of one file system. What it found, for people."""
    for name, train in made:
        loss = lost(disk, uncut, train)
        print(f"{disk.kind}: {name}: {loss or 'nothing lost'}", flush=True)
        assert not loss, f"{disk.kind}: {name}: {loss}"
    noticed = []
    # Without a journal, whose syncs come after: they would make up for any single one.
    disk.training = replace(disk.training, durability="checkpoint")
    for skipped in (0,) if short else range(SYNCS + 1):
        train = partial(when_promised, count=1, TEST_FAILPOINT=f"fs.sync={skipped}:skip")
        loss = lost(disk, uncut, train)
        print(f"{disk.kind}: without sync {skipped or 'at all'}: {loss or 'nothing lost'}", flush=True)
        if loss:
            noticed.append(skipped)
    assert 0 in noticed, f"{disk.kind}: no sync was made, and nobody noticed"
    assert short or len(noticed) > 1, f"{disk.kind}: no single sync that was left out was noticed"
    ones = "" if short else f", of {SYNCS} left out one by one {len(noticed) - 1} (the {noticed[1:]})"
    return f"{disk.kind}: {len(made)} cuts, nothing lost; left-out syncs that were noticed: all{ones}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fs", default="ext4,xfs")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--missing", action="store_true")
    options = parser.parse_args()
    kinds = options.fs.split(",")
    if lacking := missing(kinds):
        print(f"NOT RUN: no power was cut, for lack of {', '.join(lacking)}")
        sys.exit(1)
    if options.missing:
        return
    print(f"seed {options.seed}")
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory(prefix="ballast-power-") as folder:
        training = SMALL if options.short else replace(SMALL, width=WIDE)
        uncut = finish(Path(folder) / "uncut", training)
        began_s = time.monotonic()
        assert finish(Path(folder) / "again", training) == uncut
        made = cuts(random.Random(options.seed), time.monotonic() - began_s, options.short)
        for kind in kinds:
            found.append(check(Disk(Path(folder), kind, training), uncut, made, options.short))
    print("; ".join(found))


if __name__ == "__main__":
    main()
