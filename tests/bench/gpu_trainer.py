#!/usr/bin/env python3
"""A model on a GPU trained through the Python client: the right weights, and a step's time beside an optimizer on the GPU.

    gpu_trainer.py FOLDER [--device cuda] [--json FILE] [--steps N] [--seconds S] [--tiny]

FOLDER holds bin/ballastd (`deploy/setup.sh portable`). Two parts:
  checks   a small transformer, 20 steps each: gradients that are staged (ballast.gradient_staging) give the losses, to the bit,
           of gradients that the trainer waits for; on a daemon on the GPU those of one on CPUs; through that GPU's memory, and by
           NCCL where torch's libnccl.so.2 is found, those that go through the host's; overlap_forward, accumulation
           and autocast with ballast.GradScaler end with the daemon's weights on the GPU, to the bit
  steps    a transformer in bf16 through Ballast, by each transport, with the daemon on the same GPU and on the host's CPUs,
           beside torch's fused AdamW on the GPU, whose weights are bf16 too, and fp32 under autocast: seconds of a step, of it until backward() returned, and the GPU memory of weights,
           gradients and state at most, activations included
One JSON object a line. --tiny: a small model for the second part too, to try the program, with --device cpu without a GPU. Exit
code 77, and a line that says why, where torch, the client or a GPU is missing; 1 where a check failed.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from gpu_training import SKIPPED, daemon

CHECK_STEPS = 20
ON_CPUS = ", daemon on CPUs"
BETWEEN_GPUS = ("gpu", "nccl")


def why_not(device: str) -> str:
    try:
        import ballast  # noqa: F401
        import torch
    except ImportError as error:
        return f"cannot import {error.name}: {error}"
    return "" if device == "cpu" or torch.cuda.is_available() else "torch sees no GPU"


def make_model(width: int, layers: int, words: int, device: str, dtype: str):
    """A decoder of pre-norm blocks whose weights are drawn from the seed."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = width // 64
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, length, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(words, width), *(Block() for _ in range(layers)), nn.Linear(width, words))
    return model.to(device, getattr(torch, dtype))


def batches(words: int, batch: int, length: int, device: str):
    import torch

    random = torch.Generator().manual_seed(1)
    while True:
        text = torch.randint(0, words, (batch, length + 1), generator=random).cumsum(1) % words
        yield text[:, :-1].to(device), text[:, 1:].to(device)


def loss_of(model, batch, autocast: str = ""):
    import torch

    inputs, targets = batch
    with torch.autocast(inputs.device.type, getattr(torch, autocast or "bfloat16"), enabled=bool(autocast)):
        logits = model(inputs)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# --- checks -----------------------------------------------------------------------------------------------------------


def train_small(server: str, run: str, device: str, accumulation: int = 1, scaled: bool = False, **options):
    """The losses of CHECK_STEPS steps, and how many tensors differ at the end from the daemon's."""
    import ballast

    model = make_model(128, 2, 512, device, "float32")
    opt = ballast.AdamW(
        model.named_parameters(), lr=1e-3, server=server, run=run, gradient_accumulation_steps=accumulation, **options
    )
    if options.get("transport") in BETWEEN_GPUS:
        await_gpu(opt)
    scaler = ballast.GradScaler(opt) if scaled else None
    batch, losses = next(batches(512, 4, 64, device)), []
    for _ in range(CHECK_STEPS):
        for _ in range(accumulation):
            loss = loss_of(model, batch, "float16" if scaled else "") / accumulation
            (scaler.scale(loss) if scaler else loss).backward()
        scaler.step(opt) if scaler else opt.step()
        if scaler:
            scaler.update()
        opt.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses, differing(opt, model)


def await_gpu(opt):
    """Until gradients go to a GPU's memory: NCCL connects while a trainer trains, and would be found idle."""
    opt.connect()
    client, by = opt._membership.connected(), time.monotonic() + 30
    while not client.shares_gpu:
        if time.monotonic() > by:
            raise RuntimeError("after 30 s gradients do not go to a GPU's memory; the log says why")
        time.sleep(0.01)


