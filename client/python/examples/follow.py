#!/usr/bin/env python3
"""Evaluates king_james.py's model in a process of its own, while another trains it.

    python client/python/examples/follow.py                        # starts a ballastd, which ends with it
    python client/python/examples/follow.py --steps 300 --every 20 --server node7:7700

The trainer's optimizer lets readers follow its run: follow=. The evaluator's model gets the weights by ballast.follow, and
the trainer does not wait for it. Another reader of such a run: generate.py, which writes text.
"""

import argparse
import multiprocessing
import os
import sys
from pathlib import Path

import torch

import ballast

sys.path.insert(0, str(Path(__file__).parent))
from king_james import BATCH, LEARNING, ByteModel, draw_batch, held_out_loss, load_text  # noqa: E402


def train(options, text, evaluator) -> None:
    """Tells the evaluator where the run is, once it is there."""
    torch.manual_seed(1)
    model, random = ByteModel(), torch.Generator().manual_seed(1)
    readers = {"follow": ballast.Follow(every=options.every)}
    with ballast.AdamW(
        model.named_parameters(), **LEARNING, server=options.server, run=options.run, **readers
    ) as optimizer:
        for step in range(1, options.steps + 1):
            loss = model.loss(draw_batch(text, BATCH, random))
            loss.backward()
            optimizer.step(loss=loss)
            if step == 1:
                evaluator.send(optimizer.server)
        evaluator.poll(None)  # until it has ended: a daemon of the trainer's own ends with the trainer


def evaluate(options, text, server, trainer) -> None:
    model = ByteModel()
    batches = [draw_batch(text, 32, torch.Generator().manual_seed(0)) for _ in range(2)]
    with ballast.follow(model, server=server, run=options.run, every=options.every) as follower:
        step, last = 0, options.steps - options.steps % options.every
        while step < last:
            if not follower.wait(step=step + 1, timeout=1):
                if not trainer.is_alive():
                    return
                continue
            with follower.held() as version:
                loss = held_out_loss(model, batches)
            step = version.step
            came = f"{version.received_bytes / 2**20:.2f} of {version.whole_bytes / 2**20:.2f} MiB"
            print(f"step {step:4}  held-out loss {loss:.4f}  {came}  {version.staleness_s:.2f} s old", flush=True)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps from one version to the next")
    parser.add_argument("--server", help="the daemon's address (default: $BALLAST_SERVER, else one of its own)")
    parser.add_argument(
        "--run", default=f"follow-{os.getpid()}", help="the run's name on the daemon (default: a new one)"
    )
    options = parser.parse_args()
    if options.steps < 1 or options.every < 1:
        parser.error("--steps and --every must be at least 1")
    return options


def main():
    options, text = parse_options(), load_text()
    torch.set_num_threads(1)
    split = len(text) * 9 // 10
    processes = multiprocessing.get_context("spawn")
    here, there = processes.Pipe()
    trainer = processes.Process(target=train, args=(options, text[:split], there), daemon=True)
    trainer.start()
    there.close()  # so that its end is heard here
    try:
        evaluate(options, text[split:], here.recv(), trainer)
    except EOFError:
        print("follow.py: the trainer has ended before its first step", file=sys.stderr)
    here.close()
    trainer.join()
    sys.exit(trainer.exitcode)


if __name__ == "__main__":
    main()
