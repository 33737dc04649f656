#!/usr/bin/env python3
"""What checkpoints cost: the disk, a training's steps, a restart; beside torch.save and torch.distributed.checkpoint.

    checkpoints.py [--quick] [--json FILE]

100 million parameters in fp32 with ballast.AdamW's defaults, on the disk that build/ lies on. Each round writes a checkpoint,
has dd, and fio where it is installed, write as many bytes past the page cache, saves torch's own AdamW of the same model, and
starts the daemon again; the medians over the rounds are compared. All writers sync. A step is compared while a checkpoint is
written at 64 MiB/s, and while none is, in the same run. Steps of a run with a journal are compared with those of one without,
in turn, on the same daemon. The daemon has one thread, and four for its disk; the trainer has one. A daemon that starts has
all processors.
"""

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import trainer
from torch import nn

RUN = "bench"
WIDTH = 2000
BLOCK = 16 << 20
DURABILITIES = ("checkpoint", "journal", "journal_sync")
LIMITED = "64MiB"  # a second: what checkpoints are written with beside steps


def timed(what) -> float:
    started = time.perf_counter()
    what()
    return time.perf_counter() - started


def dd(*operands: str) -> None:
    subprocess.run(["dd", "status=none", f"bs={BLOCK}", *operands], check=True)


def drop_caches() -> None:
    """Where this user may; files written past the page cache are not in it in any case."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        pass


def model_of(layers: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def backward(model: nn.Module) -> None:
    (model(torch.randn(8, WIDTH)) * 1e-3).square().sum().backward()


class Disk:
    """What dd and fio do with as many bytes as a checkpoint has."""

    def __init__(self, folder: Path, size: int):
        self._file, self._blocks = folder / "dd", max(1, round(size / BLOCK))
        self._source = folder / "random"
        self._source.write_bytes(os.urandom(BLOCK))

    @property
    def megabytes(self) -> float:
        return self._blocks * BLOCK / 1e6

    def write(self) -> float:
        """Megabytes a second. From memory: the same block again and again."""
        block = self._source.read_bytes()
        with subprocess.Popen(
            ["dd", "status=none", f"bs={BLOCK}", "iflag=fullblock", "oflag=direct", "conv=fsync", f"of={self._file}"],
            stdin=subprocess.PIPE,
        ) as process:
            started = time.perf_counter()
            for _ in range(self._blocks):
                process.stdin.write(block)
            process.stdin.close()
            assert process.wait() == 0
            return self.megabytes / (time.perf_counter() - started)

    def fio(self, what: str) -> float:
        """Megabytes a second of fio's sequential write or read, with four requests under way; 0: it is not installed."""
        if shutil.which("fio") is None:
            return 0.0
        drop_caches()
        file = self._file.with_name("fio")
        options = [f"--rw={what}", f"--size={self._blocks * BLOCK}", "--bs=4M", "--direct=1", "--end_fsync=1"]
        options += ["--ioengine=libaio", "--iodepth=4", f"--filename={file}", "--name=disk", "--output-format=json"]
        told = subprocess.run(["fio", *options], capture_output=True, text=True, check=True).stdout
        job = json.loads(told[told.index("{") :])["jobs"][0]
        return self.megabytes / (job["job_runtime"] / 1e3)

    def read(self) -> float:
        drop_caches()
        return self.megabytes / timed(lambda: dd("iflag=direct", f"if={self._file}", "of=/dev/null"))


