#!/usr/bin/env python3
"""Trains against a portable daemon on the CPU and on the GPU, and demands the same losses to the last bit.

    gpu_training.py FOLDER [--steps N]

FOLDER holds bin/ballastd (`deploy/setup.sh portable`). The trainer is the Python client where it can be imported with
torch, else FOLDER/bin/ballast_example. Exit code 77, and a line that says why, where there is neither.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

SKIPPED = 77

TRAINER = """
import sys, torch, ballast
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1))
x = torch.randn(256, 64)
y = x[:, :4].sum(1, keepdim=True).sin()
opt = ballast.AdamW(model.named_parameters(), lr=1e-2, server=sys.argv[1], run="gpu-check")
for _ in range(int(sys.argv[2])):
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    opt.step(loss=loss)
    opt.zero_grad()
    print(loss.item().hex())
"""


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("BALLAST_")}


@contextmanager
def daemon(ballastd: Path, device: str, *flags: str, **variables: str):
    """HOST:PORT of a daemon of our own, once it serves; stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="ballast-gpu-") as folder:
        log = Path(folder) / "ballastd.log"
        command = [ballastd, "--listen", "127.0.0.1:0", "--ops_http.listen", "127.0.0.1:0", "--device", device, *flags]
        environment = plain_environment() | variables
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, cwd=folder, text=True, env=environment
            )
        try:
            banner = re.search(r"grpc (\S+) \|", process.stdout.readline())
            if banner is None:
                raise RuntimeError(f"the daemon did not start with --device {device}:\n{log.read_text()[-2000:]}")
            yield banner[1]
            process.send_signal(signal.SIGTERM)
            if process.wait(20) != 0:
                raise RuntimeError(f"the daemon ended with {process.returncode}:\n{log.read_text()[-2000:]}")
        finally:
            process.kill()
            process.wait()


def find_trainer(folder: Path) -> tuple[list, str]:
    """The command before HOST:PORT, or none and why."""
    attempt = subprocess.run([sys.executable, "-c", "import torch, ballast"], capture_output=True, text=True)
    if attempt.returncode == 0:
        return [sys.executable, "-c", TRAINER], "the Python client"
    example = folder / "bin" / "ballast_example"
    if example.exists():
        return [example], "ballast_example"
    why = attempt.stderr.strip().splitlines()[-1]
    return (
        [],
        f"no trainer: the Python client cannot be imported ({why}), and there is no {example.name} in {folder}/bin",
    )


def train(ballastd: Path, device: str, trainer: list, steps: int) -> str:
    with daemon(ballastd, device) as server:
        extra = [str(steps)] if "-c" in trainer else []
        command = [*trainer, server, *extra]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=40, env=plain_environment())
    if ran.returncode != 0:
        raise RuntimeError(f"training with --device {device} failed:\n{ran.stdout[-1000:]}{ran.stderr[-1000:]}")
    return ran.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    ballastd = (options.folder / "bin" / "ballastd").resolve()
    if not ballastd.exists():
        print(f"!! SKIPPED: there is no {options.folder}/bin/ballastd")
        return SKIPPED
    trainer, name = find_trainer(options.folder.resolve())
    if not trainer:
        print(f"!! SKIPPED: {name}")
        return SKIPPED
    try:
        outputs = {device: train(ballastd, device, trainer, options.steps) for device in ("cpu", "cuda:0")}
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"FAILED: {error}")
        return 1
    same = outputs["cpu"] == outputs["cuda:0"]
    print(f"{name}: {len(outputs['cpu'].splitlines())} lines of losses; CPU and GPU {'agree' if same else 'DIFFER'}")
    print(f"last line: {outputs['cpu'].splitlines()[-1]} and {outputs['cuda:0'].splitlines()[-1]}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
