"""Training loops of frameworks as their users write them, on the same small model and data: one run by torch's AdamW, one
by ballast's, tell whether the optimizer was called as it must be.

    framework_loops.py KIND FOLDER LOOP... [--server HOST:PORT] [--stop-after N] [--resume] [--int8]

Prints one JSON object, by loop: the loss of each forward, what the framework logged as gradient norms and learning rates,
the sum and the largest magnitude of each parameter at the end, and how many layers hold codes as they were served; or what
the loop was refused with. The loops of one process are made one after another; ballast's run of each has its name.

    framework_loops.py nursery N

Imports all frameworks and forks such processes, as it is told by the socket that is descriptor N (tests/python/nursery.py).
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate_loops import ACCELERATE_LOOPS
from framework_setting import (
    ACCUMULATION,
    BATCHES,
    EPOCHS,
    MAX_NORM,
    Kind,
    Loop,
    Options,
    Told,
    batches,
    compute_in_int8,
    language_model,
)
from lightning_loops import LIGHTNING_LOOPS
from trainer_loops import TRAINER_LOOPS
from trl_loops import TRL_LOOPS


def recipe(options: Options, kind: Kind, told: Told) -> nn.Module:
    """The shape of torchtune's full_finetune_single_device: losses weighted by tokens, clipping, the logged norm."""
    model = language_model()
    told.watch(model)
    optimizer = kind(model.parameters(), commit="staged")
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.zero_grad()
    for _ in range(EPOCHS):
        tokens = 0
        for number, batch in enumerate(batches()):
            here = batch["labels"].numel()
            tokens += here
            (model(**batch).loss * here).backward()
            if (number + 1) % ACCUMULATION == 0 or number + 1 == BATCHES:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=MAX_NORM * tokens)
                told.norms.append(float(norm))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                schedule.step()
                told.rates.append(schedule.get_last_lr()[0])
                tokens = 0
    return model


LOOPS: dict[str, Loop] = {
    loop.__name__: loop for loop in (*TRAINER_LOOPS, *TRL_LOOPS, *ACCELERATE_LOOPS, *LIGHTNING_LOOPS, recipe)
}


def attend_to_forks(descriptor: int) -> None:
    """Returns in each of them."""
    import lightning.pytorch
    from accelerate import Accelerator
    from datasets import Dataset
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification, Trainer
    from trl import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer

    sys.path.append(str(Path(__file__).parents[1] / "python"))
    from nursery import attend

    attend(socket.socket(fileno=descriptor))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["torch", "ballast"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("loops", nargs="+", choices=sorted(LOOPS))
    parser.add_argument("--server")
    parser.add_argument("--stop-after", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--int8", action="store_true", help="the model's linear layers compute in int8")
    options = parser.parse_args()
    if options.int8:
        compute_in_int8()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    print(json.dumps({loop: account_of(loop, options) for loop in options.loops}))


def account_of(loop: str, options: Options) -> dict[str, Any]:
    told, kind = Told(), Kind(options, loop)
    forget_accelerate()
    here = argparse.Namespace(**{**vars(options), "folder": options.folder / loop})
    try:
        model = LOOPS[loop](here, kind, told)
    except kind.refusals as refused:
        return {"refused": str(refused)}
    state = model.state_dict()
    ends = {
        name: [float(state[name].double().sum()), float(state[name].abs().max())]
        for name, _ in model.named_parameters()
    }
    served = sum(getattr(module, "served", None) is not None for module in model.modules())
    return {"losses": told.losses, "norms": told.norms, "rates": told.rates, "ends": ends, "served": served}


def forget_accelerate() -> None:
    """As in a process of its own."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


if __name__ == "__main__":
    if sys.argv[1] == "nursery":
        attend_to_forks(int(sys.argv[2]))
    main()
