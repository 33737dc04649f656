"""Programs that answer lines with seconds, asked in turns; and how busy the rest of the machine was meanwhile."""

import json
import os
import select
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

TICK = 1 / os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """A program that answers with an error, late, or not at all."""


class Answering:
    """A child process that answers each line of its input with one line."""

    def __init__(self, command, environment: dict | None = None):
        self._said = tempfile.TemporaryFile()  # what it says to standard error
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | (environment or {}),
            bufsize=0,
        )

    def ask(self, line: str, timeout_s: float = 300) -> str:
        self.process.stdin.write(line.encode() + b"\n")
        return self.read(timeout_s)

    def read(self, timeout_s: float) -> str:
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            self.close()
            raise Failed(f"no answer within {timeout_s:.0f} s")
        answer = self.process.stdout.readline().decode().strip()
        if not answer:
            raise Failed(f"ended with exit code {self.process.wait()}{self._last_words()}")
        if answer.startswith("error"):
            raise Failed(answer)
        return answer

    def _last_words(self) -> str:
        self._said.seek(0)
        last = self._said.read().decode(errors="replace").strip()[-500:]
        return f": {last}" if last else ""

    def read_json(self, timeout_s: float) -> dict:
        return json.loads(self.read(timeout_s))

    def close(self):
        self.process.kill()
        self.process.wait()


def busy_seconds() -> float:
    """Busy seconds of all cores since the machine started, with what a hypervisor took."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return TICK * (user + nice + system + irq + softirq + steal)


def process_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return TICK * (int(fields[11]) + int(fields[12]))


@dataclass
class Variant:
    """One thing that is timed: `line` sent to `program`."""

    name: str
    program: Answering
    line: str
    threads: int
    elements: int
    bytes: float  # a parameter's, or 0
    seconds: list[float] = field(default_factory=list)
    disturbed: list[bool] = field(default_factory=list)
    lost: str = ""  # why it ended before its time

    def run(self) -> float:
        """One repetition. Returns the seconds of processor time that others used meanwhile."""
        own_pids = (self.program.process.pid, os.getpid())
        busy, own = busy_seconds(), sum(map(process_seconds, own_pids))
        started = time.monotonic()
        self.seconds.append(float(self.program.ask(self.line)))
        wall = time.monotonic() - started
        others = max(0.0, busy_seconds() - busy - sum(map(process_seconds, own_pids)) + own)
        # Clock ticks are coarse, so one and a half of them prove nothing.
        self.disturbed.append(others > 1.6 * TICK + 0.03 * wall)
        return others


QUIET = 0.15  # cores used by others in a round, beyond which nothing of the round is undisturbed: ticks are coarse
LEAST = 5  # repetitions that were left alone, for the disturbed ones to be dropped


def kept(*variants: Variant) -> tuple[list[int], bool]:
    """The rounds that count for all of the variants, and whether only undisturbed ones do."""
    rounds = range(len(variants[0].seconds))
    alone = [i for i in rounds if not any(v.disturbed[i] for v in variants)]
    return (alone, True) if len(alone) >= LEAST else (list(rounds), False)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    return tuple(statistics.quantiles(values, n=4, method="inclusive")) if len(values) > 1 else (values[0],) * 3


def uptime() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@dataclass
class Load:
    """How busy others kept the machine."""

    shares: list[float] = field(default_factory=list)  # cores used by others, a round each
    waited_s: float = 0.0
    own: list[int] = field(default_factory=list)  # pids that are no others, of the round begun
    began: tuple[float, float] = (0.0, 0.0)  # when, and what others had used by then

    def begin_round(self, own: list[int]):
        self.own = own
        self.began = (uptime(), self._others())

    def end_round(self):
        self.shares.append(max(0.0, self._others() - self.began[1]) / (uptime() - self.began[0]))

    def _others(self) -> float:
        return busy_seconds() - sum(map(process_seconds, self.own))

    @property
    def quiet(self) -> bool:
        return statistics.median(self.shares) <= QUIET

    def told(self) -> str:
        used = f"{statistics.median(self.shares):.2f} cores (median over rounds, most {max(self.shares):.2f})"
        return f"Other processes used {used}" + ("." if self.quiet else ": **disturbed, no figure here is a finding**.")

    def wait_until_quiet(self, limit_s: float):
        """Returns once others use less than a tenth of a core, or after about `limit_s`."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            busy = busy_seconds()
            time.sleep(0.5)
            self.waited_s += 0.5
            if busy_seconds() - busy < 0.05:
                return


def take_turns(variants: list[Variant], rounds: int, quiet_wait_s: float, say) -> Load:
    """Every variant once a round, in alternating order, after one round that does not count. One whose program ends or
    answers with an error is lost and takes no further part."""
    load = Load()
    for number in range(rounds + 1):
        load.wait_until_quiet(quiet_wait_s / (rounds + 1))
        others, started = 0.0, time.monotonic()
        for variant in variants if number % 2 == 0 else reversed(variants):
            if variant.lost:
                continue
            try:
                others += variant.run()
            except (Failed, OSError) as error:
                variant.lost = str(error)
                say(f"!! LOST in round {number}: {variant.name}: {error}")
            time.sleep(0.01)  # lets a peer's threads stop spinning
        wall = time.monotonic() - started
        if number == 0:
            for variant in variants:
                variant.seconds.clear()
                variant.disturbed.clear()
            continue
        load.shares.append(others / wall)
        if others / wall > QUIET:
            for variant in variants:
                variant.disturbed[-1:] = [True]
        say(f"round {number} of {rounds}: {wall:.1f} s, others used {others / wall:.2f} cores")
    return load
