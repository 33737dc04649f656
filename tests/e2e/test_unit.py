"""deploy/systemd: the unit locks what it can, and the daemon works under what it forbids its calls.

There is no systemd to start it here: unit_sandbox.py lays the unit's filters on the daemon, and the rest, which files, devices
and users there are for it, is not tried by these tests.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python
from daemon import BALLASTD, ROOT, Daemon, plain_environment, until
from pki import Pki
from unit_sandbox import allowed_calls, settings

UNITS = ROOT / "deploy" / "systemd"
UNIT = UNITS / "ballastd.service"
SANDBOX = [sys.executable, Path(__file__).with_name("unit_sandbox.py"), UNIT, "--"]

TRAINER = """
import sys, torch, ballast
torch.set_num_threads(1)
options = dict(server=sys.argv[1], gradient_accumulation_steps=1)
makes = {"shared": (ballast.Muon, "auto", "checkpoint"), "remote": (ballast.AdamW, "grpc", "journal_sync")}
for run, (kind, transport, durability) in makes.items():
    torch.manual_seed(0)
    w = torch.nn.Parameter(torch.randn(256, 512))
    opt = kind([("w", w)], lr=1e-3, run=run, transport=transport, durability=durability, snapshots=1,
               weights=sys.argv[2] or None, **options)
    for _ in range(3):
        (w * w).sum().backward()
        opt.step()
    opt.close()
print("trained")
"""


@pytest.fixture(scope="module", autouse=True)
def _systemd_analyze():
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed (package systemd): the unit was not looked at")


def assembled(folder: Path, *drop_ins: str, without: str = "") -> Path:
    """The unit as systemd puts it together; its program is the one that was built. `without`: lines to leave out."""
    text = "\n[Service]\n".join((UNITS / name).read_text() for name in (UNIT.name, *drop_ins))
    text = text.replace("/usr/local/bin/ballastd", str(BALLASTD))
    file = folder / UNIT.name
    file.write_text(re.sub(without, "", text, flags=re.MULTILINE) if without else text)
    return file


def exposure(unit: Path) -> float:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", unit]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", told.stdout)
    assert found, told.stdout + told.stderr
    return float(found[1])


@pytest.mark.parametrize("drop_ins", [[], ["gpu.conf"]], ids=["processors", "GPUs"])
def test_it_is_exposed_to_little(drop_ins, tmp_path):
    assert exposure(assembled(tmp_path, *drop_ins)) <= 2.0


def test_an_open_unit_would_be_found(tmp_path):
    lines = r"^(System|Restrict|Protect|Private|Capability|User|Lock|Memory).*$"
    assert exposure(assembled(tmp_path, without=lines)) > 5


@pytest.mark.skipif(not BALLASTD.exists(), reason="needs a built daemon")
@pytest.mark.parametrize("drop_ins", [[], ["gpu.conf"]], ids=["processors", "GPUs"])
def test_systemd_knows_every_setting(drop_ins, tmp_path):
    """One that it does not know it leaves out, with a warning."""

    def said(unit: Path) -> str:
        command = ["systemd-analyze", "verify", "--man=no", unit]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return "\n".join(line for line in told.stderr.splitlines() if UNIT.name in line)

    assert said(assembled(tmp_path, *drop_ins)) == ""
    assert "Unknown key 'ProtectSyste'" in said(assembled(tmp_path, *drop_ins, without="m(?==strict)"))


def test_a_start_has_as_long_as_its_runs_take_to_be_read_back():
    """systemd's own limit, 90 s until READY=1, ends a daemon that reads longer, and each that is started after it."""
    assert settings([UNIT])["TimeoutStartSec"] == ["infinity"]


STORED = "storage: {dir: /srv/other}\n"
RELAYED = "relay: {upstream: 'trainer:7700', runs: [run-1]}\n"


@pytest.mark.skipif(not BALLASTD.exists(), reason="needs a built daemon")
@pytest.mark.parametrize(
    ("file", "drop_in", "folder"),
    [
        ("", "", "/var/lib/ballast"),
        (STORED, "", "/var/lib/ballast"),
        (STORED, "Environment=BALLAST_STORAGE_DIR=/srv/ballast\n", "/srv/ballast"),
        (RELAYED, "Environment=BALLAST_STORAGE_DIR=off\n", "off"),
    ],
    ids=["nothing said", "another folder in the file", "another folder", "a relay"],
)
def test_a_drop_in_says_where_storage_is(file, drop_in, folder, tmp_path):
    """And what is checked before the start is what is started. The folders are there: systemd makes its own first."""
    if folder != "off":
        there = tmp_path / folder.lstrip("/")
        there.mkdir(parents=True)
    (tmp_path / "ballast.yaml").write_text(file)
    (tmp_path / "drop-in.conf").write_text(drop_in)
    unit = settings([UNIT, tmp_path / "drop-in.conf"])
    given = dict(line.split("=", 1) for line in unit["Environment"])
    assert given["BALLAST_STORAGE_DIR"] == folder
    if folder != "off":
        given["BALLAST_STORAGE_DIR"] = folder = str(there)
    environment = plain_environment() | given
    check, start = (
        [BALLASTD, *line.replace("/etc/ballast.yaml", str(tmp_path / "ballast.yaml")).split()[1:]]
        for line in (*unit["ExecStartPre"], *unit["ExecStart"])
    )
    for command in (check, [*start, "--print-config"]):
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
        assert told.returncode == 0, told.stderr
    assert f'\n  dir: "{folder}"\n' in told.stdout


