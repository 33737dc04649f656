"""Who may do what, as an operator gives it out: tokens made by ballastctl, grants in a file, trainers that bring them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import warm_python
from daemon import BALLASTCTL, BALLASTD, Daemon, Daemons, plain_environment, until
from pki import Pki

TRAINER = """
import sys, torch, ballast
torch.manual_seed(0)
w = torch.nn.Parameter(torch.randn(20_000))
opt = ballast.AdamW([("w", w)], lr=1e-3, server=sys.argv[1], run=sys.argv[2], transport=sys.argv[3], reconnect_timeout=2)
for step in range(int(sys.argv[4])):
    (w * w).sum().backward()
    opt.step()
    print(step, flush=True)
    if step == 2 and len(sys.argv) > 5:
        sys.stdin.readline()
"""


class Operator:
    """A daemon with an access file, and the tokens given out."""

    def __init__(self, folder: Path):
        self.folder, self.file, self.grants = folder, folder / "access.yaml", {}

    def give(self, name: str, runs: str, scope: str) -> Path:
        """The token's file; the grant is in the access file from then on."""
        token = self.folder / f"{name}.token"
        made = subprocess.run(
            [BALLASTCTL, "token", "new", "--out", token, "--name", name, "--run", runs, "--scope", scope],
            capture_output=True,
            text=True,
            env=plain_environment(),
        )
        assert made.returncode == 0, made.stderr
        assert token.stat().st_mode & 0o777 == 0o600
        assert token.read_text().strip() not in made.stdout
        self.grants[name] = made.stdout[made.stdout.index("- name:") :]
        self.write()
        return token

    def write(self) -> None:
        following = self.file.with_suffix(".next")
        following.write_text("grants:\n" + "".join(self.grants.values()))
        following.chmod(0o644)
        following.rename(self.file)


@pytest.fixture
def operator(tmp_path):
    return Operator(tmp_path)


@pytest.fixture
def daemon(tmp_path, operator):
    operator.give("operator", "*", "admin")
    with Daemon(
        tmp_path, "--listen", f"unix:{tmp_path}/grpc", "--access", str(operator.file), "--shm_socket", f"{tmp_path}/s/"
    ) as running:
        yield running


