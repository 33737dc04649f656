"""The wire is enough: a trainer of generated stubs alone trains as the C++ client does, to the bit."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import ballast
import pytest
import torch
from daemon import ROOT, Daemon, plain_environment
from least_squares import NAMES, LeastSquares, rate

STEPS = 100
HERE = Path(__file__).resolve().parent
# Small, so that the weight has several chunks, and more bytes than its rank has credit.
LIMITS = ("--limits.chunk_bytes", "16KiB", "--limits.credit_bytes", "32KiB")


@pytest.fixture(scope="module")
def stubs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    protos = sorted(str(path) for path in (ROOT / "proto").rglob("*.proto"))
    flags = [f"--proto_path={ROOT / 'proto'}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
    made = subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *flags, *protos], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    for package in (folder / "ballast", folder / "ballast" / "v1"):  # ahead of the client's package of that name
        (package / "__init__.py").touch()
    return folder


def train_by_client(server: str, run: str) -> tuple[list[float], str]:
    """The losses, and a digest of the weights, of the C++ client given the very same gradients."""
    problem, losses = LeastSquares(), []
    parameters = [torch.nn.Parameter(torch.from_numpy(first.copy())) for first in problem.first]
    with ballast.AdamW(list(zip(NAMES, parameters)), server=server, run=run) as optimizer:
        for step in range(1, STEPS + 1):
            optimizer.param_groups[0]["lr"] = rate(step)
            loss, gradients = problem.backward([parameter.detach().numpy() for parameter in parameters])
            losses.append(loss)
            sum((p * torch.from_numpy(gradient)).sum() for p, gradient in zip(parameters, gradients)).backward()
            optimizer.step(loss=loss)
    digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in parameters))
    return losses, digest.hexdigest()


def test_generated_stubs_train_like_the_client(tmp_path, stubs):
    with Daemon(tmp_path, *LIMITS) as daemon:
        losses, digest = train_by_client(daemon.server, "client")
        trained = subprocess.run(
            [sys.executable, HERE / "plain_trainer.py", daemon.server, "plain", "client", str(STEPS)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**plain_environment(), "PYTHONPATH": os.pathsep.join([str(stubs), str(HERE)])},
        )
    assert trained.returncode == 0, trained.stderr
    seen = json.loads(trained.stdout)
    assert losses[-1] < 1e-3 * losses[0]
    assert seen["losses"] == losses
    assert seen["digest"] == digest
    assert seen["chunks"] == 4 * STEPS
    assert seen["waits"] > 0 and seen["most_unacknowledged"] <= seen["credit"]
