#!/usr/bin/env python3
"""Other people's AdamW on this machine's GPU, a parameter at a time, beside a device-to-device copy of the same bytes.

    tests/bench/gpu_peers.py [--json FILE] [--rounds N] [--seconds S] [--largest BITS]

One flat tensor, the peer's own defaults. One JSON object a line, in the shape of gpu_bench's; a peer that cannot be
imported, or that fails, has a line with the reason. Timed with CUDA events; the copy and the peers take turns round by
round. A round works on 2^26 parameters at least: smaller tensors are stepped one after the other, each with an
optimizer of its own. Exit code 77 where there is no GPU, or no torch to ask for one.
"""

import argparse
import json
import sys
import time
from importlib.metadata import version

ROUND = 1 << 26
NO_GPU = 77


def torch_fused(parameter):
    import torch

    return torch.optim.AdamW([parameter], fused=True), f"torch {version('torch')}"


def flashoptim_24(parameter):
    from flashoptim import FlashAdamW

    return FlashAdamW([parameter], lr=1e-3), f"flashoptim {version('flashoptim')}"


def bitsandbytes_8bit(parameter):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit([parameter]), f"bitsandbytes {version('bitsandbytes')}"


# Name: what makes it, the dtype of weights and gradient, and the bytes a parameter's step moves at least. Weights and
# gradient in fp32: 4 read and 4 written, 4 read; in bf16: half. torch keeps two moments in the weights' dtype.
# flashoptim: 24-bit weights, a byte each of m and v, a scale of 2 bytes each for 32. bitsandbytes: a byte each of m and
# v, a scale of 4 bytes each for 256.
PEERS = {
    "torch AdamW fused, fp32": (torch_fused, "float32", 3 * 4 + 2 * 2 * 4),
    "torch AdamW fused, bf16": (torch_fused, "bfloat16", 3 * 2 + 2 * 2 * 2),
    "flashoptim FlashAdamW, bf16": (flashoptim_24, "bfloat16", 2 + 2 * (3 + 2 * (1 + 2 / 32))),
    "bitsandbytes AdamW8bit, fp32": (bitsandbytes_8bit, "float32", 3 * 4 + 2 * 2 * (1 + 4 / 256)),
    "bitsandbytes AdamW8bit, bf16": (bitsandbytes_8bit, "bfloat16", 3 * 2 + 2 * 2 * (1 + 4 / 256)),
}


def quartiles(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [round(ordered[round(share * (len(ordered) - 1))], 6) for share in (0.25, 0.5, 0.75)]


def make(name: str, elements: int):
    """The steps of a round, as one function, and the peer's version. Raises whatever the peer raises."""
    import torch

    maker, dtype, _ = PEERS[name]
    optimizers = []
    for _ in range(max(1, ROUND // elements)):
        parameter = torch.nn.Parameter((0.02 * torch.randn(elements, device="cuda")).to(getattr(torch, dtype)))
        parameter.grad = (1e-3 * torch.randn(elements, device="cuda")).to(getattr(torch, dtype))
        optimizer, about = maker(parameter)
        optimizers.append(optimizer)

    def steps():
        for one in optimizers:
            one.step()

    return steps, about


def make_copy(byte_count: int):
    """A copy that reads half of the bytes and writes half, in buffers of 4 GiB at most."""
    import torch

    half = byte_count // 2
    buffer = min(half, 4 << 30)
    source = torch.randint(0, 256, (buffer,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy():
        for at in range(0, half, buffer):
            count = min(buffer, half - at)
            target[:count].copy_(source[:count])

    return copy


def seconds_of(work) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(name: str, elements: int, rounds: int) -> dict:
    step, about = make(name, elements)
    byte_each = PEERS[name][2]
    total = elements * max(1, ROUND // elements)
    copy = make_copy(int(total * byte_each))
    steps, copies = [], []
    for turn in range(rounds + 3):
        for work, taken in ((step, steps), (copy, copies))[:: 1 if turn % 2 else -1]:
            seconds = seconds_of(work)
            if turn >= 3:
                taken.append(seconds)
    return {
        "peer": name,
        "version": about,
        "elements": elements,
        "bytes_per_parameter": byte_each,
        "gparams_per_second": quartiles([total / s / 1e9 for s in steps]),
        "share_of_copy": quartiles([c / s for c, s in zip(copies, steps, strict=True)]),
        "copy_gb_per_second": quartiles([total * byte_each / c / 1e9 for c in copies]),
        "rounds": rounds,
    }


# Rows and columns, as gpu_matrices.cc has them.
MATRICES = ((1024, 1024), (4096, 4096), (4096, 14336), (14336, 4096))


def matrix_sides(rows: int, columns: int) -> dict:
    """What is done of one matrix, by what it is called: torch's rule, and the products that any such step needs."""
    import torch

    parameter = torch.nn.Parameter(0.02 * torch.randn(rows, columns, device="cuda"))
    parameter.grad = 1e-3 * torch.randn(rows, columns, device="cuda")
    muon = torch.optim.Muon([parameter])
    x = torch.randn(min(rows, columns), max(rows, columns), device="cuda", dtype=torch.bfloat16)

    def products():
        for _ in range(5):
            gram = x @ x.T
            (gram @ gram) @ x

    return {"torch.optim.Muon": muon.step, "matrix products alone, torch in bf16": products}


def measure_matrices(rounds: int, out):
    import torch

    for rows, columns in MATRICES:
        name = f"{rows} x {columns}"
        try:
            sides = matrix_sides(rows, columns)
            taken = {what: [] for what in sides}
            for turn in range(rounds + 3):
                for what, work in sides.items():
                    seconds = seconds_of(work)
                    if turn >= 3:
                        taken[what].append(1e3 * seconds)
        except Exception as error:  # A peer may fail in any way; the line says in which.
            print(json.dumps({"matrix": name, "what": "torch", "skipped": reason(error)}), file=out, flush=True)
            continue
        for what, ms in taken.items():
            print(
                json.dumps({"matrix": name, "what": what, "ms": quartiles(ms), "rounds": rounds}), file=out, flush=True
            )
        torch.cuda.empty_cache()


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def measure_all(options, out):
    import torch

    began = time.monotonic()
    measure_matrices(options.rounds, out)
    for bits in (20, 24, 28, 30):
        for name in PEERS:
            if bits > options.largest:
                continue
            row = {"peer": name, "elements": 1 << bits}
            if time.monotonic() - began > options.seconds:
                row["skipped"] = "no time left"
            else:
                try:
                    row = measure(name, 1 << bits, options.rounds)
                except Exception as error:  # A peer may fail in any way; the line says in which.
                    row["skipped"] = reason(error)
            torch.cuda.empty_cache()
            if "skipped" in row:
                print(f"!! NOT MEASURED: {name} at 2^{bits}: {row['skipped']}", file=sys.stderr)
            print(json.dumps(row), file=out, flush=True)


def why_no_gpu() -> str:
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    return "" if torch.cuda.is_available() else "torch sees none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=argparse.FileType("w"), default=sys.stdout)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--largest", type=int, default=30)
    options = parser.parse_args()
    if why := why_no_gpu():
        print(f"!! NO GPU ({why}): NO PEER WAS MEASURED", file=sys.stderr)
        return NO_GPU
    measure_all(options, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