def test_the_user_is_made(tmp_path):
    if not shutil.which("systemd-sysusers"):
        pytest.skip("systemd-sysusers is not installed: the user was not made")
    (tmp_path / "etc").mkdir()
    subprocess.run(["systemd-sysusers", f"--root={tmp_path}", UNITS / "ballast.conf"], check=True, timeout=60)
    [user] = [line for line in (tmp_path / "etc" / "passwd").read_text().splitlines() if line.startswith("ballast:")]
    assert user.split(":")[5:] == ["/var/lib/ballast", "/usr/sbin/nologin"]
    text = UNIT.read_text()
    assert "\nUser=ballast\n" in text and "\nGroup=ballast\n" in text and "\nStateDirectory=ballast\n" in text


# --- the daemon under the unit's filters ------------------------------------------------------------------------------


def train(daemon: Daemon, environment: dict[str, str], weights: str = "") -> None:
    words = ["-c", TRAINER, daemon.server, weights]
    told = warm_python.run(words, timeout=300, env=plain_environment() | environment)
    assert told.stdout == "trained\n", told.stderr + daemon.log.read_text()


def events(daemon: Daemon, name: str) -> list[dict]:
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("event") == name]


def copied(daemon: Daemon) -> float:
    pattern = r'^ballast_checkpoint_hooks_total\{[^}]*result="success"[^}]*\} (\S+)$'
    return sum(float(count) for count in re.findall(pattern, daemon.get("/metrics")[1], re.MULTILINE))


@pytest.mark.skipif(not BALLASTD.exists(), reason="needs a built daemon")
def test_the_daemon_needs_no_call_that_the_unit_forbids(tmp_path):
    """Both transports, TLS, matrix products, a journal, checkpoints and the command that copies them, the metrics, a drain,
    and runs that are read back."""
    pki = Pki(tmp_path / "pki")
    (tmp_path / "storage").mkdir()
    flags = [*pki.flags, "--shm_socket", f"{tmp_path}/shared/", "--storage.dir", str(tmp_path / "storage")]
    flags += ["--storage.on_published", "/bin/true,{folder}"]
    with Daemon(tmp_path, *flags, clients=pki.variables, launcher=SANDBOX) as daemon:
        train(daemon, pki.variables)
        assert daemon.get("/metrics")[0] == daemon.get("/livez")[0] == 200
        assert daemon.ctl("checkpoint", "shared").returncode == 0
        until("a checkpoint was copied", lambda: copied(daemon) > 0)
        assert {line["transport"] for line in events(daemon, "stream")} == {"grpc", "shm"}
        assert daemon.stop() == 0
    with Daemon(tmp_path, *flags, clients=pki.variables, launcher=SANDBOX) as daemon:
        train(daemon, pki.variables, weights="server")
        assert daemon.ctl("rewind", "remote", "--back", "1").returncode == 0
        assert daemon.stop() == 0


def test_calls_that_only_other_machines_see_are_allowed():
    """Those that the sources make by their numbers, and what pins threads where there are several memory nodes."""
    sources = [file for room in ("server", "proto") for file in (ROOT / room).rglob("*.cc")]
    named = {call for file in sources for call in re.findall(r"\bSYS_(\w+)", file.read_text())}
    allowed = allowed_calls(settings([UNIT])["SystemCallFilter"])
    assert "mbind" in named and named | {"sched_setaffinity"} <= allowed
    assert not allowed & {"mount", "setpriority", "ptrace", "bpf", "setuid", "reboot"}


FORBIDDEN = {
    "a mount": "import ctypes; ctypes.CDLL(None).mount(b'x', b'/mnt', b'tmpfs', 0, 0)",
    "a packet socket": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "memory to write code to": "import mmap; mmap.mmap(-1, 4096, prot=7)",
    "a user namespace": "import ctypes; ctypes.CDLL(None).syscall(56, 0x10000000, 0, 0, 0, 0)",
    "a higher priority": "import os; os.setpriority(os.PRIO_PROCESS, 0, 5)",
}


@pytest.mark.parametrize("program", [*FORBIDDEN.values(), "print()"], ids=[*FORBIDDEN, "nothing"])
def test_the_sandbox_ends_what_the_unit_forbids(program):
    told = subprocess.run([*SANDBOX, sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert told.returncode == (0 if program == "print()" else -31), told.stderr  # SIGSYS
