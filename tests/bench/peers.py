#!/usr/bin/env python3
"""Other people's AdamW on the CPU, one step at a time on request; cpu_kernels.py takes turns between them.

    peers.py NAME --threads N [--elements N]

One flat tensor of fp32 weights and fp32 gradients, the peer's own defaults. The first line printed is a JSON object:
{"ready": "torch 2.13.0", "elements": ..., "bytes": ...} with the bytes that a parameter's step must move at least, or
{"absent": "why"}. After that every line of standard input is answered by the seconds of one step. The packages are
those of deploy/requirements-peers.txt; `deploy/setup.sh peers` puts them into an environment of their own. DeepSpeed
and torchao compile at their first step: they need g++, and ninja on the PATH.
"""

import argparse
import json
import os
import sys
import time
from importlib.metadata import version


def torch_adamw(parameter, **how):
    import torch

    return torch.optim.AdamW([parameter], **how), f"torch {version('torch')}"


def torchao_8bit(parameter):
    from torchao.optim import AdamW8bit

    return AdamW8bit([parameter]), f"torchao {version('torchao')}"


def deepspeed_cpu(parameter):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam([parameter], adamw_mode=True), f"deepspeed {version('deepspeed')}"


def bitsandbytes_8bit(parameter):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit([parameter]), f"bitsandbytes {version('bitsandbytes')}"


# fp32: reads w, m, v and g, writes w, m and v. 8 bits: reads w and g and writes w in fp32, a byte each of m and v.
FP32_BYTES = 4 * 4 + 3 * 4
PEERS = {
    "torch AdamW fused": (lambda p: torch_adamw(p, fused=True), FP32_BYTES),
    "torch AdamW foreach": (lambda p: torch_adamw(p, foreach=True), FP32_BYTES),
    "DeepSpeed CPUAdam": (deepspeed_cpu, FP32_BYTES),
    "torchao AdamW8bit": (torchao_8bit, 3 * 4 + 4 * (1 + 4 / 256)),
    "bitsandbytes AdamW8bit": (bitsandbytes_8bit, 3 * 4 + 4 * (1 + 4 / 256)),
}
# The fastest, which gain most by torch's memory being in huge pages. It is where the system always has them, and where
# torch is told to ask for them (THP_MEM_ALLOC_ENABLE=1), as the CPU device does.
IN_HUGE_PAGES = ("torch AdamW fused", "DeepSpeed CPUAdam")
# A step of these takes about 0.1 microseconds a parameter: an eighth of the elements is enough of it, and is said.
SLOW = {"torchao AdamW8bit": 8, "bitsandbytes AdamW8bit": 8}


def make(name: str, elements: int, threads: int):
    """The optimizer with a step behind it, which compiles and allocates, or raises whatever the peer raises."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    parameter = torch.nn.Parameter(0.02 * torch.randn(elements))
    parameter.grad = 1e-3 * torch.randn(elements)
    optimizer, about = PEERS[name][0](parameter)
    optimizer.step()
    return optimizer, about


def serve(optimizer, answers):
    for _ in sys.stdin:
        started = time.perf_counter()
        optimizer.step()
        print(time.perf_counter() - started, file=answers, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--elements", type=int, default=1 << 25)
    options = parser.parse_args()
    elements = options.elements // SLOW.get(options.name, 1)
    # What peers print while they load must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        optimizer, about = make(options.name, elements, options.threads)
    except Exception as error:  # A peer may fail in any way; the table says in which.
        reason = " ".join(str(error).split())[:200]
        print(json.dumps({"absent": f"{type(error).__name__}: {reason}"}), file=answers, flush=True)
        return
    ready = {"ready": about, "elements": elements, "bytes": PEERS[options.name][1]}
    print(json.dumps(ready), file=answers, flush=True)
    serve(optimizer, answers)


if __name__ == "__main__":
    main()
