"""The programs as people run them: a real daemon, the C++ and the Python trainer, scrapes, signals, mistakes."""

import re
import shutil
import signal
import subprocess
import sys

import pytest
from daemon import BALLASTCTL, BALLASTD, EXAMPLE, ROOT, Daemon, plain_environment, until


def run(*command, seconds=120, **more):
    command = [str(part) for part in command]
    more.setdefault("env", plain_environment())
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, **more)


def metric(text: str, name: str, **labels) -> float:
    """The value of one series of an exposition."""
    for line in text.splitlines():
        match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
            return float(match[2])
    raise AssertionError(f"no series {name} {labels} in\n{text}")


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path) as running:
        yield running


# --- training -------------------------------------------------------------------------------------------------------


def test_the_cpp_example_trains(daemon):
    result = run(EXAMPLE, daemon.server)
    assert result.returncode == 0, result.stdout + result.stderr
    _, metrics = daemon.get("/metrics")
    applied = [line for line in metrics.splitlines() if line.startswith("ballast_steps_applied_total{")]
    assert applied and float(applied[0].split()[-1]) > 0, result.stdout


PYTHON_TRAINER = """
import sys, torch, ballast
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
x = torch.randn(256, 16)
y = x[:, :4].sum(1, keepdim=True).sin()
opt = ballast.AdamW(model.named_parameters(), lr=1e-2, server=sys.argv[1], run="py")
losses = []
for _ in range(60):
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    assert not any(p.grad.nbytes and type(p.grad) is torch.Tensor for p in model.parameters())  # they have left
    opt.step(loss=loss)
    opt.zero_grad()
    losses.append(loss.item())
print(losses[0], losses[-1])
assert losses[-1] < losses[0] / 3, losses
"""


def test_python_trains_and_is_measured(daemon):
    result = run(sys.executable, "-c", PYTHON_TRAINER, daemon.server)
    assert result.returncode == 0, result.stdout + result.stderr
    _, metrics = daemon.get("/metrics")
    assert metric(metrics, "ballast_steps_applied_total", run_id="py") == 60
    assert metric(metrics, "ballast_step", run_id="py") == 60
    assert metric(metrics, "ballast_loss", run_id="py") == pytest.approx(float(result.stdout.split()[-1]), rel=1e-5)
    received = [
        metric(metrics, "ballast_received_bytes_total", run_id="py", transport=transport)
        for transport in ("grpc", "shm")
    ]
    assert sum(received) == 60 * 4 * (16 * 64 + 64 + 64 + 1)
    runs = daemon.ctl("runs")
    assert runs.returncode == 0 and re.search(r"\bpy\b", runs.stdout), runs.stdout + runs.stderr


def test_the_quick_starts_model_trains(daemon, tmp_path):
    if not shutil.which("bible"):
        pytest.skip("the text is missing: package bible-kjv")
    figures = tmp_path / "figures.json"
    script = ROOT / "client" / "python" / "examples" / "king_james.py"
    result = run(sys.executable, script, "--steps", 5, "--server", daemon.server, "--json", figures, seconds=120)
    assert result.returncode == 0, result.stderr
    assert '"steps_applied": 5' in figures.read_text()


# --- what operators see ---------------------------------------------------------------------------------------------


def test_promtool_accepts_the_metrics(daemon):
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed (package prometheus)")
    assert run(sys.executable, "-c", PYTHON_TRAINER, daemon.server).returncode == 0
    result = run("promtool", "check", "metrics", input=daemon.get("/metrics")[1])
    assert result.returncode == 0, result.stdout + result.stderr


def test_health(daemon):
    assert daemon.status("/livez") == 200
    assert daemon.status("/readyz") == 200
    assert daemon.status("/nothing-here") == 404
    assert daemon.ctl("health").returncode == 0


def test_health_at_a_socket_whose_path_has_a_space(tmp_path):
    with Daemon(tmp_path, "--listen", f"unix:{tmp_path}/a b") as daemon:
        answer = daemon.ctl("health")
        assert (answer.returncode, answer.stdout) == (0, "SERVING\n"), answer.stderr


