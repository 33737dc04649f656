#!/usr/bin/env python3
"""What TLS and access control cost beside the payload: handshakes, and looking up who calls.

    access.py [--quick] [--json FILE] [--record] [--rounds N]

In every round each way of connecting makes so many connections, one after another, from this process to a daemon, each
until the daemon has said its first HTTP/2 frame: plain; TLS, where both ends show a certificate; and TLS that takes up
the session before, if gRPC gives one. Then each daemon answers so many calls: without an access file, with a grant, and
with a thousand, of which the last is the caller's; and trains so many steps of many small messages. Ratios are medians
over rounds of the ratio within the round. Both ends are on the same cores, and this end's work is in the figures.
--record writes a page among the results.
"""

import datetime
import os
import socket
import ssl
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import ballast
import grpc
import torch
import trainer
from collect import machine
from sides import ratios, rows
from turns import Load, quartiles

from daemon import Daemon  # isort: skip: trainer has made e2e known
from grants import give_token  # isort: skip
from idle_connections import client_context  # isort: skip
from pki import Pki  # isort: skip
from rapid_reset import PREFACE, SETTINGS, frame  # isort: skip

OTHERS = 999  # grants before the caller's
TENSORS = 200
# name, against which, what it is.
FIGURES = (
    ("connect", None, "a connection, plain"),
    ("tls", "connect", "the same over TLS, a full handshake with both certificates"),
    ("resumed", "tls", "the same, taking up the session before"),
    ("call open", None, "a unary call, no access file"),
    ("call one", "call open", "the same, one grant by token"),
    ("call thousand", "call open", "the same, the last of 1,000 grants"),
    ("step open", None, f"a step of {TENSORS} small tensors over gRPC, no access file"),
    ("step thousand", "step open", "the same, with 1,000 grants: none is looked at after the stream's beginning"),
)
AGAINST = {name: against for name, against, *_ in FIGURES}


def connect(server: str, context: ssl.SSLContext | None, session: ssl.SSLSession | None):
    """One connection until the daemon's first frame; seconds, the session, and whether that was taken up."""
    host, port = server.rsplit(":", 1)
    began = time.perf_counter()
    with socket.create_connection((host, int(port)), 60) as connection:
        if context is not None:
            connection = context.wrap_socket(connection, server_hostname=host, session=session)
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
        assert connection.recv(9)[3] == SETTINGS
        took = time.perf_counter() - began
        taken_up = context is not None and connection.session_reused
        given = connection.session if context is not None else None
        connection.close()
    return took, given, taken_up


class Connecting:
    """So many connections a turn."""

    def __init__(self, server: str, context: ssl.SSLContext | None = None, resumes: bool = False):
        self.server, self.context, self.resumes = server, context, resumes
        self.session, self.taken_up = None, 0

    def turn(self, count: int) -> float:
        total = 0.0
        for _ in range(count):
            took, given, taken_up = connect(self.server, self.context, self.session)
            total += took
            self.taken_up += taken_up
            if self.resumes:
                self.session = given
        return total / count


class Calling:
    def __init__(self, server: str, token: Path | None):
        self.call = grpc.insecure_channel(server).unary_unary("/ballast.v1.AdminService/ListRuns")
        self.metadata = [("authorization", f"Bearer {token.read_text().strip()}")] if token else []

    def turn(self, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            self.call(b"", metadata=self.metadata)
        return (time.perf_counter() - began) / count


class Stepping:
    def __init__(self, server: str, token: Path | None):
        torch.manual_seed(1)
        self.tensors = [(f"w{i}", torch.nn.Parameter(torch.randn(64))) for i in range(TENSORS)]
        options = {"token_file": str(token)} if token else {}
        self.optimizer = ballast.AdamW(self.tensors, lr=1e-3, server=server, run="bench", transport="grpc", **options)

    def turn(self, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            sum((tensor * tensor).sum() for _, tensor in self.tensors).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - began) / count


def sides(stack: ExitStack, folder: Path) -> tuple[dict, list[int]]:
    """By name what takes a turn; and the daemons' processes."""
    daemons: list[Daemon] = []

    def own(name: str) -> Path:
        (folder / name).mkdir()
        return folder / name

    def start(name: str, *flags: str) -> str:
        daemons.append(stack.enter_context(Daemon(own(name), "--shm_socket", "off", *flags)))
        return daemons[-1].server

    pki = Pki(folder / "pki")
    plain, secured = start("plain"), start("secured", *pki.flags)
    unix = f"unix:{folder}/unix"
    found = {"connect": Connecting(plain), "tls": Connecting(secured, client_context(pki))}
    found["resumed"] = Connecting(secured, client_context(pki), resumes=True)
    for name, others in (("open", None), ("one", 0), ("thousand", OTHERS)):
        token, flags = None, []
        if others is not None:
            token, access = give_token(own(f"{name}-token"), "*", "admin")
            grants = access.read_text().removeprefix("grants:\n")
            strangers = "".join(
                f"- {{name: other-{i}, token_sha256: {i:064x}, runs: [other-{i}], scope: push}}\n"
                for i in range(others)
            )
            access.write_text("grants:\n" + strangers + grants)
            flags = ["--access", str(access)]
        server = start(name, "--listen", f"{unix}-{name}", *flags)
        found[f"call {name}"] = Calling(server, token)
        if name != "one":
            found[f"step {name}"] = Stepping(server, token)
            stack.enter_context(found[f"step {name}"].optimizer)
    return found, [daemon.process.pid for daemon in daemons]


def measure(options) -> tuple[dict[str, list[float]], Load, int]:
    counts = {"connect": 50, "tls": 50, "resumed": 50, "call": 200, "step": 20}
    if options.quick:
        options.rounds, counts = 1, {kind: 5 for kind in counts}
    seconds: dict[str, list[float]] = {name: [] for name, *_ in FIGURES}
    load = Load()
    with tempfile.TemporaryDirectory(prefix="ballast-access-") as folder, ExitStack() as stack:
        found, daemons = sides(stack, Path(folder))
        for side in found.values():
            side.turn(2)  # what is made at first
        for number in range(options.rounds):
            load.begin_round([os.getpid(), *daemons])
            for name in list(found)[:: -1 if number % 2 else 1]:
                seconds[name].append(found[name].turn(counts[name.split()[0]]))
            load.end_round()
        return seconds, load, found["resumed"].taken_up


def report(seconds: dict, load: Load, taken_up: int, rounds: int) -> str:
    lines = [
        "# TLS and access control beside the payload, measured",
        "",
        f"`tests/bench/access.py --rounds {rounds}` on {machine()}; {datetime.date.today()}. Medians over rounds in which "
        "each had its turn, quartiles in brackets; ratios within a round. This process's work is in the figures.",
        load.told(),
        "",
        f"Sessions of TLS that were taken up: {taken_up}." + ("" if taken_up else " gRPC 1.51 gives none."),
        "",
        "| what | ms | a second | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for name, against, what in FIGURES:
        low, middle, high = (1000 * value for value in quartiles(seconds[name]))
        ratio = f"{statistics.median(ratios(seconds, name, against)):.2f}" if against else "-"
        lines.append(f"| {what} | {middle:.3g} ({low:.3g} to {high:.3g}) | {1000 / middle:.3g} | {ratio} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    options = trainer.recording_parser(__doc__, "one round of few", 15).parse_args()
    torch.set_num_threads(1)
    seconds, load, taken_up = measure(options)
    text = report(seconds, load, taken_up, options.rounds)
    trainer.publish(options, "access", text, rows(seconds, AGAINST, options.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
