"""The soak test: see soak.sh."""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from daemon import Daemon, plain_environment  # noqa: E402

TRAINER = """
import sys, torch, ballast
torch.set_num_threads(1)
torch.manual_seed(int(sys.argv[3]))
model = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 64))
opt = ballast.AdamW(model.named_parameters(), lr=1e-3, server=sys.argv[1], run=sys.argv[2])
print("attached", flush=True)
while True:
    x = torch.randn(32, 64)
    loss = ((model(x) - x) ** 2).mean()
    loss.backward()
    opt.step(loss=loss)
    opt.zero_grad()
"""

RSS_SLACK_KIB = 8 * 1024  # in the second half: in the first, each thread's arena of the allocator fills


def held(pid: int) -> dict[str, int]:
    """The memory, threads and file descriptors that the daemon's process holds."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    fds = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return {"rss_kib": int(status["VmRSS"].split()[0]), "threads": int(status["Threads"]), "fds": fds}


def one_life(daemon: Daemon, chance: random.Random, life: int) -> None:
    """A trainer that is killed somewhere in its training, or before its first step, and the deletion of its run."""
    run = f"soak-{life}"
    command = [sys.executable, "-c", TRAINER, daemon.server, run, str(life)]
    pipe = subprocess.PIPE
    trainer = subprocess.Popen(command, env=plain_environment(), stdout=pipe, stderr=pipe, text=True)
    try:
        assert trainer.stdout.readline() == "attached\n", trainer.stderr.read()  # however long the imports take
        trainer.wait(chance.uniform(0, 10))
        raise AssertionError(f"the trainer ended by itself: {trainer.stderr.read()}")
    except subprocess.TimeoutExpired:
        trainer.kill()
        trainer.wait()
    deleted = daemon.ctl("delete", run, "--force")
    assert deleted.returncode == 0, deleted.stdout + deleted.stderr
    assert daemon.process.poll() is None, daemon.log.read_text()[-4000:]


def errors_in(log: Path) -> list[str]:
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [json.dumps(line) for line in lines if line.get("level") == "error"]


def soak(daemon: Daemon, chance: random.Random, minutes: float) -> None:
    began = time.monotonic()
    baseline, since, life = None, 0, 0
    while time.monotonic() < began + 60 * minutes:
        one_life(daemon, chance, life)
        life += 1
        now = held(daemon.process.pid)
        print(f"life {life}: {now}", flush=True)
        if baseline is None and time.monotonic() > began + 30 * minutes:
            baseline, since = now, life
    final = held(daemon.process.pid)
    grown = final["rss_kib"] - baseline["rss_kib"]
    assert grown < RSS_SLACK_KIB, f"resident memory grew by {grown} KiB over the last {life - since} lives"
    assert final["fds"] <= baseline["fds"] + 4, f"file descriptors: {baseline['fds']} -> {final['fds']}"
    assert final["threads"] <= baseline["threads"] + 4, f"threads: {baseline['threads']} -> {final['threads']}"
    assert not errors_in(daemon.log), "\n".join(errors_in(daemon.log))
    assert daemon.stop() == 0
    print(f"passed: {life} trainers killed in {minutes} minutes; in the second half the memory grew by {grown} KiB")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="ballast-soak-") as folder, Daemon(Path(folder)) as daemon:
        soak(daemon, random.Random(options.seed), options.minutes)


if __name__ == "__main__":
    main()
