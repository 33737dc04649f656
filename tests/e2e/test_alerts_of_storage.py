"""What befalls a daemon's disk, and the alerts that tell of it: a slow disk, a full one, a copy that fails, and files that
are damaged when the daemon is started anew. The shipped rules, with their durations shortened."""

import contextlib
import subprocess
import threading
from pathlib import Path

import ballast
import pytest
import torch
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
    ("BallastCheckpointNotCopied", "damaged"),
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


class Trainer:
    """Trains one run, a step at a time."""

    def __init__(self, server: str, run: str, **options):
        self.weight = torch.nn.Parameter(torch.ones(64, 64))
        self.optimizer = ballast.AdamW([("w", self.weight)], server=server, run=run, **options)

    def step(self) -> None:
        self.weight.square().sum().backward()
        self.optimizer.step(loss=1.0)
        self.optimizer.zero_grad()

    def train_until(self, over: threading.Event, pause_s: float) -> None:
        while not over.wait(pause_s):
            self.step()


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


def make_runs(server: str, stack: contextlib.ExitStack) -> list[tuple[Trainer, float]]:
    """Those that go on training, and the pause between their steps; two more have their checkpoints, and have ended."""
    for run, steps in (("damaged", 2), ("later", 1)):
        trainer = Trainer(server, run)
        for _ in range(steps):
            trainer.step()
            trainer.optimizer.checkpoint()
        trainer.optimizer.close()
    old = Trainer(server, "old", checkpoint_every_seconds=10)
    journal = Trainer(server, "journal", durability="journal_sync")
    old.step()
    old.optimizer.checkpoint()
    for trainer in (old, journal):
        stack.callback(trainer.optimizer.close)
    return [(old, 0.5), (journal, 0.05)]


def test_alerts_tell_of_a_slow_full_and_damaged_disk(tmp_path, small_disk, slow_sync):
    flags = ["--storage.dir", str(small_disk), "--storage.on_published", "/bin/false"]
    rules = hurried_rules(tmp_path)
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(Daemon(tmp_path, *flags, environment={"LD_PRELOAD": str(slow_sync)}))
        prometheus = stack.enter_context(Prometheus(tmp_path, daemon.ops, None, rules))
        over, threads = threading.Event(), []
        with contextlib.ExitStack() as trainers:
            for trainer, pause_s in make_runs(daemon.server, trainers):
                threads.append(threading.Thread(target=trainer.train_until, args=(over, pause_s)))
                threads[-1].start()
            prometheus.until('ALERTS{alertname="BallastJournalSlow",alertstate="firing"}')
            prometheus.until('ALERTS{alertname="BallastCheckpointNotCopied",alertstate="firing"}')
            filler = fill(small_disk)
            with contextlib.suppress(AssertionError):  # which would show Prometheus's log alone
                prometheus.until_true("all have fired", lambda: BEFORE <= prometheus.fired(), 180)
            fired = prometheus.fired()
            over.set()
            for thread in threads:
                thread.join()
            assert BEFORE <= fired, f"not fired: {sorted(BEFORE - fired)}; fired: {sorted(fired)}"
            assert not AFTER & fired
            filler.unlink()
        daemon.process.kill()
        daemon.process.wait()
        damage(small_disk)
        daemon.flags += ["--ops_http.listen", daemon.ops]
        daemon.environment = {}
        daemon.restart()
        until("the damage is told of", lambda: AFTER <= prometheus.fired(), 120)
