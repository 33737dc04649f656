"""What the training loops of all frameworks have in common: a small model, its data, the choice between torch's AdamW and
ballast's, and what a loop tells of itself. Deterministic on the CPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

LR, BETAS, DECAY = 3e-3, (0.9, 0.99), 0.01
MAX_NORM = 0.25
VOCABULARY, LENGTH = 64, 16
# An epoch is of so many batches of 4 sequences; 3 make a step, and the last step of an epoch has 1.
BATCHES, ACCUMULATION, EPOCHS = 10, 3, 13
STEPS_AN_EPOCH = -(-BATCHES // ACCUMULATION)
# Where a loop is about something that a few steps show.
FEW_EPOCHS = 4


def sequences(seed: int = 1) -> list[dict[str, list[int]]]:
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(VOCABULARY, (4 * BATCHES, 1), generator=random)
    strides = torch.randint(1, 5, (4 * BATCHES, 1), generator=random)
    tokens = (starts + strides * torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens.tolist()]


def batches() -> torch.utils.data.DataLoader[Any]:
    rows = [{key: torch.tensor(value) for key, value in row.items()} for row in sequences()]
    return torch.utils.data.DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


def model_shape(**more: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        **more,
    )


def language_model(seed: int = 2) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(model_shape())
    if SERVED is not None:
        from ballast import nn as bnn

        bnn.switch(model, "*.layers.*")
        SERVED.update({f"*{name}": form for name, form in bnn.served_formats(model).items()})
    return model


# Not None: language_model() computes in int8, and this is the option `formats` for its weights to be served so.
SERVED: dict[str, dict[str, str]] | None = None


def compute_in_int8() -> None:
    global SERVED
    SERVED = {}


class Told:
    """What a loop did: the loss of each forward, gradient norms and learning rates as the framework has them."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []

    def watch(self, model: nn.Module) -> None:
        """Notes the loss of each forward that makes a graph, if it has one."""

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            loss = output.loss if hasattr(output, "loss") else output
            if torch.is_grad_enabled() and loss is not None:
                self.losses.append(float(loss.detach()))

        model.register_forward_hook(note)

    def log(self, history: Sequence[dict[str, Any]], losses: str | None = None) -> None:
        """What HF Trainer logged. losses: under which name the losses are, where the forwards do not have them."""
        for entry in history:
            if "grad_norm" in entry:
                self.norms.append(float(entry["grad_norm"]))
                self.rates.append(float(entry["learning_rate"]))
            if losses is not None and losses in entry:
                self.losses.append(float(entry[losses]))


class Kind:
    """Which optimizer: the one line that differs. refusals: what it may refuse a loop with."""

    def __init__(self, options: argparse.Namespace, loop: str):
        self.ballast = options.kind == "ballast"
        self.values: dict[str, Any] = {"lr": LR, "betas": BETAS, "weight_decay": DECAY}
        if self.ballast:
            import ballast

            self.type: Any = ballast.AdamW
            self.refusals: tuple[type[Exception], ...] = (ballast.Rejected,)
            self.values |= {"server": options.server, "run": loop.replace("_", "-")}
            self.values |= {"state_dtype": "fp32", "master_weight_bits": 32}
        else:
            self.type = torch.optim.AdamW
            self.refusals = ()

    def __call__(self, parameters: Any, **more: Any) -> Any:
        """more: options of ballast's alone."""
        if self.ballast:
            more["formats"] = SERVED
        return self.type(parameters, **{**self.values, **(more if self.ballast else {})})


Options = argparse.Namespace
Loop = Callable[[Options, Kind, Told], nn.Module]
