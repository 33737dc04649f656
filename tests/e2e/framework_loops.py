"""Training loops of frameworks as their users write them, on the same small model and data: one run by torch's AdamW, one
by ballast's, tell whether the optimizer was called as it must be.

    framework_loops.py KIND FOLDER LOOP... [--server HOST:PORT] [--stop-after N] [--resume]

Prints one JSON object, by loop: the loss of each forward, what the framework logged as gradient norms and learning rates,
and the sum and the largest magnitude of each parameter at the end. Deterministic on the CPU. The loops of one process are
made one after another; ballast's run of each has its name.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

LR, BETAS, DECAY = 3e-3, (0.9, 0.99), 0.01
MAX_NORM = 0.25
VOCABULARY, LENGTH = 64, 16
# An epoch is of so many batches of 4 sequences; 3 make a step, and the last step of an epoch has 1.
BATCHES, ACCUMULATION, EPOCHS = 10, 3, 13


def sequences() -> list[dict[str, list[int]]]:
    random = torch.Generator().manual_seed(1)
    starts = torch.randint(VOCABULARY, (4 * BATCHES, 1), generator=random)
    strides = torch.randint(1, 5, (4 * BATCHES, 1), generator=random)
    tokens = (starts + strides * torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens.tolist()]


def language_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


class Told:
    """What a loop did."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []

    def watch(self, model: nn.Module) -> None:
        """Notes the loss of each forward that makes a graph."""

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                self.losses.append(float((output.loss if hasattr(output, "loss") else output).detach()))

        model.register_forward_hook(note)

    def log(self, history: Iterable[dict[str, Any]]) -> None:
        """What HF Trainer logged."""
        for entry in history:
            if "grad_norm" in entry:
                self.norms.append(float(entry["grad_norm"]))
                self.rates.append(float(entry["learning_rate"]))


class Kind:
    """Which optimizer: the one line that differs."""

    def __init__(self, options: argparse.Namespace, loop: str):
        self.ballast = options.kind == "ballast"
        self.values: dict[str, Any] = {"lr": LR, "betas": BETAS, "weight_decay": DECAY}
        if self.ballast:
            import ballast

            self.type: Any = ballast.AdamW
            self.values |= {"server": options.server, "run": loop.replace("_", "-")}
            self.values |= {"state_dtype": "fp32", "master_weight_bits": 32}
        else:
            self.type = torch.optim.AdamW

    def __call__(self, parameters: Any, **more: Any) -> Any:
        return self.type(parameters, **self.values, **(more if self.ballast else {}))


Options = argparse.Namespace
Loop = Callable[[Options, Kind, Told], nn.Module]


# --- HF Trainer and TRL ---------------------------------------------------------------------------------------------


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


def train_by(trainer: Any, options: Options, told: Told) -> nn.Module:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if state.global_step == options.stop_after:
                control.should_training_stop = True
            return control

    trainer.add_callback(Stop())
    told.watch(trainer.model)
    trainer.train(resume_from_checkpoint=options.resume or None)
    told.log(trainer.state.log_history)
    model: nn.Module = trainer.model
    return model


def hf_trainer(options: Options, kind: Kind, told: Told, **arguments: Any) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    model = language_model()
    trainer = Trainer(
        model=model,
        args=training_arguments(TrainingArguments, options, **arguments),
        train_dataset=sequences(),
        optimizers=(kind(model.named_parameters()), None),
    )
    return train_by(trainer, options, told)


def hf_trainer_bf16(options: Options, kind: Kind, told: Told) -> nn.Module:
    return hf_trainer(options, kind, told, bf16=True)


def hf_trainer_unclipped(options: Options, kind: Kind, told: Told) -> nn.Module:
    """It asks for the norm nevertheless, to log it."""
    return hf_trainer(options, kind, told, **{"max_grad_norm": 0.0})


def hf_trainer_class(options: Options, kind: Kind, told: Told) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    values = {key: value for key, value in kind.values.items()}
    trainer = Trainer(
        model=language_model(),
        args=training_arguments(TrainingArguments, options),
        train_dataset=sequences(),
        optimizer_cls_and_kwargs=(kind.type, values),
    )
    return train_by(trainer, options, told)


def sft_trainer(options: Options, kind: Kind, told: Told) -> nn.Module:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    model = language_model()
    trainer = SFTTrainer(
        model=model,
        args=training_arguments(SFTConfig, options, max_length=LENGTH, bf16=False, gradient_checkpointing=False),
        train_dataset=Dataset.from_list([{"input_ids": row["input_ids"]} for row in sequences()]),
        processing_class=tokenizer,
        optimizers=(kind(model.named_parameters()), None),
    )
    return train_by(trainer, options, told)


# --- Accelerate -----------------------------------------------------------------------------------------------------


def batches() -> torch.utils.data.DataLoader[Any]:
    rows = [{key: torch.tensor(value) for key, value in row.items()} for row in sequences()]
    return torch.utils.data.DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


def accelerate_loop(options: Options, kind: Kind, told: Told, **more: Any) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    model = language_model()
    optimizer = kind(model.named_parameters(), **more)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, batches(), schedule)
    told.watch(model)
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    told.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                told.rates.append(schedule.get_last_lr()[0])
    return model  # type: ignore[no-any-return]


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
    return model  # type: ignore[no-any-return]


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
    return model  # type: ignore[no-any-return]


# --- Lightning ------------------------------------------------------------------------------------------------------


def lightning_loop(options: Options, kind: Kind, told: Told, **more: Any) -> nn.Module:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = language_model()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            optimizer = kind(self.named_parameters())
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_train_batch_end(self, *_: Any) -> None:
            told.rates.append(self.lr_schedulers().get_last_lr()[0])

    module = Module()
    told.watch(module.model)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATION,
        gradient_clip_val=MAX_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(options.folder),
        **more,
    )
    trainer.fit(module, batches())
    return module.model


def lightning_bf16(options: Options, kind: Kind, told: Told) -> nn.Module:
    return lightning_loop(options, kind, told, precision="bf16-mixed")


# --- torchtune's recipes --------------------------------------------------------------------------------------------


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
    loop.__name__: loop
    for loop in (
        hf_trainer,
        hf_trainer_bf16,
        hf_trainer_unclipped,
        hf_trainer_class,
        sft_trainer,
        accelerate_loop,
        accelerate_released,
        accelerate_skips,
        lightning_loop,
        lightning_bf16,
        recipe,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["torch", "ballast"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("loops", nargs="+", choices=sorted(LOOPS))
    parser.add_argument("--server")
    parser.add_argument("--stop-after", type=int)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    print(json.dumps({loop: account_of(loop, options) for loop in options.loops}))


def account_of(loop: str, options: Options) -> dict[str, Any]:
    told = Told()
    forget_accelerate()
    model = LOOPS[loop](
        argparse.Namespace(**{**vars(options), "folder": options.folder / loop}), Kind(options, loop), told
    )
    ends = {
        name: [float(p.detach().double().sum()), float(p.detach().abs().max())] for name, p in model.named_parameters()
    }
    return {"losses": told.losses, "norms": told.norms, "rates": told.rates, "ends": ends}


def forget_accelerate() -> None:
    """As in a process of its own."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


if __name__ == "__main__":
    main()
