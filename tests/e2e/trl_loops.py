"""TRL's trainers as their users call them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from framework_setting import (
    FEW_EPOCHS,
    LENGTH,
    VOCABULARY,
    Kind,
    Loop,
    Options,
    Told,
    language_model,
    model_shape,
    sequences,
)
from trainer_loops import train_by, training_arguments

# How much of a sequence is the question.
PROMPT = 6


def word(token: int) -> str:
    return f"w{token:02}"


def text(tokens: list[int]) -> str:
    return "".join(f"{word(token)} " for token in tokens)


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word(i): i for i in range(VOCABULARY)}, unk_token=word(0)))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=word(0), eos_token=word(1), padding_side="left")


def data(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def trl_arguments(kind: Any, options: Options, **more: Any) -> Any:
    return training_arguments(kind, options, **{"bf16": False, "gradient_checkpointing": False, **more})


def sft_trainer(options: Options, kind: Kind, told: Told) -> nn.Module:
    from trl import SFTConfig, SFTTrainer

    model = language_model()
    trainer = SFTTrainer(
        model=model,
        args=trl_arguments(SFTConfig, options, max_length=LENGTH),
        train_dataset=data([{"input_ids": row["input_ids"]} for row in sequences()]),
        processing_class=tokenizer(),
        optimizers=(kind(model.named_parameters()), None),
    )
    return train_by(trainer, options, told)


def reward_trainer(options: Options, kind: Kind, told: Told) -> nn.Module:
    from transformers import LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(2)
    tokens = [row["input_ids"] for row in sequences()]
    trainer = RewardTrainer(
        model=LlamaForSequenceClassification(model_shape(num_labels=1, pad_token_id=0)),
        args=trl_arguments(RewardConfig, options, max_length=LENGTH, num_train_epochs=FEW_EPOCHS, save_strategy="no"),
        train_dataset=data([{"chosen_ids": row, "rejected_ids": row[::-1]} for row in tokens]),
        processing_class=tokenizer(),
        optimizer_cls_and_kwargs=(kind.type, dict(kind.values)),
    )
    return train_by(trainer, options, told, losses="loss")


def dpo_trainer(options: Options, kind: Kind, told: Told) -> nn.Module:
    from trl import DPOConfig, DPOTrainer

    model = language_model()
    tokens = [row["input_ids"] for row in sequences()]
    trainer = DPOTrainer(
        model=model,
        ref_model=language_model(),
        args=trl_arguments(DPOConfig, options, max_length=LENGTH, num_train_epochs=FEW_EPOCHS, save_strategy="no"),
        train_dataset=data(
            [
                {"prompt": text(row[:PROMPT]), "chosen": text(row[PROMPT:]), "rejected": text(row[:PROMPT:-1])}
                for row in tokens
            ]
        ),
        processing_class=tokenizer(),
        optimizers=(kind(model.named_parameters()), None),
    )
    return train_by(trainer, options, told, losses="loss")


def grpo_trainer(options: Options, kind: Kind, told: Told) -> nn.Module:
    """Generates with the weights that it trains; what it generates is even numbers, in the end."""
    from trl import GRPOConfig, GRPOTrainer

    def evenness(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]

    model = language_model()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=evenness,
        args=trl_arguments(
            GRPOConfig, options, num_generations=4, max_completion_length=5, max_steps=12, save_strategy="no"
        ),
        train_dataset=data([{"prompt": text(row["input_ids"][:PROMPT])} for row in sequences()]),
        processing_class=tokenizer(),
        optimizers=(kind(model.named_parameters()), None),
    )
    return train_by(trainer, options, told, losses="reward")


TRL_LOOPS: list[Loop] = [sft_trainer, reward_trainer, dpo_trainer, grpo_trainer]
