"""Alerts fired by what they are for: a real daemon, real trainers, the shipped rules, whose durations are shortened; promtool
checks those (test_deploy.py)."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from daemon import Daemon, plain_environment
from monitoring import Prometheus, hurried_rules, missing_programs
from plain_stubs import make_stubs
from warm_python import WarmPython

pytestmark = pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}")

# Beside BallastRunIdle, which is said of every run that stays.
OF_RUNS = {
    ("BallastStepStalled", "stalled"),
    ("BallastTrainersLost", "lost"),
    ("BallastRankMissing", "pair"),
    ("BallastRankStraggling", "straggling"),
    ("BallastLossNotFinite", "loss"),
    ("BallastLossSpike", "loss"),
    ("BallastGradientsNonFinite", "gradient"),
    ("BallastGradientsNonFinite", "skips"),
    ("BallastStepsNotApplied", "skips"),
    ("BallastStepsNotApplied", "policy"),  # its one step of late
    ("BallastSpikeActionTaken", "policy"),
    ("BallastGradientNormOutlier", "outliers"),
    ("BallastGradientsNonFinite", "stopped"),
    ("BallastSpikeActionTaken", "stopped"),
    ("BallastLossSpike", "chance"),
    ("BallastPredictorUseless", "chance"),
    ("BallastLossSpike", "foretold"),
    ("BallastLossSpikePredicted", "foretold"),
    ("BallastArithmeticLost", "rounded"),
    ("BallastDuplicateChunkMismatch", "probe-1"),
    ("BallastStepsNotApplied", "probe-1"),
    ("BallastTrainersLost", "probe-1"),
    ("BallastAdmissionRejecting", ""),
    ("BallastMemoryHigh", ""),
}
# Alerts of which there are two, and the severity of the one that these runs are for.
SEVERE = {("BallastSpikeActionTaken", "stopped"): "critical", ("BallastLossSpikePredicted", "foretold"): "warning"}
TWO_CHUNKS_OF_ONE = """
import sys
from plain_probes import BEGIN, Probe, gradient
stream = Probe(sys.argv[1]).start(BEGIN, gradient(0))
print("begun", flush=True)
sys.stdin.readline()
stream.say(gradient(0, b"\\1\\0\\0\\0"))
print(stream.end())
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory) -> Path:
    return make_stubs(tmp_path_factory.mktemp("stubs"))


@pytest.fixture(scope="module")
def rules(tmp_path_factory) -> Path:
    return hurried_rules(tmp_path_factory.mktemp("rules"))


def trainer(server: str, what: str) -> subprocess.Popen:
    script = Path(__file__).with_name("alert_causes.py")
    words, pipe = ["-W", "ignore", script, server, what], subprocess.PIPE
    return WarmPython(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=plain_environment())


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


@contextlib.contextmanager
def trainers(server: str):
    """Those that stay, and those that go."""
    with contextlib.ExitStack() as stack:
        processes = [trainer(server, what) for what in ("stays", "goes")]
        for process in processes:
            stack.callback(process.communicate)
            stack.callback(process.kill)
        yield processes


def send_two_chunks_of_one(server: str, stubs: Path, prometheus: Prometheus) -> None:
    """The second when Prometheus has seen that none of the run's steps was aborted: what it counts grows then."""
    path = os.pathsep.join([str(stubs), str(Path(__file__).parent)])
    command = [sys.executable, "-c", TWO_CHUNKS_OF_ONE, server]
    pipe, environment = subprocess.PIPE, plain_environment() | {"PYTHONPATH": path}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            assert process.stdout.readline() == "begun\n", process.stderr.read()
            prometheus.until('ballast_steps_aborted_total{run_id="probe-1"} == 0')
            said, errors = process.communicate("go on\n", timeout=60)
        finally:
            process.kill()
    assert said == "DATA_LOSS\n", errors


def do_harm(stays: subprocess.Popen, goes: subprocess.Popen) -> None:
    stays.stdin.write("do harm\n")
    stays.stdin.flush()
    assert [stays.stdout.readline() for _ in range(2)] == ["stopped\n", "ready\n"]
    goes.send_signal(signal.SIGKILL)


def check_fired(prometheus: Prometheus) -> None:
    with contextlib.suppress(AssertionError):  # which would show Prometheus's log alone
        prometheus.until_true("all have fired", lambda: OF_RUNS <= prometheus.fired(), 180)
    prometheus.until('ALERTS{alertname="BallastRunIdle",run_id="idle",alertstate="firing"}')
    fired = prometheus.fired()
    idle = {run for name, run in fired if name == "BallastRunIdle"}
    silent, wrong = OF_RUNS - fired, {alert for alert in fired - OF_RUNS if alert[0] != "BallastRunIdle"}
    assert not silent and not wrong, f"not fired: {sorted(silent)}; fired for nothing: {sorted(wrong)}"
    assert "idle" in idle and not idle & {"finished", "stalled", "lost", "healthy", "straggling", "rounded"}
    for (name, run), severity in SEVERE.items():
        of = f'alertname="{name}",run_id="{run}",severity="{severity}",alertstate="firing"'
        assert prometheus.query(f"max_over_time(ALERTS{{{of}}}[5m])"), f"{name} of {run} has not been {severity}"


def test_alerts_fire_for_what_happened_and_for_nothing_else(tmp_path, rules, stubs):
    flags = ["--memory_limit", "256MiB", "--limits.lease", "1s", "--max_runs", "64", "--limits.chunk_bytes", "16KiB"]
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(Daemon(tmp_path, *flags))
        prometheus = stack.enter_context(Prometheus(tmp_path, daemon.ops, None, rules))
        stays, goes = stack.enter_context(trainers(daemon.server))
        assert [stays.stdout.readline(), goes.stdout.readline()] == ["calm\n", "ready\n"]
        prometheus.until('ballast_steps_applied_total{run_id="finished"} == 3')
        prometheus.until('ballast_run_ranks{run_id="pair"} == 2')
        send_two_chunks_of_one(daemon.server, stubs, prometheus)
        do_harm(stays, goes)
        check_fired(prometheus)

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
