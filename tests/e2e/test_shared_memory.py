"""Trainer and daemon on one host: the transport they take by themselves, and what each notices of the other's death."""

import json
import re
import signal
import subprocess

import pytest
from daemon import EXAMPLE, Daemon, plain_environment, until
from warm_python import WarmPython

ENDLESS_TRAINER = """
import sys, torch, ballast
torch.manual_seed(0)
w = torch.nn.Parameter(torch.randn(200_000))
place = dict(server=sys.argv[1], run="shared", transport=sys.argv[2], weights=sys.argv[3] or None)
opt = ballast.AdamW([("w", w)], lr=1e-3, reconnect_timeout=2, **place)
step = 0
while True:
    (w * w).sum().backward()
    opt.step()
    step += 1
    print(step, flush=True)
"""


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path, "--shm_socket", f"{tmp_path}/shared/", "--limits.lease", "1s") as running:
        yield running


def streams(daemon: Daemon) -> list[dict]:
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("event") == "stream"]


def start_trainer(daemon: Daemon, transport: str, weights: str = "") -> subprocess.Popen:
    """Returns once it has made some steps."""
    trainer = WarmPython(
        ["-c", ENDLESS_TRAINER, daemon.server, transport, weights],
        env=plain_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(3):
        assert trainer.stdout.readline(), trainer.stderr.read()
    return trainer


def rank_line(daemon: Daemon) -> str:
    found = re.search(r"rank 0: .*", daemon.ctl("run", "shared").stdout)
    return found[0] if found else ""


def test_the_transport_is_taken_without_asking_and_shown(daemon):
    result = subprocess.run([EXAMPLE, daemon.server], capture_output=True, text=True, env=plain_environment())
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert [line["transport"] for line in streams(daemon)] == ["shm"]


@pytest.mark.parametrize("transport", ["auto", "shm", "grpc"])
def test_the_option_of_python_chooses(daemon, transport):
    trainer = start_trainer(daemon, transport)
    try:
        taken = f"connected, transport {'grpc' if transport == 'grpc' else 'shm'}"
        until(taken, lambda: rank_line(daemon).endswith(taken))
    finally:
        trainer.kill()
        trainer.communicate()


def test_a_killed_trainer_is_noticed_and_its_successor_goes_on(daemon):
    trainer = start_trainer(daemon, "shm")
    trainer.send_signal(signal.SIGKILL)
    trainer.communicate()
    until("the rank is gone", lambda: "not connected" in rank_line(daemon))
    successor = start_trainer(daemon, "shm", weights="server")
    try:
        until("the rank is back", lambda: rank_line(daemon).endswith(" connected, transport shm"))
    finally:
        successor.kill()
        successor.communicate()


def test_a_killed_daemon_is_noticed(daemon):
    trainer = start_trainer(daemon, "shm")
    daemon.process.kill()
    _, said = trainer.communicate(timeout=120)
    assert trainer.returncode != 0
    assert "lost the daemon" in said and "could not get back" in said, said


def test_a_restarted_daemon_takes_away_what_the_killed_one_left(daemon, tmp_path):
    folder = tmp_path / "shared"
    left = list(folder.iterdir())
    assert len(left) == 1 and left[0].stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    daemon.process.kill()
    daemon.process.wait()
    assert list(folder.iterdir()) == left
    (tmp_path / "next").mkdir()
    with Daemon(tmp_path / "next", "--shm_socket", f"{folder}/") as successor:
        sockets = list(folder.iterdir())
        assert len(sockets) == 1 and sockets != left
        assert successor.stop() == 0
    assert not list(folder.iterdir())


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with Daemon(tmp_path, "--shm_socket", f"{folder}/") as running:
        result = subprocess.run([EXAMPLE, running.server], capture_output=True, text=True, env=plain_environment())
        assert result.returncode == 0, result.stderr
        assert [line["transport"] for line in streams(running)] == ["grpc"]
        assert "only this user can write to" in running.log.read_text()
