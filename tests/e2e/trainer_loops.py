"""HF Trainer as its users call it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn

from framework_setting import (
    ACCUMULATION,
    EPOCHS,
    FEW_EPOCHS,
    MAX_NORM,
    STEPS_AN_EPOCH,
    Kind,
    Loop,
    Options,
    Told,
    language_model,
    sequences,
)


def training_arguments(kind: Any, options: Options, **more: Any) -> Any:
    values: dict[str, Any] = dict(
        output_dir=str(options.folder / "trainer"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=ACCUMULATION,
        num_train_epochs=EPOCHS,
        max_grad_norm=MAX_NORM,
        lr_scheduler_type="linear",
        warmup_steps=3,
        logging_steps=1,
        save_strategy="steps",
        save_steps=5,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    return kind(**{**values, **more})


def train_by(trainer: Any, options: Options, told: Told, losses: str | None = None) -> Any:
    """losses: as Told.log has it; None: the forwards tell them."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if state.global_step == options.stop_after:
                control.should_training_stop = True
            return control

    trainer.add_callback(Stop())
    if losses is None:
        told.watch(trainer.model)
    trainer.train(resume_from_checkpoint=options.resume or None)
    told.log(trainer.state.log_history, losses)
    return trainer.model


def trainer_of(model: nn.Module, optimizer: Any, options: Options, *, of: Any = None, **arguments: Any) -> Any:
    """of: the class, if not Trainer itself."""
    from transformers import Trainer, TrainingArguments

    return (of or Trainer)(
        model=model,
        args=training_arguments(TrainingArguments, options, **arguments),
        train_dataset=sequences(),
        eval_dataset=sequences(seed=7),
        optimizers=(optimizer, None),
    )


def hf_trainer(options: Options, kind: Kind, told: Told, **arguments: Any) -> nn.Module:
    model = language_model()
    return train_by(trainer_of(model, kind(model.named_parameters()), options, **arguments), options, told)


def hf_trainer_bf16(options: Options, kind: Kind, told: Told) -> nn.Module:
    return hf_trainer(options, kind, told, bf16=True)


def hf_trainer_unclipped(options: Options, kind: Kind, told: Told) -> nn.Module:
    """It asks for the norm nevertheless, to log it."""
    return hf_trainer(options, kind, told, **{"max_grad_norm": 0.0})


def hf_trainer_class(options: Options, kind: Kind, told: Told) -> nn.Module:
    return by_class(language_model(), options, kind, told)


def by_class(model: nn.Module, options: Options, kind: Kind, told: Told) -> nn.Module:
    """The Trainer makes the optimizer, with a group that decays and one that does not."""
    from transformers import Trainer, TrainingArguments

    trainer = Trainer(
        model=model,
        args=training_arguments(TrainingArguments, options),
        train_dataset=sequences(),
        optimizer_cls_and_kwargs=(kind.type, dict(kind.values)),
    )
    return train_by(trainer, options, told)


# --- activation checkpointing, and parameters that are not trained ---------------------------------------------------


def hf_checkpointing(options: Options, kind: Kind, told: Told) -> nn.Module:
    return hf_trainer(options, kind, told, gradient_checkpointing=True, num_train_epochs=FEW_EPOCHS)


def hf_checkpointing_reentrant(options: Options, kind: Kind, told: Told) -> nn.Module:
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    return hf_trainer(options, kind, told, **reentrant, num_train_epochs=FEW_EPOCHS)


