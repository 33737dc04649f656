#!/usr/bin/env python3
"""A training step through Ballast beside the same step with torch's own AdamW, taken in turns.

    step_overhead.py [--quick] [--json FILE]

The quick start's model; torch on one thread, the daemon on one. Each turn makes one step with each optimizer on the same
batch, in alternating order, so that whatever else the machine does strikes both.
"""

import json
import statistics
import time

import ballast
import torch
import trainer
from comparison import noise
from trainer import king_james


def make_side(server: str | None):
    torch.manual_seed(1)
    model = king_james.ByteModel()
    if server is None:
        return model, torch.optim.AdamW(model.parameters(), **king_james.LEARNING)
    optimizer = ballast.AdamW(model.named_parameters(), **king_james.LEARNING, server=server, run="step-overhead")
    return model, optimizer


def one_step(model, optimizer, batch) -> float:
    started = time.perf_counter()
    model.loss(batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - started


def measure(server: str, turns: int, warmup: int = 5):
    sides = {"ballast": make_side(server), "torch": make_side(None)}
    seconds, pushed, pulled = {"ballast": [], "torch": []}, [], []
    text, random = king_james.load_text(), torch.Generator().manual_seed(1)
    for turn in range(turns + warmup):
        batch = king_james.draw_batch(text, king_james.BATCH, random)
        for name in sorted(sides, reverse=turn % 2 == 1):
            taken = one_step(*sides[name], batch)
            if turn >= warmup:
                seconds[name].append(taken)
        timing = sides["ballast"][1].last_result.timing
        if turn >= warmup:
            pushed.append(timing.pushed_bytes_in_backward / timing.pushed_bytes)
            pulled.append(timing.pulled_bytes_in_backward / timing.pulled_bytes)
    return seconds, pushed, pulled


def main():
    options = trainer.parse_options(__doc__, quick="20 turns instead of 100")
    turns = 20 if options.quick else 100
    torch.set_num_threads(1)
    with trainer.own_daemon() as daemon:
        seconds, pushed, pulled = measure(daemon.server, turns)

    rows, median = [], {}
    for name, values in seconds.items():
        low, median[name], high = trainer.quartiles(values)
        print(
            f"step with {name:8} median {1000 * median[name]:.1f} ms, quartiles {1000 * low:.1f} and {1000 * high:.1f}"
        )
    rows.append({"name": "step with Ballast", "value": 1000 * median["ballast"], "unit": "ms"})
    rows[-1] |= {"bound": 1000 * median["torch"], "ratio": median["ballast"] / median["torch"], "n": turns}
    rows[-1] |= {"noise": noise([ours / theirs for ours, theirs in zip(seconds["ballast"], seconds["torch"])])}
    print(f"ratio of the medians {rows[-1]['ratio']:.3f}")
    for what, shares in (("gradient bytes sent", pushed), ("weight bytes received", pulled)):
        share = statistics.median(shares)
        print(f"{what} during backward: {100 * share:.0f} % (median)")
        rows.append({"name": f"{what} during backward", "value": 100 * share, "unit": "%"})
        rows[-1] |= {"bound": 100.0, "ratio": share, "n": turns, "noise": noise(shares)}
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
