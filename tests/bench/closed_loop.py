#!/usr/bin/env python3
"""Four ranks of two micro-batches each with exact clipping, through Ballast, beside the same training in torch.

    closed_loop.py [--quick] [--json FILE]

The quick start's model; 16 pieces of text a step, dealt to the ranks and micro-batches. torch adds up the gradients of all
eight parts, clips them with clip_grad_norm_ and steps its AdamW; Ballast's ranks send theirs, each from a thread of its own,
and the daemon does the rest, with fp32 weights and moments and with its compressed default. Both see the same batches, and
both are free to drift apart. The held-out loss, a mean over the last evaluations, is compared by seed; the bound is how far
torch's own seeds lie apart.
"""

import json
import statistics
import threading

import ballast
import torch
import trainer
from trainer import king_james

RANKS, MICROS, PIECES = 4, 2, 2
MAX_NORM = 0.5
EVALUATE_EVERY, LAST = 5, 8
FORMATS = {"fp32": {"master": "fp32", "state": "fp32"}, "default": {}}


class Data:
    """The batches of one seed, [step][rank][micro], and what is evaluated on."""

    def __init__(self, seed: int, steps: int):
        text = king_james.load_text()
        split = len(text) * 9 // 10
        random, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(0)
        self.held_out = [king_james.draw_batch(text[split:], 32, fixed) for _ in range(2)]
        self.steps = [
            [[king_james.draw_batch(text[:split], PIECES, random) for _ in range(MICROS)] for _ in range(RANKS)]
            for _ in range(steps)
        ]


class Curve:
    """Held-out losses along a training, and how many of its steps were clipped."""

    def __init__(self):
        self.losses: list[float] = []
        self.clipped = 0

    def after(self, step: int, model, data: Data, norm: float):
        self.clipped += norm > MAX_NORM
        if step % EVALUATE_EVERY == EVALUATE_EVERY - 1:
            self.losses.append(king_james.held_out_loss(model, data.held_out))

    def end(self) -> float:
        return statistics.fmean(self.losses[-LAST:])


def make_model(seed: int):
    torch.manual_seed(seed)
    return king_james.ByteModel()


def train_torch(seed: int, data: Data) -> Curve:
    model, curve = make_model(seed), Curve()
    optimizer = torch.optim.AdamW(model.parameters(), **king_james.LEARNING)
    for step, ranks in enumerate(data.steps):
        for batch in (batch for micros in ranks for batch in micros):
            (model.loss(batch) / (RANKS * MICROS)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        curve.after(step, model, data, norm)
    return curve


def train_rank(rank: int, model, options: dict, data: Data, curve: Curve | None):
    with ballast.AdamW(
        model.named_parameters(),
        **king_james.LEARNING,
        **options,
        rank=rank,
        world=RANKS,
        max_grad_norm=MAX_NORM,
        gradient_accumulation_steps=MICROS,
    ) as optimizer:
        for step, ranks in enumerate(data.steps):
            for batch in ranks[rank]:
                (model.loss(batch) / MICROS).backward()
            optimizer.step()
            optimizer.zero_grad()
            if curve is not None:
                curve.after(step, model, data, optimizer.last_result.grad_norm)


def train_ballast(seed: int, data: Data, options: dict) -> Curve:
    models = [make_model(seed) for _ in range(RANKS)]  # one after another: seeding is the process's
    curve, errors = Curve(), []

    def run(rank: int):
        try:
            train_rank(rank, models[rank], options, data, curve if rank == 0 else None)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for rank in range(1, RANKS):
        for mine, other in zip(models[0].parameters(), models[rank].parameters()):
            assert torch.equal(mine, other), f"rank {rank} has other weights than rank 0"
    return curve


def main():
    arguments = trainer.parse_options(__doc__, quick="60 steps instead of 200")
    steps, seeds = (60 if arguments.quick else 200), (1, 2, 3)
    torch.set_num_threads(1)
    ends: dict[str, list[float]] = {"torch": [], **{name: [] for name in FORMATS}}
    with trainer.own_daemon() as daemon:
        for seed in seeds:
            data = Data(seed, steps)
            curve = train_torch(seed, data)
            ends["torch"].append(curve.end())
            print(f"seed {seed}: torch {curve.end():.4f}, {curve.clipped} of {steps} steps clipped", flush=True)
            for name, formats in FORMATS.items():
                options = {"server": daemon.server, "run": f"closed-loop-{name}-{seed}", **formats}
                ends[name].append(train_ballast(seed, data, options).end())
                print(f"seed {seed}: Ballast, {name}: {ends[name][-1]:.4f}", flush=True)
    spread = max(ends["torch"]) - min(ends["torch"])
    print(f"torch's seeds lie {spread:.4f} apart")
    rows = []
    for name in FORMATS:
        furthest = max((mine - theirs for mine, theirs in zip(ends[name], ends["torch"])), key=abs)
        print(f"Ballast, {name}: minus torch of the same seed, at most {furthest:+.4f}")
        rows.append({"name": f"closed loop, {name}: held-out loss minus torch's", "value": furthest, "unit": "nats"})
        rows[-1] |= {"bound": spread, "ratio": abs(furthest) / spread, "n": len(seeds)}
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
