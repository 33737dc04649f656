"""The programs as processes: signals, standard descriptors, a log that nobody reads, disks that are full."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess

import pytest
from daemon import BALLASTCTL, BALLASTD, Daemon, plain_environment, until
from stepping import Trainer

NO_HTTP = ["--listen", "127.0.0.1:0", "--ops_http.listen", "off", "--device", "cpu", "--shm_socket", "off"]


def redirected(redirection: str) -> list[str]:
    return ["sh", "-c", f'exec "$0" "$@" {redirection}']


class Log:
    """A pipe for a daemon's log, which is read when the test says so."""

    def __init__(self, folder):
        self.path = folder / "log"
        os.mkfifo(self.path)
        self.end = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(self.end, fcntl.F_SETPIPE_SZ, 4096)

    def read(self) -> str:
        try:
            return os.read(self.end, 1 << 16).decode()
        except BlockingIOError:
            return ""

    def fill(self) -> None:
        writer = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            while True:
                os.write(writer, b"x")
        except BlockingIOError:
            os.close(writer)


# --- signals --------------------------------------------------------------------------------------------------------


def test_sighup_ends_nothing(tmp_path):
    with Daemon(tmp_path) as daemon, Trainer(daemon.server, "r") as trainer:
        trainer.step()
        daemon.process.send_signal(signal.SIGHUP)
        until("the log tells", lambda: "SIGHUP: configuration is read at the start" in daemon.log.read_text())
        assert trainer.step() == 2
        assert daemon.stop() == 0


def test_the_terminal_that_goes_drains_a_daemon_that_was_started_at_it(tmp_path):
    ours, theirs = pty.openpty()
    storage = tmp_path / "storage"
    storage.mkdir()
    # Also where the tests run under nohup, whose children ignore the signal.
    terminal = ["env", "--default-signal=HUP", *redirected(f"< {os.ttyname(theirs)}")]
    with Daemon(tmp_path, "--storage.dir", str(storage), launcher=terminal) as daemon:
        os.close(theirs)
        daemon.process.send_signal(signal.SIGHUP)
        until("the log tells", lambda: "SIGHUP: configuration is read" in daemon.log.read_text())
        assert daemon.status("/readyz") == 200
        os.close(ours)
        daemon.process.send_signal(signal.SIGHUP)
        assert daemon.process.wait(60) == 0
        assert "its terminal is gone" in daemon.log.read_text()


def test_the_logs_reader_may_go(tmp_path):
    log = Log(tmp_path)
    command = [*redirected(f"2> {log.path}"), BALLASTD, *NO_HTTP]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=plain_environment()) as process:
        try:
            server = re.search(r"grpc (\S+)", process.stdout.readline())[1]
            os.close(log.end)
            with Trainer(server, "r") as trainer:  # of which there are lines in the log
                assert trainer.step() == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


# --- descriptors ----------------------------------------------------------------------------------------------------


def test_a_log_that_nobody_reads_holds_nothing_up(tmp_path):
    log = Log(tmp_path)
    with Daemon(tmp_path, launcher=redirected(f"2> {log.path}")) as daemon:
        log.read()
        log.fill()
        with Trainer(daemon.server, "r") as trainer:
            assert trainer.step() == 1
        assert daemon.ctl("restore", "other", "--step", "1").returncode == 1
        read = [log.read()]
        daemon.ctl("delete", "r", "--force")  # which the log has
        until("the log goes on", lambda: read.append(log.read()) or "run_deleted" in "".join(read))
        lines = [line for line in "".join(read).lstrip("x").splitlines() if line]
        lost = [json.loads(line) for line in lines if "log_lost" in line]
        assert len(lost) == 1 and lost[0]["lines"] > 0
        log.fill()
        assert daemon.stop() == 0
    os.close(log.end)


@pytest.mark.parametrize("closed", [[1], [2], [1, 2], [0, 1, 2]])
def test_what_is_printed_goes_into_no_other_file_where_a_standard_descriptor_is_closed(tmp_path, closed):
    log = tmp_path / "log"
    command = [*redirected(" ".join(f"{number}>&-" for number in closed)), BALLASTD, *NO_HTTP]
    with log.open("wb") as told:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=told, stderr=told, env=plain_environment())
    descriptors = f"/proc/{process.pid}/fd"
    try:
        until("it serves", lambda: len(os.listdir(descriptors)) > 10)
        for number in (1, 2):
            assert os.readlink(f"{descriptors}/{number}") == ("/dev/null" if number in closed else str(log))
    finally:
        process.kill()
        process.wait()


# --- what is full ---------------------------------------------------------------------------------------------------


def full_disk(*words) -> subprocess.CompletedProcess:
    with open("/dev/full", "w") as full:
        return subprocess.run(
            [BALLASTCTL, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env=plain_environment(),
        )


def test_what_ballastctl_cannot_print_it_tells(tmp_path):
    told = "ballastctl: standard output: No space left on device\n"
    answer = full_disk("--version")
    assert (answer.returncode, answer.stderr) == (1, told)
    with Daemon(tmp_path) as daemon, Trainer(daemon.server, "r") as trainer:
        trainer.step()
        for words in (["runs"], ["watch", "r"], ["runs", "--json"]):
            answer = full_disk("--server", daemon.server, *words)
            assert (answer.returncode, answer.stderr) == (1, told), words


def test_what_could_not_be_written_is_not_in_the_way(tmp_path):
    token, folder = tmp_path / "token", tmp_path / "certificates"
    made = [
        ["token", "new", "--name", "n", "--run", "r", "--out", token],
        ["certs", "init", "--out", folder, "--host", "node7"],
    ]
    for words in made:
        # Python ignores SIGXFSZ, and so does what it starts.
        small = ["prlimit", f"--fsize={20 if words[0] == 'token' else 300}", BALLASTCTL, *words]
        answer = subprocess.run(small, capture_output=True, text=True, restore_signals=False)
        assert answer.returncode == 1 and "File too large" in answer.stderr
        assert not token.exists() and (not folder.exists() or not list(folder.iterdir()))
        answer = subprocess.run([BALLASTCTL, *words], capture_output=True, text=True)
        assert answer.returncode == 0, answer.stderr
        token.unlink(missing_ok=True)
