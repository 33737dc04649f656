"""How well HF Trainer's models are in the end: trained by torch's AdamW, by ballast's with its default formats (8-bit
moments, weights of 24 bits, stochastic rounding), and by torch's made worse on purpose.

    trainer_quality.py FOLDER --server HOST:PORT [--seeds N] [--steps N]

Prints one JSON object: by optimizer, the held-out loss at each seed. A seed is that of the model and of the order of the
data, the same for all optimizers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ballast
from framework_setting import BETAS, DECAY, LENGTH, LR, VOCABULARY, language_model

STRIDES = 4
HELD_OUT = 64

Make = Callable[..., torch.optim.Optimizer]
AdamW: Make = partial(torch.optim.AdamW, lr=LR, betas=BETAS, weight_decay=DECAY)


def optimizers(server: str, seed: int) -> dict[str, Make]:
    return {
        "torch": AdamW,
        "ballast": partial(ballast.AdamW, lr=LR, betas=BETAS, weight_decay=DECAY, server=server, run=f"quality-{seed}"),
        "half the learning rate": partial(AdamW, lr=LR / 2),
    }


def all_sequences() -> tuple[list[dict[str, list[int]]], list[dict[str, list[int]]]]:
    """Those to train and those held out: every start with every stride, once."""
    starts = torch.arange(VOCABULARY).repeat_interleave(STRIDES)
    strides = torch.arange(1, STRIDES + 1).repeat(VOCABULARY)
    tokens = (starts[:, None] + strides[:, None] * torch.arange(LENGTH)) % VOCABULARY
    mixed = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1))]
    rows = [{"input_ids": row, "labels": row} for row in mixed.tolist()]
    return rows[HELD_OUT:], rows[:HELD_OUT]


def held_out_loss(make: Make, seed: int, options: argparse.Namespace) -> float:
    from transformers import Trainer, TrainingArguments

    training, held_out = all_sequences()
    model = language_model(seed)
    arguments = TrainingArguments(
        output_dir=str(options.folder),
        per_device_train_batch_size=8,
        per_device_eval_batch_size=HELD_OUT,
        max_steps=options.steps,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=seed,
    )
    optimizer = make(model.named_parameters())
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=training,
        eval_dataset=held_out,
        optimizers=(optimizer, None),
    )
    trainer.train()
    return float(trainer.evaluate()["eval_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--server", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    losses: dict[str, Any] = {}
    for seed in range(1, options.seeds + 1):
        for name, make in optimizers(options.server, seed).items():
            losses.setdefault(name, []).append(held_out_loss(make, seed, options))
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
