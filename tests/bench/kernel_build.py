#!/usr/bin/env python3
"""How long the CPU kernels take to build from nothing, without a compiler cache, on this machine's processors.

    tests/bench/kernel_build.py [--limit SECONDS]     (default 180: what two processors may take)

Prints the seconds, the processors, the kernels and the isas; exits 1 beyond the limit.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build_seconds(folder: str) -> float:
    environment = os.environ | {"CCACHE_DISABLE": "1"}
    configure = ["cmake", "-S", ROOT / "kernels", "-B", folder, "-G", "Ninja"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL, env=environment)
    began = time.monotonic()
    subprocess.run(["cmake", "--build", folder], check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=180, help="seconds")
    limit = parser.parse_args().limit
    with tempfile.TemporaryDirectory() as folder:
        seconds = build_seconds(folder)
    load = os.getloadavg()[0]
    print(f"kernels built in {seconds:.0f} s on {os.cpu_count()} processors (load {load:.1f}); limit {limit:.0f} s")
    return 0 if seconds <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