class Torch:
    """The same model under torch's own AdamW, and what saves it."""

    def __init__(self, folder: Path, layers: int):
        self._folder = folder
        model = model_of(layers)
        optimizer = torch.optim.AdamW(model.parameters())
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        self._state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        self.bytes = 0

    def save(self) -> float:
        path = self._folder / "torch.pt"

        def write():
            with path.open("wb") as file:
                torch.save(self._state, file)
                file.flush()
                os.fsync(file.fileno())

        took = timed(write)
        self.bytes = path.stat().st_size
        path.unlink()
        return took

    def async_stall(self) -> float:
        """Seconds until async_save gives the training back."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            started = time.perf_counter()
            future = dcp.async_save(self._state, checkpoint_id=folder, no_dist=True)
            stalled = time.perf_counter() - started
            future.result()
        return stalled


class Trained:
    """The model in training under a daemon with storage."""

    def __init__(self, server: str, layers: int, run: str = RUN, **options):
        import ballast

        self.server, self.model = server, model_of(layers)
        options = {"lr": 1e-4, "server": server, "run": run, "checkpoint_every_seconds": 1e6} | options
        self._optimizer = ballast.AdamW(self.model.parameters(), **options)
        self.step()

    def step(self) -> float:
        return timed(self._step)

    def _step(self) -> None:
        backward(self.model)
        self._optimizer.step()

    def checkpoint(self) -> dict:
        from ballast import _core

        client = _core.Client.connect(self.server, 5.0, 600.0)
        try:
            return client.checkpoint(RUN)
        finally:
            client.close()

    def during_a_checkpoint(self) -> list[float]:
        """Steps that began and ended while one was written."""
        self.step()
        writing = threading.Thread(target=self.checkpoint)
        writing.start()
        steps = []
        while writing.is_alive():
            took = self.step()
            if writing.is_alive():
                steps.append(took)
        writing.join()
        return steps

    def close(self) -> None:
        self._optimizer.close()


def sum_of(daemon, family: str) -> float:
    lines = [line for line in daemon.get("/metrics")[1].splitlines() if line.startswith(family)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def restore(storage: Path) -> float:
    """Seconds that the daemon takes to read the run back."""
    drop_caches()
    with trainer.own_daemon("--storage.dir", str(storage), "--threads", "0") as daemon:
        return sum_of(daemon, "ballast_restore_duration_seconds_sum")


def stall(daemon) -> float:
    return sum_of(daemon, 'ballast_checkpoint_step_stall_seconds_sum{run_id="bench"}')


def measure(folder: Path, layers: int, rounds: int) -> dict[str, list[float]]:
    storage = folder / "storage"
    storage.mkdir()
    peer = Torch(folder, layers)
    found: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            found.setdefault(name, []).append(value)

    for _ in range(rounds):
        with trainer.own_daemon("--storage.dir", str(storage)) as daemon:
            if (storage / "runs" / RUN).exists():
                daemon.ctl("delete", RUN, "--force")
            trained = Trained(daemon.server, layers)
            written = trained.checkpoint()
            disk = Disk(folder, int(written["bytes"]))
            note(bytes=float(written["bytes"]), whole=written["seconds"])
            note(write=float(written["bytes"]) / 1e6 / written["seconds"])
            note(dd_write=disk.write(), fio_write=disk.fio("write"))
            trained.close()
        note(restore=written_megabytes(found) / restore(storage), dd_read=disk.read(), fio_read=disk.fio("read"))
        with trainer.own_daemon("--storage.dir", str(storage), "--storage.bytes_per_second", LIMITED) as daemon:
            daemon.ctl("delete", RUN, "--force")
            trained = Trained(daemon.server, layers)
            without = [trained.step() for _ in range(6)]
            before = stall(daemon)
            during = trained.during_a_checkpoint()
            note(step=statistics.median(without), stall=stall(daemon) - before)
            if during:
                note(step_during=statistics.median(during), steps_during=len(during))
            trained.close()
        note(torch_save=peer.save(), dcp_stall=peer.async_stall(), torch_bytes=peer.bytes)
    return found


def measure_journals(folder: Path, layers: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step by what makes it durable, each in its turn; the journal's bytes beside them."""
    found: dict[str, list[float]] = {durability: [] for durability in DURABILITIES}
    storage = folder / "journals"
    storage.mkdir()
    with trainer.own_daemon("--storage.dir", str(storage)) as daemon:
        runs = {one: Trained(daemon.server, layers, run=one.replace("_", "-"), durability=one) for one in DURABILITIES}
        for trained in runs.values():
            trained.step()  # the first one's checkpoint is written, and begins the journal
        before = sum_of(daemon, "ballast_journal_bytes_total")
        for _ in range(rounds):
            for durability, trained in runs.items():
                found[durability].append(trained.step())
        written = sum_of(daemon, "ballast_journal_bytes_total") - before
        for trained in runs.values():
            trained.close()
    return found | {"journal_bytes": [written / 2 / rounds]}


def written_megabytes(found: dict[str, list[float]]) -> float:
    return found["bytes"][-1] / 1e6


def report(found: dict[str, list[float]], journals: dict[str, list[float]], layers: int) -> list[dict]:
    median = {name: statistics.median(values) for name, values in found.items()}
    size = f"{layers * WIDTH * WIDTH / 1e6:.0f} M parameters"
    rows = []

    def row(name: str, value: float, unit: str, peer: float, what: str, target: str) -> None:
        ratio = value / peer
        print(f"{name}: {value:.4g} {unit}, {what} {peer:.4g}: {ratio:.3f} (target {target})")
        rows.append(
            {
                "name": f"{size}: {name}, to {what}",
                "value": value,
                "unit": unit,
                "bound": peer,
                "ratio": ratio,
                "n": len(found["bytes"]),
            }
        )

    print(f"{size}, a checkpoint of {median['bytes'] / 1e6:.0f} MB, medians of {len(found['bytes'])} rounds")
    row("checkpoint written", median["write"], "MB/s", median["dd_write"], "dd oflag=direct", ">= 0.8")
    row("run read back", median["restore"], "MB/s", median["dd_read"], "dd iflag=direct", ">= 0.7")
    if median["fio_write"]:
        row("checkpoint written", median["write"], "MB/s", median["fio_write"], "fio, four under way", ">= 0.8")
        row("run read back", median["restore"], "MB/s", median["fio_read"], "fio, four under way", ">= 0.7")
    if "step_during" in median:
        row("step while one is written", median["step_during"], "s", median["step"], "one without", "<= 1.05")
    row("size", median["bytes"] / 1e6, "MB", median["torch_bytes"] / 1e6, "torch.save", "<= 0.45")
    row("time", median["whole"], "s", median["torch_save"], "torch.save", "<= 0.4")
    row("stall", median["stall"], "s", median["dcp_stall"], "dcp.async_save", "<= 1")
    for durability in DURABILITIES[1:]:
        ratios = [ours / theirs for ours, theirs in zip(journals[durability], journals["checkpoint"], strict=True)]
        row(f"step with {durability}", statistics.median(ratios), "", 1.0, "one without, in its round", "none")
    row(
        "journal",
        journals["journal_bytes"][0] / 1e6,
        "MB a step",
        layers * WIDTH * WIDTH * 4 / 1e6,
        "fp32 gradients",
        "none",
    )
    return rows


def main():
    options = trainer.parse_options(__doc__, quick="8 million parameters, one round")
    torch.set_num_threads(1)
    layers, rounds = (2, 1) if options.quick else (25, 5)
    with tempfile.TemporaryDirectory(prefix="bench-checkpoints-", dir=trainer.ROOT / "build") as folder:
        found = measure(Path(folder), layers, rounds)
        journals = measure_journals(Path(folder), layers, 3 * rounds)
    rows = report(found, journals, layers)
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