def test_a_plan_counts_what_a_journal_writes(tmp_path):
    (tmp_path / "storage").mkdir()
    with Daemon(tmp_path, "--storage.dir", str(tmp_path / "storage")) as daemon:
        plain, journaled = (daemon.ctl("plan", "--parameters", "1e6", *flags).stdout for flags in ((), ("--journal",)))
        assert "journal" not in plain and re.search(r"journal, a step +2,000,000", journaled), journaled


def test_sigterm_drains_and_exits_0(tmp_path):
    with Daemon(tmp_path, "--drain_timeout", "1h") as daemon:  # nothing is open: it is not waited for
        assert daemon.stop() == 0, daemon.log.read_text()
        assert daemon.ctl("health").returncode != 0


def test_the_metrics_table_is_current():
    described = run(BALLASTD, "--describe-metrics")
    assert described.returncode == 0, described.stderr
    assert described.stdout == (ROOT / "server" / "metrics" / "METRICS.md").read_text()


# --- mistakes -------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_named(daemon):
    result = run(BALLASTD, "--listen", daemon.server, "--ops_http.listen", "off")
    assert result.returncode != 0
    assert daemon.server.split(":")[1] in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("listen: 127.0.0.1:7700\nmax_rums: 3\n", 2, "max_runs"),
        ("limits:\n  lease: 10s\n  credit_bytes: lots\n", 3, "credit_bytes"),
        ("listen: [unclosed\n", None, ""),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path, text, line, word):
    file = tmp_path / "ballast.yaml"
    file.write_text(text)
    for flags in (["--check-config"], []):
        result = run(BALLASTD, "--config", file, *flags)
        assert result.returncode == 78, result.stderr
        assert word in result.stderr
        assert line is None or f"ballast.yaml:{line}" in result.stderr, result.stderr


def test_check_config_accepts_what_print_config_prints(tmp_path):
    printed = run(BALLASTD, "--print-config", "--limits.lease", "7s")
    assert printed.returncode == 0, printed.stderr
    file = tmp_path / "ballast.yaml"
    file.write_text(printed.stdout)
    checked = run(BALLASTD, "--check-config", "--config", file)
    assert checked.returncode == 0, checked.stderr
    assert "7s" in printed.stdout


def test_a_daemon_of_a_trainers_own_has_to_be_named():
    """`local` is a server for a trainer alone."""
    environment = plain_environment() | {"BALLAST_SERVER": "local"}
    for words in (["runs"], ["follow", "r", "--out", "nowhere"]):
        refused = subprocess.run([BALLASTCTL, *words], capture_output=True, text=True, timeout=60, env=environment)
        assert refused.returncode == 1 and "stderr names, by --server" in refused.stderr, refused.stderr


def test_an_unknown_flag_is_named():
    result = run(BALLASTD, "--no-such-flag")
    assert result.returncode != 0 and "no-such-flag" in result.stderr


# --- the quick start ------------------------------------------------------------------------------------------------


def descendants_of_session(session: int) -> list[str]:
    listed = run("ps", "-o", "pid=,args=", "-s", str(session)).stdout
    return [line for line in listed.splitlines() if line.strip()]


def test_the_quick_start_names_a_bad_flag():
    result = run(ROOT / "deploy" / "quickstart.sh", "--stepz")
    assert result.returncode == 2 and "--stepz" in result.stderr


def last_results() -> dict[str, int]:
    """When each file of the user's own last quick start was written."""
    folder = ROOT / "build" / "quickstart"
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")} if folder.exists() else {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_quick_start_leaves_nothing(number, tmp_path):
    before = last_results()
    log = tmp_path / "logs" / "ballastd.log"
    with subprocess.Popen(
        [ROOT / "deploy" / "quickstart.sh", "--steps", "1000000", "--results", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=plain_environment(),
        # A shell ignores Ctrl-C in what it runs in the background, and so would the quick start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as quickstart:
        for line in quickstart.stdout:
            if line.startswith("training, "):
                break
        until("the trainer is at work", lambda: '"event":"stream"' in log.read_text(), 120)
        assert any("ballastd" in process for process in descendants_of_session(quickstart.pid))
        quickstart.send_signal(number)
        assert quickstart.wait(60) == 130
    assert descendants_of_session(quickstart.pid) == []
    assert last_results() == before
