"""Accelerate's loops as its users write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from framework_setting import (
    ACCUMULATION,
    EPOCHS,
    MAX_NORM,
    STEPS_AN_EPOCH,
    Kind,
    Loop,
    Options,
    Told,
    batches,
    language_model,
)


def accelerate_loop(options: Options, kind: Kind, told: Told) -> nn.Module:
    training = Training(kind, told)
    training.go_on()
    return training.model


class Training:
    """The loop of Accelerate's examples: it accumulates, clips and schedules, and counts the steps, so that it goes on from
    a saved state past the batches that were seen."""

    def __init__(self, kind: Kind, told: Told):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
        self.told = told
        self.done = 0
        model = language_model()
        optimizer = kind(model.named_parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        prepared = self.accelerator.prepare(model, optimizer, batches(), schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.accelerator.register_for_checkpointing(self)
        told.watch(self.model)

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]

    def go_on(self, until: int | None = None) -> None:
        """To the end, or until so many steps are done."""
        for _ in range(self.done // STEPS_AN_EPOCH, EPOCHS):
            seen = self.done % STEPS_AN_EPOCH * ACCUMULATION
            for batch in self.accelerator.skip_first_batches(self.loader, seen) if seen else self.loader:
                self.learn(batch)
                if self.accelerator.sync_gradients:
                    self.done += 1
                    if self.done == until:
                        return

    def learn(self, batch: Any) -> None:
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            accelerator.backward(self.model(**batch).loss)
            if accelerator.sync_gradients:
                self.told.norms.append(float(accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)))
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.told.rates.append(self.schedule.get_last_lr()[0])


def accelerate_checkpoints(options: Options, kind: Kind, told: Told) -> nn.Module:
    """Saves where it is stopped, within an epoch, and goes on from there."""
    training = Training(kind, told)
    if options.resume:
        training.accelerator.load_state(options.folder / "state")
    training.go_on(until=options.stop_after)
    training.accelerator.save_state(options.folder / "state")
    return training.model


def accelerate_goes_back(options: Options, kind: Kind, told: Told) -> nn.Module:
    """In one process goes back to an earlier state, and on to a later one of the past that it left."""
    training = Training(kind, told)
    early, late = options.folder / "early", options.folder / "late"
    training.go_on(until=6)
    training.accelerator.save_state(early)
    training.go_on(until=13)
    training.accelerator.save_state(late)
    training.go_on(until=15)
    training.accelerator.load_state(early)
    training.go_on(until=9)
    training.accelerator.load_state(late)
    training.go_on(until=18)
    return training.model


def accelerate_released(options: Options, kind: Kind, told: Told) -> nn.Module:
    """A release run hears from Accelerate which micro-batch is the last; it cannot clip."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    model = language_model()
    optimizer = kind(model.named_parameters(), commit="release", gradient_accumulation_steps=ACCUMULATION)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    told.watch(model)
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    return model


def accelerate_skips(options: Options, kind: Kind, told: Told) -> nn.Module:
    """A loss that is not a number holds the scheduler, as an overflow under torch's GradScaler would."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = language_model()
    optimizer = kind(model.named_parameters(), nonfinite="skip_step")
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, batches(), schedule)
    told.watch(model)
    for number, batch in enumerate(loader):
        factor = float("nan") if number in (1, 4) else 1.0
        loss = model(**batch).loss * factor
        if factor == factor or kind.ballast:  # torch's own would take it in
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        told.rates.append(schedule.get_last_lr()[0])
    return model


# --- what a ballast optimizer refuses --------------------------------------------------------------------------------


def accelerate_clips_values(options: Options, kind: Kind, told: Told) -> nn.Module:
    return clip_each_backward(kind, "clip_grad_value_")


def accelerate_clips_each_backward(options: Options, kind: Kind, told: Told) -> nn.Module:
    """Without a look at sync_gradients: torch clips what has been added up so far, again and again."""
    return clip_each_backward(kind, "clip_grad_norm_")


def clip_each_backward(kind: Kind, clip: str) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    model = language_model()
    model, optimizer, loader = accelerator.prepare(model, kind(model.named_parameters()), batches())
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            getattr(accelerator, clip)(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return model


ACCELERATE_LOOPS: list[Loop] = [
    accelerate_loop,
    accelerate_checkpoints,
    accelerate_goes_back,
    accelerate_released,
    accelerate_skips,
    accelerate_clips_values,
    accelerate_clips_each_backward,
]
