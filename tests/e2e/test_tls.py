"""TLS through the doors that people take: certificates, the daemon, trainers, ballastctl, HTTPS, rotation, and mistakes."""

import os
import re
import subprocess
import threading
import urllib.error
import urllib.request
from datetime import timedelta

import pytest
from daemon import BALLASTCTL, BALLASTD, Daemon, plain_environment, until
from pki import Pki
from warm_python import WarmPython

DAY = timedelta(days=1)
TOKEN = "0123456789abcdef0123"

# Trains until its standard input ends, three steps at least, and says the number of each step.
TRAINER = """
import sys, threading, torch, ballast
server, run, transport, *files = sys.argv[1:]
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
options = {"tls": ballast.Tls(*files)} if files else {}
with ballast.AdamW(model.named_parameters(), lr=1e-2, server=server, run=run, transport=transport, **options) as opt:
    while not over.is_set() or opt.last_result is None or opt.last_result.step < 3:
        model(torch.ones(8, 64)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        assert opt.last_result.outcome == "APPLIED", opt.last_result
        print(opt.last_result.step, flush=True)
"""


class Trainer:
    """A process, whose steps are counted as it says them."""

    def __init__(
        self, server: str, run: str, transport: str = "grpc", variables: dict[str, str] | None = None, files=()
    ):
        self.steps = 0
        self._process = WarmPython(
            ["-c", TRAINER, server, run, transport, *map(str, files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=plain_environment() | (variables or {}),
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self.steps = int(line)

    def train_on(self) -> None:
        """Waits until it has made some more steps."""
        wanted = self.steps + 3
        until("it trains", lambda: self.steps >= wanted or self._process.poll() is not None, 120)
        assert self._process.poll() is None, self._process.stderr.read()

    def end(self) -> str:
        """What it wrote to stderr."""
        self._process.stdin.close()
        said = self._process.stderr.read()
        assert self._process.wait(120) == 0, said
        return said

    def fail(self) -> str:
        """The same, of one that cannot train."""
        said = self._process.stderr.read()
        assert self._process.wait(120) != 0, said
        return said


@pytest.fixture
def pki(tmp_path):
    return Pki(tmp_path / "pki")


@pytest.fixture
def daemon(tmp_path, pki):
    flags = [*pki.flags, "--shm_socket", f"{tmp_path}/shared/"]
    with Daemon(tmp_path, *flags, clients=pki.variables) as running:
        yield running


def reloads(daemon: Daemon) -> tuple[int, int]:
    """How many times new files were taken, and were not right."""
    _, text = daemon.get("/metrics")
    return tuple(
        int(re.search(rf'^ballast_tls_reloads_total{{result="{result}"}} (\d+)$', text, re.MULTILINE)[1])
        for result in ("success", "failed")
    )


# --- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_a_trainer_with_a_certificate_trains(daemon, pki, transport):
    trainer = Trainer(daemon.server, "r1", transport, pki.variables)
    trainer.train_on()
    assert f"transport {transport}" in daemon.ctl("run", "r1").stdout
    trainer.end()
    attached = [line for line in daemon.log.read_text().splitlines() if '"event":"attached"' in line]
    assert len(attached) == 1 and '"identity":"spiffe://ballast/trainer"' in attached[0]


def test_the_files_may_be_named_by_the_option(daemon, pki):
    files = [pki / name for name in ("ca.crt", "trainer.crt", "trainer.key")]
    Trainer(daemon.server, "r1", files=files).end()


def test_a_trainer_without_a_certificate_is_told_what_to_give(daemon, pki):
    assert "BALLAST_TLS_CA" in Trainer(daemon.server, "r1").fail()
    said = Trainer(daemon.server, "r1", variables={"BALLAST_TLS_CA": str(pki / "ca.crt")}).fail()
    assert "it wants a client's certificate" in said and "BALLAST_TLS_KEY" in said
    (pki / "trainer.key").chmod(0o644)
    said = Trainer(daemon.server, "r1", variables=pki.variables).fail()
    assert f"{pki / 'trainer.key'}: others than its owner can read" in said and "chmod 600" in said


def test_a_process_with_a_daemon_of_its_own_needs_none_of_it(pki, tmp_path):
    """Its daemon is at a Unix socket, and inherits the variables."""
    variables = pki.variables | {"TMPDIR": str(tmp_path), "PATH": f"{BALLASTD.parent}:/usr/bin:/bin"}
    Trainer("local", "r1", "auto", variables).end()


# --- ballastctl and HTTP --------------------------------------------------------------------------------------------


def test_ballastctl_takes_variables_and_flags(daemon, pki):
    for command in ("status", "runs", "health", "doctor"):
        result = daemon.ctl(command)
        assert result.returncode == 0, result.stdout + result.stderr
    flags = ["--tls-ca", pki / "ca.crt", "--tls-certificate", pki / "trainer.crt", "--tls-key", pki / "trainer.key"]
    bare = [BALLASTCTL, "--server", daemon.server, "runs"]
    asked = [subprocess.run(c, capture_output=True, text=True, env=plain_environment()) for c in (bare, bare + flags)]
    assert asked[0].returncode == 69 and "it speaks TLS" in asked[0].stderr
    assert asked[1].returncode == 0, asked[1].stderr


def test_certs_init_prints_what_works(tmp_path, pki):
    lines = pki.said.split("(ballastd --config FILE):\n\n")[1].split("\n\n")[0]
    (tmp_path / "ballast.yaml").write_text(lines + "\nlisten: 0.0.0.0:0\n")
    command = [BALLASTD, "--check-config", "--config", tmp_path / "ballast.yaml"]
    checked = subprocess.run(command, capture_output=True, text=True, env=plain_environment())
    assert (checked.returncode, checked.stdout) == (0, "OK\n"), checked.stderr
    exports = dict(re.findall(r"^export (\w+)=(.*)$", pki.said, re.MULTILINE))
    assert exports == pki.variables


def test_the_http_port_has_tls_and_a_token(tmp_path, pki):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    flags = [*pki.flags, "--ops_http.tls", f"--ops_http.token_file={token}"]
    with Daemon(tmp_path, *flags, clients=pki.variables) as daemon:

        def status(path: str, authorization: str = "") -> int:
            request = urllib.request.Request(f"https://{daemon.ops}{path}")
            if authorization:
                request.add_header("Authorization", authorization)
            try:
                return urllib.request.urlopen(request, timeout=60, context=pki.trust()).status
            except urllib.error.HTTPError as error:
                assert error.code != 401 or "Bearer" in error.headers["WWW-Authenticate"]
                return error.code

        assert [status(path) for path in ("/livez", "/readyz")] == [200, 200]
        for path in ("/", "/metrics", "/api/v1/runs", "/runbook", "/nothing"):
            assert status(path) == 401, path
            assert status(path, "Bearer wrong") == 401, path
            assert status(path, f"Bearer {TOKEN}") == (404 if path == "/nothing" else 200), path
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"https://{daemon.ops}/livez", timeout=60)
        doctor = daemon.ctl("doctor").stdout
        assert f"https://{daemon.ops}/readyz is ready" in doctor, doctor
        assert TOKEN not in daemon.log.read_text()


# --- rotation -------------------------------------------------------------------------------------------------------


def test_a_pair_is_rotated_while_a_trainer_trains(daemon, pki, tmp_path):
    trainer = Trainer(daemon.server, "r1", variables=pki.variables)
    trainer.train_on()
    # Another authority: both are trusted first, then the pairs change, then the old one is taken out.
    other = Pki(tmp_path / "other")
    old = (pki / "ca.crt").read_text()
    both = tmp_path / "both.crt"
    both.write_text(old + (other / "ca.crt").read_text())
    pki.replace("ca.crt", both)
    until("both authorities are trusted", lambda: reloads(daemon)[0] == 1)
    pki.take("daemon", other)
    until("the new pair is in use", lambda: reloads(daemon)[0] == 2)
    assert daemon.ctl("runs").returncode == 0, "an old client's pair, which trusts both"
    pki.replace("ca.crt", other / "ca.crt")
    until("the old authority is gone", lambda: reloads(daemon)[0] == 3)
    refused = daemon.ctl("runs")
    assert refused.returncode == 69 and "it does not take" in refused.stderr, refused.stderr
    pki.take("trainer", other)
    assert daemon.ctl("runs").returncode == 0
    # A connection that was there goes on.
    trainer.train_on()
    trainer.end()
    assert reloads(daemon)[1] == 0


def test_a_bad_pair_changes_nothing(daemon, pki, tmp_path):
    trainer = Trainer(daemon.server, "r1", variables=pki.variables)
    trainer.train_on()
    pki.replace("daemon.key", Pki(tmp_path / "other") / "daemon.key")
    until("the new key is refused", lambda: reloads(daemon) == (0, 1))
    assert daemon.ctl("runs").returncode == 0
    trainer.train_on()
    trainer.end()
    [said] = [line for line in daemon.log.read_text().splitlines() if '"event":"tls_reload"' in line]
    assert '"level":"error"' in said and f"{pki / 'daemon.key'}: is the key of another certificate" in said


# --- mistakes -------------------------------------------------------------------------------------------------------


def expire(pki: Pki) -> None:
    pki.issue("daemon", -2 * DAY, -DAY)


def postdate(pki: Pki) -> None:
    pki.issue("daemon", DAY, 2 * DAY)


def mix(pki: Pki) -> None:
    pki.replace("daemon.key", pki / "trainer.key")


def swap(pki: Pki) -> None:
    for suffix in ("crt", "key"):
        pki.replace(f"daemon.{suffix}", pki / f"trainer.{suffix}")


MISTAKES = [
    (expire, "tls.certificate", "daemon.crt", "expired at"),
    (postdate, "tls.certificate", "daemon.crt", "is not yet valid"),
    (mix, "tls.key", "daemon.key", "is the key of another certificate"),
    (lambda pki: (pki / "daemon.key").chmod(0o644), "tls.key", "daemon.key", "chmod 600"),
    (lambda pki: (pki / "daemon.key").unlink(), "tls.key", "daemon.key", "cannot be read"),
    (swap, "tls.certificate", "daemon.crt", "no certificate for a daemon"),
    (
        lambda pki: pki.replace("ca.crt", pki / "daemon.crt"),
        "tls.client_ca",
        "ca.crt",
        "is not the certificate of an authority",
    ),
    (lambda pki: (pki / "ca.crt").write_text("none"), "tls.client_ca", "ca.crt", "holds no certificate"),
]


@pytest.mark.parametrize(("err", "key", "file", "says"), MISTAKES)
@pytest.mark.parametrize("action", [["--check-config"], ["--ops_http.listen=off", "--shm_socket=off"]])
def test_what_is_wrong_with_a_file_is_said_before_anything_starts(pki, err, key, file, says, action):
    err(pki)
    command = [BALLASTD, "--listen=127.0.0.1:0", "--device=cpu", *pki.flags, *action]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=plain_environment())
    assert result.returncode in (64, 78), result
    assert f"--{key}: {pki / file}: " in result.stderr and says in result.stderr, result.stderr
    assert "PRIVATE" not in result.stderr


def test_in_a_file_that_holds_both_it_is_said_which_of_them_is_wrong(pki):
    pki.issue("daemon", -2 * DAY, -DAY)
    both = pki / "both.pem"
    both.write_text((pki / "daemon.crt").read_text() + (pki / "daemon.key").read_text())
    command = [BALLASTD, "--listen=127.0.0.1:0", "--check-config", f"--tls.client_ca={pki / 'ca.crt'}"]
    command += [f"--tls.certificate={both}", f"--tls.key={both}"]
    for mode, said in ((0o600, f"--tls.certificate: {both}: expired at"), (0o644, f"--tls.key: {both}: others than")):
        both.chmod(mode)
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, env=plain_environment())
        assert told.returncode == 64 and said in told.stderr, told.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a file of root's")
def test_roots_key_for_the_daemons_group_is_not_to_be_closed_to_it(pki):
    """As deploy/systemd/ballastd.service has it: only who looks as root is refused."""
    pki.folder.chmod(0o755)
    (pki / "daemon.key").chmod(0o640)
    os.chown(pki / "daemon.key", 0, 65534)
    command = [BALLASTD, "--listen=127.0.0.1:0", "--check-config", *pki.flags]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, env=plain_environment())
    assert refused.returncode == 64 and "look as that user, or chmod 600" in refused.stderr, refused.stderr


def test_a_client_names_its_own_file(daemon, pki):
    pki.issue("trainer", -2 * DAY, -DAY)
    said = daemon.ctl("runs")
    assert said.returncode == 1 and f"{pki / 'trainer.crt'}: expired at" in said.stderr, said.stderr


def test_a_port_that_others_reach_wants_tls_or_a_word():
    command = [BALLASTD, "--listen=0.0.0.0:0", "--check-config"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, env=plain_environment())
    assert refused.returncode == 64
    for way in ("configure tls", "127.0.0.1", "insecure: true"):
        assert way in refused.stderr, refused.stderr
    assert subprocess.run([*command, "--insecure"], timeout=60, env=plain_environment()).returncode == 0
