#!/usr/bin/env python3
"""One trainer of overlap.py: answers each line of its input with one step, as a line of JSON.

    overlap_trainer.py SIDE MODEL --rank R --world W [--server ADDRESS | --port PORT]

SIDE: ballast, or torch: fused AdamW, under DistributedDataParallel over gloo where the world is larger than one.
"""

import argparse
import json
import os
import sys
import time

import torch
from torch.nn.parallel import DistributedDataParallel
from trainer import king_james

MODELS = {"small": {}, "large": {"width": 768, "layers": 8, "heads": 12}}
PIECES = {"small": king_james.BATCH, "large": 1}


def make(options):
    """The module that is called, and its optimizer."""
    torch.manual_seed(1)
    model = king_james.ByteModel(**MODELS[options.model])
    if options.side == "ballast":
        import ballast

        ranks = {"rank": options.rank, "world": options.world}
        return model, ballast.AdamW(
            model.named_parameters(), **king_james.LEARNING, server=options.server, run=options.run, **ranks
        )
    if options.world > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port)}
        torch.distributed.init_process_group("gloo", rank=options.rank, world_size=options.world)
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), **king_james.LEARNING, fused=True)


def step(model, optimizer, batch) -> dict:
    """Seconds of the whole step and of forward and backward in it; and what Ballast measured of it."""
    inputs, targets = batch
    started = time.perf_counter()
    torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    computed = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    answer = {"step_s": time.perf_counter() - started, "compute_s": computed - started}
    if hasattr(optimizer, "last_result"):
        timing = optimizer.last_result.timing
        answer["pushed"] = timing.pushed_bytes_in_backward / timing.pushed_bytes
        answer["pulled"] = timing.pulled_bytes_in_backward / timing.pulled_bytes
    return answer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("ballast", "torch"))
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--server")
    parser.add_argument("--run")
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, optimizer = make(options)
    text, random = king_james.load_text(), torch.Generator().manual_seed(options.rank)
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"parameters": parameters}), flush=True)
    for _ in sys.stdin:
        batch = king_james.draw_batch(text, PIECES[options.model], random)
        print(json.dumps(step(model, optimizer, batch)), flush=True)


if __name__ == "__main__":
    main()
