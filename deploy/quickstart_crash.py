#!/usr/bin/env python3
"""Kills the daemon and its trainer in the middle of the quick start's training, starts both again, and compares the end with
that of a training that nobody disturbed.

    quickstart_crash.py --daemon BALLASTD [--steps N] [--results FOLDER]

The daemon has a folder for its runs and writes a checkpoint every few steps; the trainer has its data's place kept with them.
Exit code 0: after the crash every loss and every weight is the same, to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "client" / "python" / "examples"))

RUN = "crash"
CHECKPOINT_EVERY = 10  # steps

Losses = dict[int, float]


# --- the trainer, a process of its own ------------------------------------------------------------------------------


def train(server: str, steps: int) -> None:
    """Prints a line a step, and one with the weights' digest at the end."""
    import king_james
    import torch

    import ballast

    torch.manual_seed(1)
    model = king_james.ByteModel()
    text = king_james.load_text()
    random = torch.Generator().manual_seed(1)
    optimizer = ballast.AdamW(
        model.named_parameters(),
        **king_james.LEARNING,
        server=server,
        run=RUN,
        checkpoint_every_steps=CHECKPOINT_EVERY,
    )
    optimizer.register_client_state("batches", random.get_state, random.set_state)
    for step in range(optimizer.connect().step + 1, steps + 1):
        loss = model.loss(king_james.draw_batch(text, king_james.BATCH, random))
        loss.backward()
        optimizer.step(loss=loss)
        told = {"step": step, "loss": loss.item(), "durable": optimizer.last_result.durable_step}
        print(json.dumps(told), flush=True)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(json.dumps({"sha256": hashlib.sha256(weights).hexdigest()}), flush=True)
    optimizer.close()


# --- what starts and kills it ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def killed_at_end(command: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    with log.open("ab") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def serving(daemon: str, storage: Path, logs: Path) -> Iterator[str]:
    """A daemon over the folder, killed at the end; its address."""
    log = logs / "crash-ballastd.log"
    flags = ["--listen=127.0.0.1:0", "--ops_http.listen=127.0.0.1:0", "--device=cpu", "--threads=1"]
    with killed_at_end([daemon, *flags, "--log.format=json", f"--storage.dir={storage}"], log) as process:
        assert process.stdout is not None
        address = re.search(r"grpc (\S+)", process.stdout.readline())
        if address is None:
            sys.exit(f"the daemon did not start; its log is {log}")
        yield address[1]


def live(options: argparse.Namespace, storage: Path, until: int | None = None) -> tuple[Losses, str]:
    """Daemon and trainer, up to the end or, killed together, this step; or a later one, where the disk is slow and there is
    no checkpoint yet. The losses, and the weights at the end."""
    logs = options.results / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    losses: Losses = {}
    with serving(options.daemon, storage, logs) as server:
        command = [sys.executable, __file__, "--train", server, "--steps", str(options.steps)]
        log = logs / "crash-trainer.log"
        with killed_at_end(command, log) as trainer:
            assert trainer.stdout is not None
            for line in trainer.stdout:
                told = json.loads(line)
                if "sha256" in told:
                    return losses, told["sha256"]
                losses[told["step"]] = told["loss"]
                if until is not None and told["step"] >= until and told["durable"] > 0:
                    return losses, ""
    sys.exit(f"the trainer ended after step {max(losses, default=0)}; its log is {log}")


def crash(options: argparse.Namespace) -> int:
    until = options.steps * 5 // 8
    until += until % CHECKPOINT_EVERY == 0  # one of which no checkpoint is made
    with tempfile.TemporaryDirectory(prefix="crash-", dir=options.results) as folder:
        storages = [Path(folder, name) for name in ("undisturbed", "killed")]
        for storage in storages:
            storage.mkdir()
        undisturbed, wanted = live(options, storages[0])
        until = max(live(options, storages[1], until=until)[0])
        after, found = live(options, storages[1])
    back = min(after) - 1
    different = [step for step, loss in after.items() if loss != undisturbed[step]]
    print(f"  kill -9 of daemon and trainer after step {until} of {options.steps}; both came back at step {back}")
    for step in sorted({back + 1, (back + options.steps) // 2, options.steps}):
        print(f"    loss at step {step:<6} {after[step]:.6f}, undisturbed {undisturbed[step]:.6f}")
    print(f"    weights at the end  sha256 {found[:16]}..., undisturbed {wanted[:16]}...")
    if back >= until or different or found != wanted:
        print(f"  NOT the same: steps {different[:5]} have other losses" if different else "  NOT the same")
        return 1
    print("  the same to the bit")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--daemon", default=str(ROOT / "build" / "dev" / "server" / "ballastd"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "quickstart")
    parser.add_argument("--train", metavar="SERVER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.steps)
        return 0
    options.results.mkdir(parents=True, exist_ok=True)
    if options.steps < CHECKPOINT_EVERY * 2:
        parser.error(f"--steps: at least {CHECKPOINT_EVERY * 2}, for a checkpoint comes every {CHECKPOINT_EVERY}")
    return crash(options)


if __name__ == "__main__":
    sys.exit(main())