def train(
    daemon, token: Path | None, run: str, transport: str = "auto", variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    environment = plain_environment() | (variables or {}) | ({"BALLAST_TOKEN_FILE": str(token)} if token else {})
    return warm_python.run(["-c", TRAINER, daemon.server, run, transport, "3"], env=environment, timeout=120)


def ctl(daemon, token: Path | None, *arguments: str) -> subprocess.CompletedProcess:
    environment = plain_environment() | ({"BALLAST_TOKEN_FILE": str(token)} if token else {})
    return subprocess.run(
        [BALLASTCTL, "--server", daemon.server, *arguments], capture_output=True, text=True, env=environment, timeout=60
    )


def reloads(daemon, result: str) -> int:
    found = re.search(rf'ballast_access_reloads_total{{result="{result}"}} (\d+)', daemon.get("/metrics")[1])
    return int(found[1])


def take_in(daemon, change) -> None:
    """Until the daemon uses the access file as `change` leaves it."""
    before = reloads(daemon, "success")
    change()
    until("the access file is read", lambda: reloads(daemon, "success") > before)


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_a_trainer_with_a_token_trains_its_runs_and_no_other(daemon, operator, transport):
    take_in(daemon, lambda: operator.give("team-a", "team-a-*", "push"))
    token = operator.folder / "team-a.token"
    done = train(daemon, token, "team-a-1", transport)
    assert done.returncode == 0, done.stderr
    other = train(daemon, token, "team-b-1", transport)
    assert other.returncode != 0
    assert "grant 'team-a' gives push on team-a-*; this call wants push on run 'team-b-1'" in other.stderr
    stranger = train(daemon, None, "team-a-1", transport)
    assert stranger.returncode != 0
    assert "wants a token" in stranger.stderr and "BALLAST_TOKEN_FILE" in stranger.stderr
    assert token.read_text().strip() not in daemon.log.read_text()


def test_who_brings_no_token_is_told_so_by_every_command(daemon):
    for command in ("status", "doctor"):
        said = ctl(daemon, None, command)
        assert said.returncode == 1 and "the daemon wants a token" in said.stdout + said.stderr, said
    assert "OK    reachable" in said.stdout and "--token-file or BALLAST_TOKEN_FILE" in said.stdout, said.stdout


def test_a_dashboard_sees_and_does_not_touch(daemon, operator):
    take_in(daemon, lambda: operator.give("watcher", "shown", "observe"))
    watcher, admin = operator.folder / "watcher.token", operator.folder / "operator.token"
    for run in ("shown", "hidden"):
        assert train(daemon, admin, run).returncode == 0
    listed = ctl(daemon, watcher, "runs").stdout
    assert "shown" in listed and "hidden" not in listed
    assert ctl(daemon, watcher, "run", "shown").returncode == 0
    refused = ctl(daemon, watcher, "delete", "shown")
    assert refused.returncode == 1 and "wants admin on run 'shown'" in refused.stderr
    unseen = ctl(daemon, watcher, "run", "hidden")
    assert unseen.returncode == 1
    assert unseen.stderr == ctl(daemon, watcher, "run", "nosuch").stderr.replace("nosuch", "hidden")
    assert ctl(daemon, admin, "delete", "shown").returncode == 0
    audited = [line for line in daemon.log.read_text().splitlines() if '"audit"' in line]
    assert len(audited) == 1 and '"grant":"operator"' in audited[0] and '"method":"DeleteRun"' in audited[0]


FOLLOWED_TRAINER = """
import sys, torch, ballast
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
with ballast.AdamW(model.named_parameters(), lr=1e-3, server=sys.argv[1], run="parts", follow=True) as opt:
    for step in range(3):
        model(torch.ones(8, 40)).square().mean().backward()
        opt.step()
"""


def test_a_reader_brings_its_token_to_each_daemon(tmp_path, operator):
    trainer, reader = operator.give("trainer", "parts", "push"), operator.give("reader", "parts", "pull")
    watcher = operator.give("watcher", "parts", "observe")
    flags = ["--listen", "unix:{folder}/grpc", "--access", str(operator.file), "--shm_socket", "off"]
    with Daemons(tmp_path, 2, *flags) as daemons:
        environment = plain_environment() | {"BALLAST_TOKEN_FILE": str(trainer)}
        done = warm_python.run(["-c", FOLLOWED_TRAINER, daemons.server], env=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        follow = ["follow", "parts", "--versions", "1", "--out", str(tmp_path / "read")]
        read = ctl(daemons, reader, *follow)
        assert read.returncode == 0, read.stderr
        assert [file.name for file in (tmp_path / "read").iterdir()] == ["step-3.safetensors"]
        refused = ctl(daemons, watcher, *follow)
        assert refused.returncode == 1 and "wants pull on run 'parts'" in refused.stderr
        assert "grant 'watcher' gives observe" in refused.stderr


def test_a_token_is_replaced_while_its_trainer_goes_on(daemon, operator):
    take_in(daemon, lambda: operator.give("old", "team-a-*", "push"))
    trainer = warm_python.WarmPython(
        ["-c", TRAINER, daemon.server, "team-a-1", "grpc", "6", "waits"],
        env=plain_environment() | {"BALLAST_TOKEN_FILE": str(operator.folder / "old.token")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(3):
        assert trainer.stdout.readline(), trainer.stderr.read()
    take_in(daemon, lambda: operator.give("new", "team-a-*", "push"))
    assert train(daemon, operator.folder / "new.token", "team-a-2").returncode == 0
    assert train(daemon, operator.folder / "old.token", "team-a-3").returncode == 0
    del operator.grants["old"]
    take_in(daemon, operator.write)
    refused = train(daemon, operator.folder / "old.token", "team-a-4")
    assert "does not know this token" in refused.stderr
    _, said = trainer.communicate("go on\n", timeout=60)
    assert trainer.returncode == 0, said


def test_an_access_file_that_is_not_right_changes_nothing(daemon, operator):
    operator.file.write_text("grants:\n- {name: a, scope: all}\n")
    until("the file is judged", lambda: reloads(daemon, "failed") > 0)
    assert ctl(daemon, operator.folder / "operator.token", "runs").returncode == 0
    assert "access.yaml:2" in daemon.log.read_text()


def test_a_token_that_others_can_read_is_not_sent(daemon, operator):
    token = operator.folder / "operator.token"
    token.chmod(0o644)
    refused = ctl(daemon, token, "runs")
    assert refused.returncode == 1 and "operator.token" in refused.stderr and "chmod 600" in refused.stderr


def test_a_restore_tells_nothing_of_the_checkpoints_of_others(tmp_path, operator):
    admin, token = operator.give("operator", "*", "admin"), operator.give("own", "own-*", "admin")
    for folder in ("storage", "import"):
        (tmp_path / folder).mkdir()
    places = ("--storage.dir", f"{tmp_path}/storage", "--storage.import_dir", f"{tmp_path}/import")
    unix = ("--listen", f"unix:{tmp_path}/grpc", "--access", str(operator.file))
    with Daemon(tmp_path, *unix, *places) as daemon:
        assert train(daemon, admin, "secret").returncode == 0
        assert ctl(daemon, admin, "checkpoint", "secret").returncode == 0
        shutil.copytree(tmp_path / "storage" / "runs" / "secret", tmp_path / "import" / "secret")
        (tmp_path / "import" / "empty").mkdir()
        told = [
            ctl(daemon, token, "restore", "own-1", "--from", f"{tmp_path}/import/{name}").stderr.replace(name, "NAME")
            for name in ("secret", "empty", "none")
        ]
        assert "no checkpoint of run 'own-1'" in told[0] and told[0] == told[1] == told[2]
        restored = ctl(daemon, admin, "restore", "secret", "--from", f"{tmp_path}/import/secret")
        assert restored.returncode == 0, restored.stderr


def test_over_tls_a_certificate_may_be_what_a_grant_is_for(tmp_path, operator):
    pki = Pki(tmp_path / "pki")
    operator.grants["trainers"] = (
        "- name: trainers\n  identity: spiffe://ballast/trainer\n  runs: ['a-*']\n  scope: push\n"
    )
    token = operator.give("b", "b", "push")
    with Daemon(tmp_path, *pki.flags, "--access", str(operator.file)) as daemon:
        by_certificate = train(daemon, None, "a-1", "grpc", pki.variables)
        assert by_certificate.returncode == 0, by_certificate.stderr
        refused = train(daemon, None, "b", "grpc", pki.variables)
        assert "grant 'trainers' gives push on a-*; this call wants push on run 'b'" in refused.stderr
        with_token = train(daemon, token, "b", "grpc", pki.variables)
        assert with_token.returncode == 0, with_token.stderr


def test_a_token_does_not_go_over_a_plain_port(tmp_path, operator):
    token = operator.give("a", "*", "push")
    with Daemon(tmp_path) as plain:
        refused = train(plain, token, "r")
        assert refused.returncode != 0 and "over TLS or a Unix socket alone" in refused.stderr


def check(folder: Path, *flags: str) -> str:
    command = [BALLASTD, "--check-config", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=plain_environment())
    assert done.returncode != 0
    return done.stderr


def test_the_configuration_is_checked(tmp_path, operator):
    operator.give("a", "*", "push")
    assert "over TLS or a Unix socket alone" in check(tmp_path, "--access", str(operator.file))
    unix = ("--listen", f"unix:{tmp_path}/grpc")
    assert "no absolute path" in check(tmp_path, *unix, "--access", "access.yaml")
    assert f"{tmp_path}/none: cannot be read" in check(tmp_path, *unix, "--access", f"{tmp_path}/none")
    operator.file.write_text("grants: none\n")
    assert "access.yaml:1: wanted the one key 'grants'" in check(tmp_path, *unix, "--access", str(operator.file))
