"""`ballastd --check-config` fails where a start would, or what is to come later: it looks at what the configuration names."""

import os
import subprocess
from itertools import takewhile
from pathlib import Path
from tempfile import gettempdir

import pytest
from daemon import BALLASTD, Daemon, plain_environment
from pki import Pki

NOBODY = 65534


def checked(*flags, user: int = 0) -> subprocess.CompletedProcess:
    command = [BALLASTD, "--check-config", *flags]
    if user:
        command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=plain_environment())


def said(*flags, user: int = 0) -> str:
    told = checked(*flags, user=user)
    assert told.returncode == 64 and told.stdout == "", told
    return told.stderr


def test_a_folder_for_storage_must_be_there(tmp_path):
    missing = tmp_path / "none"
    assert (
        f"--storage.dir: cannot list {missing}: " in (text := said(f"--storage.dir={missing}")) and "make it" in text
    ), text
    missing.write_text("")
    assert "it must be a folder" in said(f"--storage.dir={missing}")
    missing.unlink()
    missing.mkdir()
    assert checked(f"--storage.dir={missing}").returncode == 0
    assert list(missing.iterdir()) == [], "nothing is made there"


def test_the_folder_of_a_daemon_that_runs_is_right(tmp_path):
    with Daemon(tmp_path, "--storage.dir", str(tmp_path)) as daemon:
        assert daemon.status("/readyz") == 200
        assert checked(f"--storage.dir={tmp_path}").returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="looks as another user")
def test_a_folder_that_the_user_cannot_write_to_is_refused(tmp_path):
    for folder in takewhile(lambda one: one != Path(gettempdir()), (tmp_path, *tmp_path.parents)):
        folder.chmod(0o755)
    text = said(f"--storage.dir={tmp_path}", user=NOBODY)
    assert f"--storage.dir: {tmp_path} cannot be written to: Permission denied; it must be one that" in text, text
    os.chown(tmp_path, NOBODY, NOBODY)
    assert checked(f"--storage.dir={tmp_path}", user=NOBODY).returncode == 0
    (tmp_path / "runs").mkdir(mode=0o755)  # root's, as a daemon that was started as root leaves it
    assert f"{tmp_path}/runs cannot be written to" in said(f"--storage.dir={tmp_path}", user=NOBODY)


def test_the_program_and_the_folder_that_storage_names_are_looked_for(tmp_path):
    flags = [f"--storage.dir={tmp_path}"]
    assert "--storage.on_published: " in said(*flags, "--storage.on_published=/none/rclone,{folder}")
    assert "--storage.import_dir: " in said(*flags, "--storage.import_dir=/none/restore")


def test_the_files_of_a_relay_are_read(tmp_path):
    pki = Pki(tmp_path / "pki")
    token = tmp_path / "token"
    files = {"ca": "ca.crt", "certificate": "trainer.crt", "key": "trainer.key"}
    flags = {key: f"--relay.{key}={pki / name}" for key, name in files.items()} | {
        "token_file": f"--relay.token_file={token}"
    }
    relay = ["--relay.upstream=node7:7700", "--relay.runs=r"]
    assert f"--relay.token_file: {token}: cannot be read" in said(*relay, *flags.values())
    token.write_text("x" * 40)
    token.chmod(0o600)
    assert checked(*relay, *flags.values()).returncode == 0
    for key, file in files.items():
        flags |= {key: f"--relay.{key}={tmp_path / 'none'}"}
        assert f"--relay.{key}: {tmp_path / 'none'}: cannot be read" in said(*relay, *flags.values())
        flags |= {key: f"--relay.{key}={pki / file}"}
    flags["certificate"] = f"--relay.certificate={pki / 'daemon.crt'}"
    flags["key"] = f"--relay.key={pki / 'daemon.key'}"
    assert "--relay.certificate: " in (text := said(*relay, *flags.values())) and "was the daemon's named" in text, text
