"""The last steps of a run are on the disk when it ends, with its daemon or by a deletion that keeps its checkpoints. What
cannot be written is told."""

import json
import shutil
import subprocess

import pytest
from daemon import BALLASTCTL, Daemon, until
from warm_python import WarmPython

RUN = "r"
TRAINER = """
import sys, torch, ballast
torch.set_num_threads(1)
a, b = (torch.nn.Parameter(torch.ones(20000)) for _ in range(2))
optimizer = ballast.AdamW([("a", a), ("b", b)], lr=1e-3, server=sys.argv[1], run=sys.argv[2],
                          checkpoint_every_seconds=3000, **eval(sys.argv[3]))
print("ready", flush=True)
for line in sys.stdin:
    if line == "step\\n":
        ((a * a).sum() + (b * b).sum()).backward()
        optimizer.step()
        print(optimizer.last_result.step, optimizer.last_result.outcome, flush=True)
    else:
        (a * a).sum().backward()
        print("half", flush=True)
"""


class Trainer:
    def __init__(self, server: str, run: str = RUN, **options):
        self.process = WarmPython(
            ["-c", TRAINER, server, run, repr(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "ready\n"

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def tell(self, command: str) -> str:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def steps(self, count: int) -> str:
        return [self.tell("step") for _ in range(count)][-1]


@pytest.fixture
def storage(tmp_path):
    made = tmp_path / "storage"
    made.mkdir()
    return made


def newest(storage) -> str:
    return max(path.name for path in (storage / "runs" / RUN).glob("0*-step-*"))


def events(daemon: Daemon, event: str) -> list[dict]:
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def train_and_tear(daemon: Daemon, trainer: Trainer) -> None:
    """Three steps, a checkpoint, five more steps, and of the ninth one tensor."""
    assert trainer.steps(3) == "3 APPLIED"
    assert daemon.ctl("checkpoint", RUN).returncode == 0
    assert trainer.steps(5) == "8 APPLIED"
    sent = bytes_received(daemon)
    assert trainer.tell("half") == "half"
    until("the half step is there", lambda: bytes_received(daemon) > sent)


def train_and_lose_the_folder(daemon: Daemon, trainer: Trainer, storage) -> None:
    """A checkpoint of step 2, and then a step more, which cannot be written: no link is followed."""
    assert trainer.steps(2) == "2 APPLIED"
    assert daemon.ctl("checkpoint", RUN).returncode == 0
    assert trainer.steps(1) == "3 APPLIED"
    shutil.move(storage / "runs" / RUN, storage.parent / "moved")
    (storage / "runs" / RUN).symlink_to(storage.parent / "moved")


def bytes_received(daemon: Daemon) -> float:
    lines = daemon.get("/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("ballast_received_bytes_total"))


def test_a_step_that_is_half_made_closes_when_the_daemon_is_stopped(tmp_path, storage):
    with Daemon(tmp_path, "--storage.dir", str(storage), "--drain_timeout", "2s") as daemon:
        with Trainer(daemon.server) as trainer:
            train_and_tear(daemon, trainer)
            assert daemon.stop() == 0
        [torn] = events(daemon, "step_torn")
        assert (torn["step"], torn["reason"], torn["outcome"]) == (9, "stopped", "partial")
    assert newest(storage).endswith("-step-9")
    with Daemon(tmp_path, "--storage.dir", str(storage)) as daemon, Trainer(daemon.server, weights="server") as trainer:
        assert trainer.steps(1) == "10 APPLIED"


def test_one_that_is_gone_back_from_is_gone_back_from_first(tmp_path, storage):
    with Daemon(tmp_path, "--storage.dir", str(storage), "--drain_timeout", "2s") as daemon:
        with Trainer(daemon.server, snapshots=2, snapshot_every=1, on_torn="rewind") as trainer:
            train_and_tear(daemon, trainer)
            assert daemon.stop() == 0
    assert newest(storage).endswith("-step-8")


def test_a_forced_deletion_that_keeps_checkpoints_writes_it_too(tmp_path, storage):
    with Daemon(tmp_path, "--storage.dir", str(storage)) as daemon, Trainer(daemon.server) as trainer:
        train_and_tear(daemon, trainer)
        refused = daemon.ctl("delete", RUN, "--keep-checkpoints")
        assert refused.returncode != 0 and "has a trainer attached" in refused.stderr
        assert not events(daemon, "step_torn"), "the step is that of a trainer that is there"
        assert daemon.ctl("delete", RUN, "--force", "--keep-checkpoints").returncode == 0
        assert newest(storage).endswith("-step-9")


def test_an_idle_run_is_written_before_it_expires(tmp_path, storage):
    flags = ("--storage.dir", str(storage), "--idle_run_timeout", "2s", "--limits.lease", "1s")
    with Daemon(tmp_path, *flags) as daemon:
        with Trainer(daemon.server) as trainer:
            train_and_tear(daemon, trainer)
        until("the run has expired", lambda: events(daemon, "run_expired"))
        assert newest(storage).endswith("-step-9")


def test_a_run_that_cannot_be_written_does_not_expire_and_it_is_told(tmp_path, storage):
    flags = ("--storage.dir", str(storage), "--idle_run_timeout", "2s", "--limits.lease", "1s")
    with Daemon(tmp_path, *flags) as daemon:
        with Trainer(daemon.server) as trainer:
            train_and_lose_the_folder(daemon, trainer, storage)
        until("it is told", lambda: events(daemon, "run_not_expired"))
        [told] = events(daemon, "run_not_expired")
        assert told["run_id"] == RUN and "its last steps could not be written" in told["err"]
        assert RUN in daemon.ctl("runs").stdout


@pytest.mark.parametrize("command", [["delete", RUN, "--keep-checkpoints", "--force"], ["restore", RUN, "--step", "2"]])
def test_a_run_that_is_written_slowly_keeps_no_other_from_beginning(tmp_path, storage, command):
    with Daemon(tmp_path, "--storage.dir", str(storage)) as daemon, Trainer(daemon.server, snapshots=1) as trainer:
        assert trainer.steps(2) == "2 APPLIED"
        assert daemon.ctl("checkpoint", RUN).returncode == 0
    with Daemon(tmp_path, "--storage.dir", str(storage), "--storage.bytes_per_second", "1000") as daemon:
        with Trainer(daemon.server, weights="server", snapshots=1) as trainer:
            assert trainer.steps(1) == "3 APPLIED"
            with subprocess.Popen([BALLASTCTL, "--server", daemon.server, "--timeout", "600", *command]) as slow:
                until("it is being written", lambda: list((storage / "runs" / RUN).glob("writing-*")))
                with Trainer(daemon.server, run="other") as other:
                    assert other.steps(1) == "1 APPLIED"
                assert slow.poll() is None
                daemon.process.kill()


def test_a_run_whose_folder_cannot_be_written_to_is_not_deleted(tmp_path, storage):
    with Daemon(tmp_path, "--storage.dir", str(storage)) as daemon:
        with Trainer(daemon.server) as trainer:
            train_and_lose_the_folder(daemon, trainer, storage)
            refused = daemon.ctl("delete", RUN, "--force", "--keep-checkpoints")
            assert refused.returncode != 0 and "its last steps could not be written" in refused.stderr
            assert RUN in daemon.ctl("runs").stdout


def test_what_could_not_be_written_at_a_stop_is_told_and_in_the_exit_code(tmp_path, storage):
    with Daemon(tmp_path, "--storage.dir", str(storage)) as daemon:
        with Trainer(daemon.server) as trainer:
            assert trainer.steps(2) == "2 APPLIED"
            assert daemon.ctl("checkpoint", RUN).returncode == 0
            assert trainer.steps(3) == "5 APPLIED"
            # As on a disk that is full, but for the log.
            subprocess.run(["prlimit", "--pid", str(daemon.process.pid), "--fsize=60000"], check=True)
            assert daemon.stop() == 74
        [told] = events(daemon, "not_written")
        assert told["level"] == "error"
        assert "run 'r' was at step 5, and durable is step 2: " in told["err"]


def test_a_file_of_the_journal_that_is_a_link_is_not_passed_over(tmp_path, storage):
    with Daemon(tmp_path, "--storage.dir", str(storage)) as daemon:
        with Trainer(daemon.server, durability="journal_sync") as trainer:
            assert trainer.steps(2) == "2 APPLIED"
            assert daemon.ctl("checkpoint", RUN).returncode == 0
            assert trainer.steps(3) == "5 APPLIED"
            daemon.process.kill()
            daemon.process.wait()
    [segment] = (storage / "runs" / RUN / "journal").iterdir()
    shutil.move(segment, tmp_path / "moved")
    segment.symlink_to(tmp_path / "moved")
    with Daemon(tmp_path, "--storage.dir", str(storage)) as daemon:
        [told] = [line for line in events(daemon, "restored") if line["level"] == "error"]
        assert segment.name in told["err"] and "no link is followed" in told["err"]
    segment.unlink()
    shutil.move(tmp_path / "moved", segment)
    with Daemon(tmp_path, "--storage.dir", str(storage)) as daemon:
        assert json.loads(daemon.get("/api/v1/runs")[1])["runs"][0]["step"] in (5, "5")


def test_a_rewind_that_a_crash_would_undo_is_told(tmp_path, storage):
    folder = storage / "runs" / RUN
    with Daemon(tmp_path, "--storage.dir", str(storage)) as daemon:
        with Trainer(daemon.server, snapshots=3, snapshot_every=1) as trainer:
            for last in (2, 4):
                assert trainer.steps(2) == f"{last} APPLIED"
                assert daemon.ctl("checkpoint", RUN).returncode == 0
            shutil.move(folder, tmp_path / "moved")
            folder.symlink_to(tmp_path / "moved")
            rewound = daemon.ctl("rewind", RUN, "--to", "3")
            folder.unlink()
            shutil.move(tmp_path / "moved", folder)
            assert rewound.returncode != 0 and "a restart of the daemon would undo" in rewound.stderr
            assert daemon.ctl("rewind", RUN, "--to", "3").returncode == 0
        assert newest(storage).endswith("-step-2")


def test_a_daemon_does_not_start_where_its_runs_cannot_be_listed(tmp_path, storage):
    (tmp_path / "elsewhere").mkdir()
    (storage / "runs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AssertionError, match="runs.*no link to one"), Daemon(tmp_path, "--storage.dir", str(storage)):
        pass
