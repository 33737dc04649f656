"""Alerts fired by what they are for: a real daemon, real trainers, the shipped rules. Durations in the rules are a
twentieth, from 4 to 30 s; what a rule compares is as shipped, and promtool checks the durations (test_deploy.py)."""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from daemon import Daemon, plain_environment
from monitoring import DEPLOY, Prometheus, missing_programs

pytestmark = pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}")

SECONDS = {"s": 1, "m": 60, "h": 3600}
# Beside BallastRunIdle, which is said of every run that stays.
OF_RUNS = {
    ("BallastStepStalled", "stalled"),
    ("BallastTrainersLost", "lost"),
    ("BallastLossNotFinite", "loss"),
    ("BallastLossSpike", "loss"),
    ("BallastGradientsNonFinite", "gradient"),
    ("BallastGradientsNonFinite", "skips"),
    ("BallastStepsNotApplied", "skips"),
    ("BallastStepsNotApplied", "policy"),  # its one step of late
    ("BallastSpikeActionTaken", "policy"),
    ("BallastGradientNormOutlier", "policy"),
    ("BallastRankMissing", "pair"),
    ("BallastAdmissionRejecting", ""),
}


def hurried(match: re.Match) -> str:
    before, number, unit, after = match.groups()
    return f"{before}{min(30, max(4, int(number) * SECONDS[unit] // 20))}s{after}"


@pytest.fixture(scope="module")
def rules(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rules")
    for name in ("alerts.yml", "rules.yml"):
        text = (DEPLOY / "prometheus" / name).read_text()
        text, count = re.subn(r"(for: |\[|offset )(\d+)([smh])\b(\]?)", hurried, text)
        assert count
        (folder / name).write_text(text)
    return folder


def trainer(server: str, what: str) -> subprocess.Popen:
    script = Path(__file__).with_name("alert_causes.py")
    command = [sys.executable, "-W", "ignore", str(script), server, what]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=plain_environment())


def firing(prometheus: Prometheus) -> set[tuple[str, str]]:
    shown = prometheus.query('max_over_time(ALERTS{alertstate="firing"}[5m])')
    return {(series["metric"]["alertname"], series["metric"].get("run_id", "")) for series in shown}


def close_listener(daemon: Daemon) -> None:
    """As if something had shut the gRPC port's socket, and nothing else."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(daemon.process.pid)
    port = int(daemon.server.rsplit(":", 1)[1])
    for name in os.listdir(f"/proc/{daemon.process.pid}/fd"):
        taken = libc.syscall(438, pidfd, int(name), 0)  # pidfd_getfd
        if taken < 0:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=taken) as taken_socket:
            if (
                taken_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and taken_socket.getsockname()[1] == port
            ):
                taken_socket.shutdown(socket.SHUT_RDWR)
                os.close(pidfd)
                return
    raise AssertionError(f"no socket of the daemon's that listens on port {port} could be had")


def test_alerts_fire_for_what_happened_and_for_nothing_else(tmp_path, rules):
    flags = ["--memory_limit", "256MiB", "--limits.lease", "1s"]
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(Daemon(tmp_path, *flags))
        prometheus = stack.enter_context(Prometheus(tmp_path, daemon.ops, None, rules))
        trainers = [trainer(daemon.server, what) for what in ("stays", "goes")]
        for process in trainers:
            stack.callback(process.communicate)
            stack.callback(process.kill)
        stays, goes = trainers
        assert [stays.stdout.readline(), goes.stdout.readline()] == ["calm\n", "ready\n"]
        prometheus.until('ballast_steps_applied_total{run_id="finished"} == 3')
        prometheus.until('ballast_run_ranks{run_id="pair"} == 2')
        stays.stdin.write("do harm\n")
        stays.stdin.flush()
        assert [stays.stdout.readline() for _ in range(2)] == ["run\n", "ready\n"]
        goes.send_signal(signal.SIGKILL)
        with contextlib.suppress(AssertionError):  # which would show Prometheus's log alone
            prometheus.until_true("all have fired", lambda: OF_RUNS <= firing(prometheus), 180)
        prometheus.until('ALERTS{alertname="BallastRunIdle",run_id="idle",alertstate="firing"}')
        fired = firing(prometheus)
        idle = {run for name, run in fired if name == "BallastRunIdle"}
        silent, wrong = OF_RUNS - fired, {alert for alert in fired - OF_RUNS if alert[0] != "BallastRunIdle"}
        assert not silent and not wrong, f"not fired: {sorted(silent)}; fired for nothing: {sorted(wrong)}"
        assert "idle" in idle and not idle & {"finished", "stalled", "lost"}

        close_listener(daemon)
        prometheus.until('ALERTS{alertname="BallastNotLive",alertstate="firing"}')
        daemon.process.kill()
        prometheus.until('ALERTS{alertname="BallastDown",alertstate="firing"}')
        daemon.flags += ["--ops_http.listen", daemon.ops]
        daemon.restart()
        prometheus.until('ALERTS{alertname="BallastRestarted",alertstate="firing"}')
        lost = prometheus.until('ALERTS{alertname="BallastRunsLost",alertstate="firing"}')
        runs = {series["metric"]["run_id"] for series in lost}
        assert {"idle", "stalled", "lost", "pair"} <= runs and "finished" not in runs


def test_a_prometheus_without_a_daemon_says_so(tmp_path, rules):
    with Prometheus(tmp_path, None, None, rules) as prometheus:
        prometheus.until('ALERTS{alertname="BallastAbsent",alertstate="firing"}')
