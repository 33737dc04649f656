"""What befalls a daemon's disk, and the alerts that tell of it: a slow disk, a full one, a copy that fails, and files that
are damaged when the daemon is started anew. The shipped rules, with their durations shortened."""

import contextlib
import subprocess
from pathlib import Path

import pytest
from alert_causes import Made, make, step, training
from daemon import Daemon, until
from monitoring import Prometheus, hurried_rules, missing_programs

pytestmark = pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}")

# Stands for a slow disk: each sync of a journal's file takes 1.5 s more.
SLOW_SYNC = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int fsync(int fd) {
  char link[64], path[4096] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if (readlink(link, path, sizeof path - 1) > 0 && strstr(path, "/journal")) usleep(1500000);
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
"""
# Until the daemon is started anew, and then.
BEFORE = {
    ("BallastJournalSlow", ""),
    *(("BallastCheckpointNotCopied", run) for run in ("damaged", "later", "old", "journal")),
    ("BallastStorageFillingUp", ""),
    ("BallastCheckpointFailing", "old"),
    ("BallastJournalFailing", "journal"),
    ("BallastCheckpointTooOld", "old"),
}
AFTER = {
    ("BallastCheckpointDamaged", "damaged"),
    ("BallastRestoredOlderCheckpoint", "damaged"),
    ("BallastRunNotRestored", "later"),
}


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"NOT TESTED, a file system cannot be mounted here: {made.stderr.strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.fixture
def slow_sync(tmp_path) -> Path:
    library = tmp_path / "slow_sync.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-ldl"]
    subprocess.run(command, input=SLOW_SYNC, text=True, check=True)
    return library


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 4096):
            pass
    return filler


def damage(storage: Path) -> None:
    """The newest checkpoint of the one run; of the other it is of a later version."""
    newest = sorted((storage / "runs" / "damaged").glob("0*-step-*"))[-1]
    [weights] = newest.glob("model-*.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    [only] = (storage / "runs" / "later").glob("0*-step-*")
    manifest = only / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"format":1', b'"format":99'))


def make_runs(server: str, stack: contextlib.ExitStack) -> list[tuple[Made, float]]:
    """Those that go on training, and the pause between their steps; two more have their checkpoints, and have ended."""
    for run, steps in (("damaged", 2), ("later", 1)):
        made = make(server, run, (64, 64))
        for _ in range(steps):
            step(made)
            made[1].checkpoint()
        made[1].close()
    old = make(server, "old", (64, 64), checkpoint_every_seconds=10)
    journal = make(server, "journal", (64, 64), durability="journal_sync")
    step(old)
    old[1].checkpoint()
    for made in (old, journal):
        stack.callback(made[1].close)
    return [(old, 0.5), (journal, 0.05)]


def harm_the_disk(daemon: Daemon, prometheus: Prometheus, disk: Path) -> None:
    """Fills it, when what comes of a slow one has been told, and damages what is on it."""
    with contextlib.ExitStack() as trainers:
        made = make_runs(daemon.server, trainers)
        with training(*made):
            prometheus.until('ALERTS{alertname="BallastJournalSlow",alertstate="firing"}')
            prometheus.until('ALERTS{alertname="BallastCheckpointNotCopied",alertstate="firing"}')
            filler = fill(disk)
            with contextlib.suppress(AssertionError):  # which would show Prometheus's log alone
                prometheus.until_true("all have fired", lambda: BEFORE <= prometheus.fired(), 180)
            fired = prometheus.fired()
        assert fired == BEFORE, f"not fired: {sorted(BEFORE - fired)}; for nothing: {sorted(fired - BEFORE)}"
        filler.unlink()
    daemon.process.kill()
    daemon.process.wait()
    damage(disk)


def test_alerts_tell_of_a_slow_full_and_damaged_disk(tmp_path, small_disk, slow_sync):
    flags = ["--storage.dir", str(small_disk), "--storage.on_published", "/bin/false"]
    with (
        Daemon(tmp_path, *flags, environment={"LD_PRELOAD": str(slow_sync)}) as daemon,
        Prometheus(tmp_path, daemon.ops, None, hurried_rules(tmp_path)) as prometheus,
    ):
        harm_the_disk(daemon, prometheus, small_disk)
        daemon.flags += ["--ops_http.listen", daemon.ops]
        daemon.environment = {}
        daemon.restart()
        until("the damage is told of", lambda: AFTER <= prometheus.fired(), 120)