def nccl_folder() -> str:
    """Where torch's libnccl.so.2 is; empty: not found."""
    import importlib.util

    found = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    folders = [f"{folder}/lib" for folder in found.submodule_search_locations or ()] if found else []
    return next((folder for folder in folders if Path(folder, "libnccl.so.2").exists()), "")


def daemon_for(transport: str, ballastd: Path, place: str):
    if transport != "nccl":
        return daemon(ballastd, place)
    # NCCL refuses two processes on one GPU, unless they seem to be on different hosts.
    os.environ["NCCL_HOSTID"] = "trainer"
    return daemon(ballastd, place, "--nccl", NCCL_HOSTID="daemon", LD_LIBRARY_PATH=with_libraries(nccl_folder()))


def with_libraries(folder: str) -> str:
    return ":".join(path for path in (folder, os.environ.get("LD_LIBRARY_PATH", "")) if path)


def differing(opt, model) -> int:
    """How many of the model's tensors are not what the daemon has of them."""
    import torch

    opt.wait()
    here = [parameter.detach().clone() for parameter in model.parameters()]
    opt.pull()
    return sum(not torch.equal(mine, parameter) for mine, parameter in zip(here, model.parameters()))


def run_id(name: str) -> str:
    return name.lower().replace(" ", "-").replace("_", "-")


def check(row: dict, holds: bool, out) -> bool:
    print(json.dumps(row | {"holds": holds}), file=out, flush=True)
    return holds


@contextmanager
def deterministic():
    """The same bits whenever the same is computed: without the kernels that add in no fixed order."""
    import torch

    cuda = torch.backends.cuda
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before cuBLAS is first called
    cuda.enable_flash_sdp(False), cuda.enable_mem_efficient_sdp(False), cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    cuda.enable_flash_sdp(True), cuda.enable_mem_efficient_sdp(True), cuda.enable_cudnn_sdp(True)


@contextmanager
def unstaged():
    """Gradients leave a GPU when the trainer has waited for them."""
    from ballast import binding, gradient_staging

    kept = gradient_staging.is_staged
    gradient_staging.is_staged = binding.is_staged = lambda _: False
    try:
        yield
    finally:
        gradient_staging.is_staged = binding.is_staged = kept


def ways_between_gpus(device: str, out) -> list[tuple[str, str]]:
    if device != "cuda":
        return []
    ways = [("the GPU's memory", "gpu")]
    if nccl_folder():
        return [*ways, ("NCCL", "nccl")]
    print(json.dumps({"check": "NCCL", "skipped": "there is no libnccl.so.2 beside torch"}), file=out, flush=True)
    return ways


def checks(ballastd: Path, device: str, out) -> bool:

    def run(name: str, place: str, **options):
        with daemon_for(options.get("transport", ""), ballastd, place) as server:
            losses, differ = train_small(server, run_id(name), device, **options)
        row = {"check": name, "last_loss": losses[-1], "differing": differ}
        return losses, check(row, differ == 0 and math.isfinite(losses[-1]) and losses[-1] < losses[0], out)

    gpu = "cuda:0" if device == "cuda" else "cpu"
    staged, well = run("staged", gpu)
    with unstaged():
        waited, one = run("waited for", gpu)
    well &= one & check({"check": "staged gives the losses of waited for"}, staged == waited, out)
    on_cpu, one = run("daemon on CPUs", "cpu")
    well &= one & check({"check": "a daemon on CPUs gives the losses of one on a GPU"}, staged == on_cpu, out)
    for name, transport in ways_between_gpus(device, out):
        try:
            through, one = run(f"by {name}", gpu, transport=transport)
            well &= one & check({"check": f"{name} gives the losses of the host's memory"}, staged == through, out)
        except Exception as error:  # the others are to run too
            well &= check({"check": f"by {name}", "error": f"{type(error).__name__}: {error}"}, False, out)
    for name, options in (
        ("grpc", {"transport": "grpc"}),
        ("accumulation", {"accumulation": 3}),
        ("overlap_forward", {"overlap_forward": True}),
        ("staged commit", {"commit": "staged", "max_grad_norm": 1.0}),
        ("autocast and GradScaler", {"scaled": True}),
    ):
        try:
            well &= run(name, gpu, **options)[1]
        except Exception as error:  # the others are to run too
            well &= check({"check": name, "error": f"{type(error).__name__}: {error}"}, False, out)
    return well


