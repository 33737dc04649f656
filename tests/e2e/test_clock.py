"""The time of day is set by an hour, and daemon and trainer do all that is due in seconds: their waits go by another
clock."""

import contextlib
import socket

import pytest
from daemon import Daemon, until
from grants import give_token
from set_clock import SetClock
from stepping import Trainer, running

HOUR_S = 3600
RANK = """
import sys, torch, ballast
w = torch.nn.Parameter(torch.ones(1000))
opt = ballast.AdamW([("w", w)], server=sys.argv[1], run="team", rank=rank, world=2, rank_timeout=1)
for step in range(2 - rank):
    (w * w).sum().backward()
    opt.step()
    print(opt.last_result.outcome, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def clock(tmp_path) -> SetClock:
    return SetClock(tmp_path)


def has(daemon: Daemon, event: str) -> bool:
    return f'"event":"{event}"' in daemon.log.read_text()


def test_a_run_without_a_trainer_expires(tmp_path, clock):
    with Daemon(tmp_path, "--idle_run_timeout", "1s", environment=clock.environment) as daemon:
        with Trainer(daemon.server, "left") as trainer:
            assert trainer.step() == 1
            clock.set(-HOUR_S)
        until("the run has expired", lambda: has(daemon, "run_expired"))


def test_a_step_is_not_kept_waiting_for_a_lost_rank(tmp_path, clock):
    """Whoever waits says nothing, so that nothing but its clock moves the run."""
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(Daemon(tmp_path, "--limits.lease", "1s", environment=clock.environment))
        ranks = [stack.enter_context(running(f"rank = {rank}{RANK}", daemon.server)) for rank in range(2)]
        assert [rank.stdout.readline() for rank in ranks] == ["APPLIED\n"] * 2
        ranks[1].kill()
        until("the daemon has noticed", lambda: has(daemon, "stream_ended"))
        clock.set(-HOUR_S)
        assert ranks[0].stdout.readline() == "ABORTED\n"


def test_systemd_is_told_on(tmp_path, clock):
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.bind(str(tmp_path / "notify"))
    told.settimeout(60)
    wanted = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000000"}
    with told, Daemon(tmp_path, environment=clock.environment | wanted):
        until("all is well", lambda: b"WATCHDOG=1" in told.recv(4096))
        clock.set(-HOUR_S)
        for _ in range(3):
            until("all is well", lambda: b"WATCHDOG=1" in told.recv(4096))


def test_a_grant_that_is_taken_back_is_noticed(tmp_path, clock):
    _, access = give_token(tmp_path, "team-a-*", "push")
    port = f"unix:{tmp_path / 'grpc'}"
    with Daemon(tmp_path, "--listen", port, "--access", str(access), environment=clock.environment) as daemon:
        clock.set(-HOUR_S)
        access.write_text("grants: []\n")
        until("it was read again", lambda: has(daemon, "access_reload"))


def test_a_trainer_waits_for_a_daemon_that_is_away(tmp_path, clock):
    """Set forward, for a while that is over at once by the time of day."""
    storage = tmp_path / "storage"
    storage.mkdir()
    with (
        Daemon(tmp_path, "--storage.dir", str(storage)) as daemon,
        Trainer(daemon.server, "away", variables=clock.environment) as trainer,
    ):
        assert trainer.step() == 1
        assert daemon.ctl("checkpoint", "away").returncode == 0
        daemon.process.kill()
        assert "lost the daemon" in trainer.process.stderr.readline()
        clock.set(HOUR_S)
        daemon.restart()
        trainer.process.stdin.write("\n")
        trainer.process.stdin.flush()
        assert "RunRewound" in trainer.process.stderr.read()
