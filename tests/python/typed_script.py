"""A training script as a user writes it who has mypy look at it with --strict. Checked, not run."""

from typing import assert_type

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import ballast


def optimizers(model: nn.Module) -> list[ballast.Optimizer]:
    named = model.named_parameters()
    adamw = ballast.AdamW(named, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, run="my-run", server="node7:7700")
    groups = [
        {"params": model.parameters(), "lr": 1e-2},
        {"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": 0.0, "name": "head"},
    ]
    sgd = ballast.SGD(groups, 0.1, momentum=0.9, nesterov=True, commit="staged", gradient_accumulation_steps=4)
    lion = ballast.Lion(model.parameters(), lr=1e-4, snapshots=4, spikes=ballast.Spikes(action="rewind"))
    lion.add_param_group({"params": model.parameters()})
    kept = ballast.AdamW(
        model.parameters(), checkpoint_every_steps=50, checkpoint_every_seconds=600.0, checkpoints_kept=3
    )
    assert_type(kept.checkpoint(), int)
    return [adamw, sgd, lion]


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> ballast.StepResult | None:
    with ballast.AdamW(model.named_parameters(), lr=1e-3, step_timeout=600.0, on_lost_rank="continue") as optimizer:
        assert_type(optimizer, ballast.AdamW)
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, 100)
        optimizer.register_client_state("scheduler", schedule)
        scaler = ballast.GradScaler(optimizer)
        if optimizer.connect():
            optimizer.pull()
        for x, y in optimizer.in_step(batches):
            assert_type(x, Tensor)
            loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if not optimizer.step_was_skipped:
                schedule.step()
        assert_type(optimizer.last_result, ballast.StepResult | None)
        return optimizer.last_result


def with_closures(model: nn.Module, optimizer: ballast.Optimizer, batches: list[Tensor]) -> float:
    last = 0.0
    for batch in batches:

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(batch).sum()
            torch.autograd.backward(loss)  # torch has no types for loss.backward()
            return loss

        try:
            last = float(optimizer.step(closure))
        except ballast.RunRewound as rewound:
            assert_type(rewound.step, int)
        except ballast.BallastError as error:
            print(error.code)
    for batch in batches:
        with optimizer.accumulate(final=batch is batches[-1]) as micro:
            loss = model(batch).sum()
            loss.backward()
            micro.report(loss)
    optimizer.step(loss=last)
    return last