# --- steps ------------------------------------------------------------------------------------------------------------


def make_optimizer(side: str, model, server: str):
    import torch

    if side.startswith("torch"):
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    import ballast

    transport = side.removesuffix(ON_CPUS).split()[-1]
    return ballast.AdamW(model.named_parameters(), lr=1e-4, server=server, run="steps", transport=transport)


def synchronize(device: str):
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def time_steps(side: str, size: dict, tokens: int, device: str, server: str, steps: int) -> dict:
    """Medians over `steps`, after three that do not count."""
    import torch

    autocast = "bfloat16" if side.endswith("fp32, autocast") else ""
    model = make_model(size["width"], size["layers"], size["words"], device, "float32" if autocast else "bfloat16")
    opt = make_optimizer(side, model, server)
    if side.split()[-1] in BETWEEN_GPUS:
        await_gpu(opt)
    data = batches(size["words"], tokens // size["length"], size["length"], device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    whole, backward = [], []
    for number in range(steps + 3):
        batch = next(data)
        synchronize(device)
        began = time.perf_counter()
        loss_of(model, batch, autocast).backward()
        computed = time.perf_counter()
        opt.step()
        opt.zero_grad(set_to_none=True)
        synchronize(device)
        if number >= 3:
            whole.append(time.perf_counter() - began)
            backward.append(computed - began)
    row = {"side": side, "tokens": tokens, "parameters": sum(p.numel() for p in model.parameters())}
    row |= {"step_s": statistics.median(whole), "backward_s": statistics.median(backward), "steps": steps}
    if device == "cuda":
        row["gpu_bytes"] = torch.cuda.max_memory_allocated()
    timing = getattr(getattr(opt, "last_result", None), "timing", None)
    if timing is not None:
        row["pushed_in_backward"] = timing.pushed_bytes_in_backward / timing.pushed_bytes
        row["pulled_in_backward"] = timing.pulled_bytes_in_backward / timing.pulled_bytes
    return row


def time_all(ballastd: Path, options, out):
    import torch

    size = {"width": 1024, "layers": 12, "words": 32768, "length": 1024}
    if options.tiny:
        size = {"width": 64, "layers": 1, "words": 512, "length": 64}
    began = time.monotonic()
    gpu = "cuda:0" if options.device == "cuda" else "cpu"
    for tokens in (16, 64) if not options.tiny else (1,):
        ours = (
            "ballast shm",
            f"ballast shm{ON_CPUS}",
            *(("ballast gpu",) if options.device == "cuda" else ()),
            *(("ballast nccl",) if options.device == "cuda" and nccl_folder() else ()),
            "ballast grpc",
        )
        for side in ("torch bf16", "torch fp32, autocast", *ours):
            if time.monotonic() - began > options.seconds:
                print(json.dumps({"side": side, "tokens": tokens, "skipped": "no time left"}), file=out, flush=True)
                continue
            place = "cpu" if side.endswith(ON_CPUS) else gpu
            with daemon_for(side.split()[-1], ballastd, place) as server:
                row = time_steps(side, size, tokens * size["length"], options.device, server, options.steps)
            print(json.dumps(row), file=out, flush=True)
            if options.device == "cuda":
                torch.cuda.empty_cache()


def parse_options(about: str, repeats: str, times: int, seconds: float):
    """What was asked for, and the daemon's program. Exits where it cannot run, saying why."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=argparse.FileType("w"), default=sys.stdout)
    parser.add_argument(repeats, type=int, default=times)
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    ballastd = (options.folder / "bin" / "ballastd").resolve()
    why = why_not(options.device) if ballastd.exists() else f"there is no {options.folder}/bin/ballastd"
    if why:
        print(f"!! SKIPPED: {why}")
        sys.exit(SKIPPED)
    return options, ballastd


def main() -> int:
    options, ballastd = parse_options(__doc__, "--steps", 10, 80)
    with deterministic():
        well = checks(ballastd, options.device, options.json)
    time_all(ballastd, options, options.json)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
