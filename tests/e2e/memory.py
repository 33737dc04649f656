"""Compares what the daemon holds while a model of so many parameters trains with what `ballastctl plan` said before.

    memory.py PARAMETERS [release | staged]

Stored bytes, the window of gradients under way and the send slots, in `staged` also a step's gradients; nothing that
grows with the steps.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from daemon import Daemon, plain_environment

TENSORS = 100
STEPS = 3
# Beside what the daemon takes before the first run and the plan: buffers of sockets and of gRPC, stacks, and what the
# allocator does not give back. 33 MiB were measured with 200 million parameters.
BASE_BYTES = 64 << 20

TRAINER = """
import sys, torch, ballast
torch.set_num_threads(1)
each = int(sys.argv[2]) // int(sys.argv[3])
parameters = [(f"w{i}", torch.nn.Parameter(torch.zeros(each, dtype=torch.bfloat16))) for i in range(int(sys.argv[3]))]
opt = ballast.AdamW(parameters, lr=1e-3, server=sys.argv[1], run="memory", commit=sys.argv[5],
                    gradient_accumulation_steps=1)
for _ in range(int(sys.argv[4])):
    sum((parameter * 0.5).sum() for _, parameter in parameters).backward()
    opt.step()
"""


def status_bytes(pid: int, field: str) -> int:
    """VmRSS or VmHWM, its peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def measure(folder: Path, parameters: int, commit: str) -> dict[str, int]:
    """planned: by `ballastctl plan`; idle, peak: resident bytes of the daemon; moved: payload of the training."""
    with Daemon(folder, "--memory_limit", "4GiB") as daemon:
        asked = ["--parameters", str(parameters), "--tensors", str(TENSORS), "--commit", commit]
        printed = daemon.ctl("plan", *asked, "--json")
        assert printed.returncode == 0, printed.stdout + printed.stderr
        plan = json.loads(printed.stdout)
        planned = sum(
            int(plan["server"].get(key, 0)) for key in ("weights", "momentum", "variance", "gradients", "staging")
        )
        idle = status_bytes(daemon.process.pid, "VmRSS")
        command = [sys.executable, "-c", TRAINER, daemon.server, str(parameters), str(TENSORS), str(STEPS), commit]
        trained = subprocess.run(command, capture_output=True, text=True, timeout=600, env=plain_environment())
        assert trained.returncode == 0, trained.stderr
        peak = status_bytes(daemon.process.pid, "VmHWM")
        metrics = daemon.get("/metrics")[1]
    lines = [line for line in metrics.splitlines() if line.startswith("ballast_received_bytes_total{")]
    received = sum(int(float(line.split()[-1])) for line in lines)  # over all transports
    return {"planned": planned, "idle": idle, "peak": peak, "received": received}


def check(figures: dict[str, int], parameters: int, base: int) -> None:
    assert figures["received"] == 2 * parameters * STEPS
    assert figures["peak"] <= figures["idle"] + figures["planned"] + base, figures
    # The plan is no overestimate either; the window of gradients need not be full at any time.
    assert figures["peak"] >= figures["idle"] + 0.8 * figures["planned"] - base, figures


def main() -> None:
    parameters, commit = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "release"
    with tempfile.TemporaryDirectory(prefix="ballast-memory-") as folder:
        figures = measure(Path(folder), parameters, commit)
    print(", ".join(f"{name} {count / 2**20:.1f} MiB" for name, count in figures.items()))
    check(figures, parameters, BASE_BYTES)


if __name__ == "__main__":
    main()
