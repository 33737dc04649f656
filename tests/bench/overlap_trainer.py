#!/usr/bin/env python3
"""One trainer of overlap.py and end_to_end.py: answers each line of its input with one step, as a line of JSON.

    overlap_trainer.py SIDE MODEL --rank R --world W [--threads N] [--server ADDRESS | --port PORT]

SIDE: ballast; torch: fused AdamW, under DistributedDataParallel over gloo where the world is larger than one; deepspeed: ZeRO
stage 2 with its optimizer offloaded to CPUAdam, one rank. An answer of `bytes`: what the process has resident at most in the
step, over what it had before the model was made.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from trainer import king_james

from memory import status_bytes  # tests/e2e, by trainer

MODELS = {
    "small": {},
    "large": {"width": 768, "layers": 8, "heads": 12},
    "larger": {"width": 1280, "layers": 15, "heads": 20},
}
PIECES = {"small": king_james.BATCH, "large": 1, "larger": 1}


def make(options):
    """The module that is called, and its optimizer."""
    torch.manual_seed(1)
    model = king_james.ByteModel(**MODELS[options.model])
    if options.side == "ballast":
        import ballast

        place = {"rank": options.rank, "world": options.world, "transport": options.transport}
        return model, ballast.AdamW(
            model.named_parameters(), **king_james.LEARNING, server=options.server, run=options.run, **place
        )
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port)}
    if options.side == "deepspeed":
        return deepspeed_engine(model)
    if options.world > 1:
        torch.distributed.init_process_group("gloo", rank=options.rank, world_size=options.world)
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), **king_james.LEARNING, fused=True)


def deepspeed_engine(model):
    """It is its own optimizer: step() is all that there is to call."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    import deepspeed

    learning = king_james.LEARNING
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_batch_size": 1,
            "optimizer": {"type": "AdamW", "params": dict(learning)},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
    )
    return engine, engine


def most_resident() -> int:
    """Bytes at most, since this was last asked."""
    most = status_bytes(os.getpid(), "VmHWM")
    Path("/proc/self/clear_refs").write_text("5")
    return most


def step(model, optimizer, batch) -> dict:
    """Seconds of the whole step, of forward and backward in it, and of processors; and what Ballast measured of it."""
    inputs, targets = batch
    started, cpu = time.perf_counter(), time.process_time()
    loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.backward(loss) if model is optimizer else loss.backward()
    computed = time.perf_counter()
    optimizer.step()
    if model is not optimizer:
        optimizer.zero_grad(set_to_none=True)
    answer = {
        "step_s": time.perf_counter() - started,
        "compute_s": computed - started,
        "cpu_s": time.process_time() - cpu,
    }
    if getattr(optimizer, "last_result", None) is not None:
        answer |= hidden(optimizer.last_result.timing)
    return answer


def hidden(timing) -> dict:
    return {
        "pushed": timing.pushed_bytes_in_backward / timing.pushed_bytes,
        "pulled": timing.pulled_bytes_in_backward / timing.pulled_bytes,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("ballast", "torch", "deepspeed"))
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--server")
    parser.add_argument("--run")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--port", type=int)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # DeepSpeed prints
    torch.set_num_threads(options.threads)
    text, random = king_james.load_text(), torch.Generator().manual_seed(options.rank)
    before = status_bytes(os.getpid(), "VmRSS")
    model, optimizer = make(options)
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"parameters": parameters}), file=answers, flush=True)
    most_resident()
    for _ in sys.stdin:
        batch = king_james.draw_batch(text, PIECES[options.model], random)
        answer = step(model, optimizer, batch)
        print(json.dumps(answer | {"bytes": most_resident() - before}), file=answers, flush=True)


if __name__ == "__main__":
    main()