class Adapted(nn.Module):
    """A linear layer that is frozen, and a term of low rank that is trained in its stead."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.up(self.down(x))
        return y


def hf_adapters(options: Options, kind: Kind, told: Told) -> nn.Module:
    """As LoRA; the optimizer is given all parameters, the frozen ones too."""
    model = adapted_model()
    optimizer = kind(model.named_parameters())
    arguments = {"gradient_checkpointing": True, "num_train_epochs": FEW_EPOCHS}
    return train_by(trainer_of(model, optimizer, options, **arguments), options, told)


def hf_adapters_class(options: Options, kind: Kind, told: Told) -> nn.Module:
    """The group that does not decay is empty."""
    return by_class(adapted_model(), options, kind, told)


def adapted_model() -> Any:
    model = language_model()
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    return model


# --- weights that are not the last step's ----------------------------------------------------------------------------


def hf_best(options: Options, kind: Kind, told: Told) -> nn.Module:
    """Evaluates in between, with smoothed labels, and ends with the weights of an earlier checkpoint."""
    return best_trainer(options, kind, told).model


def hf_trains_on(options: Options, kind: Kind, told: Told) -> nn.Module:
    """And then trains those weights, with the moments that the optimizer has."""
    return train_again(best_trainer(options, kind, told, changed_weights="upload"), told)


def hf_trains_on_unasked(options: Options, kind: Kind, told: Told) -> nn.Module:
    """The same without a word to the optimizer."""
    return train_again(best_trainer(options, kind, told), told)


def best_trainer(options: Options, kind: Kind, told: Told, **more: Any) -> Any:
    """After its training. What is best is what has the largest loss: an early checkpoint."""
    model = language_model()
    trainer = trainer_of(
        model,
        kind(model.named_parameters(), **more),
        options,
        num_train_epochs=FEW_EPOCHS,
        label_smoothing_factor=0.1,
        eval_strategy="steps",
        eval_steps=5,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    train_by(trainer, options, told, losses="loss")
    assert 0 < trainer.state.best_global_step < trainer.state.global_step
    told.losses += [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    told.losses.append(trainer.evaluate()["eval_loss"])
    return trainer


def train_again(trainer: Any, told: Told) -> nn.Module:
    trainer.train()
    told.log(trainer.state.log_history, "loss")
    model: nn.Module = trainer.model
    return model


def hf_goes_back(options: Options, kind: Kind, told: Told) -> nn.Module:
    """The same Trainer goes on from an earlier checkpoint than it has come to."""
    model = language_model()
    trainer = trainer_of(model, kind(model.named_parameters()), options, num_train_epochs=FEW_EPOCHS)
    train_by(trainer, options, told)
    trainer.train(resume_from_checkpoint=str(options.folder / "trainer" / "checkpoint-5"))
    told.log(trainer.state.log_history)
    return model


def hf_interrupted(options: Options, kind: Kind, told: Told) -> nn.Module:
    """Ctrl-C between the micro-batches of a step, as in a notebook; the same Trainer goes on from its last checkpoint."""
    from transformers import TrainerCallback

    class Interrupt(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 6:
                raise KeyboardInterrupt

    model = language_model()
    trainer = trainer_of(model, kind(model.named_parameters()), options, num_train_epochs=FEW_EPOCHS)
    trainer.add_callback(Interrupt())
    with suppress(KeyboardInterrupt):
        train_by(trainer, options, told)
    assert trainer.state.global_step == 6
    trainer.remove_callback(Interrupt)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == FEW_EPOCHS * STEPS_AN_EPOCH
    told.log(trainer.state.log_history)
    return model


def hf_average(options: Options, kind: Kind, told: Told) -> nn.Module:
    """An average of the weights, which takes their place while it is evaluated; it is what the loop ends with."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    from transformers import Trainer, TrainerCallback

    model = language_model()
    optimizer = kind(model.named_parameters())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    class Average(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            average.update_parameters(model)

    class Evaluating(Trainer):  # type: ignore[misc]
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            kept = [parameter.detach().clone() for parameter in model.parameters()]
            overwrite(model, average.module.parameters())
            try:
                return super().evaluate(*args, **kwargs)
            finally:
                overwrite(model, kept)

    arguments = {"num_train_epochs": FEW_EPOCHS, "eval_strategy": "steps", "eval_steps": 4}
    trainer = trainer_of(model, optimizer, options, of=Evaluating, **arguments)
    trainer.add_callback(Average())
    train_by(trainer, options, told)
    told.losses += [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    module: nn.Module = average.module
    return module


@torch.no_grad()
def overwrite(model: nn.Module, values: Any) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)


TRAINER_LOOPS: list[Loop] = [
    hf_trainer,
    hf_trainer_bf16,
    hf_trainer_unclipped,
    hf_trainer_class,
    hf_checkpointing,
    hf_checkpointing_reentrant,
    hf_adapters,
    hf_adapters_class,
    hf_best,
    hf_trains_on,
    hf_trains_on_unasked,
    hf_goes_back,
    hf_interrupted,
    hf_average,
]
