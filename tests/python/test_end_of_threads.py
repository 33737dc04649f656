"""A thread that Python does not wait for, in a call of the client while the interpreter comes to its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from daemon import Daemon

# A reader's daemon is killed, and its process ends while the reader's thread tries to reach it again.
READER = """
import sys, threading, warnings
import torch, ballast
warnings.simplefilter("ignore")
server = sys.argv[1]
weight = torch.nn.Parameter(torch.ones(8))
optimizer = ballast.SGD([("w", weight)], lr=0.1, server=server, run="r", follow=True)
weight.sum().backward()
optimizer.step()
reader = ballast.Subscriber(server=server, run="r")
threading.Thread(target=lambda: [reader.next(1) for _ in iter(int, 1)], daemon=True).start()
print("reads", flush=True)
sys.stdin.readline()
"""


def test_a_readers_thread_ends_its_process_by_no_signal(tmp_path: Path) -> None:
    """It wants the interpreter's lock, which CPython before 3.14 answers with the thread's end. The moment is chance."""
    for _ in range(4):
        with Daemon() as daemon:
            reader = subprocess.Popen(
                [sys.executable, "-c", READER, daemon.server],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert reader.stdout is not None and reader.stdout.readline() == "reads\n"
            daemon.kill()
        assert reader.stderr is not None and any("following run 'r': lost the daemon" in line for line in reader.stderr)
        said = reader.communicate("\n", timeout=60)[1]
        assert reader.returncode == 0, said
