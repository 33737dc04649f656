#!/usr/bin/env python3
"""Trains a small language model on the King James Bible, byte by byte: through Ballast, or with torch's own AdamW.

    python client/python/examples/king_james.py                                   # starts a ballastd, which ends with it
    python client/python/examples/king_james.py --optimizer torch                 # needs none
    python client/python/examples/king_james.py --steps 300 --seed 1 --json curve.json
    python client/python/examples/king_james.py --recipe switchback               # linear layers in int8; see recipes.py

The two optimizers get the same initial weights and the same batches, so their loss curves can be laid over each other.
What Ballast needs of a training loop is in train(): the optimizer's constructor, and step(loss=...).
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
import recipes  # noqa: E402

CONTEXT, BATCH = 128, 16
EVALUATE_EVERY, LAST_EVALUATIONS = 5, 20
BUILD = Path(__file__).resolve().parents[3] / "build"
LEARNING = {
    "lr": 2e-3,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.1,
}  # a recipe may have another lr and decay


# --- the model: 0.87 million parameters -----------------------------------------------------------------------------


class Block(nn.Module):
    """One transformer layer: causal attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteModel(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4):
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def loss(self, batch):
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, 1).float(), targets.flatten())


# --- the data -------------------------------------------------------------------------------------------------------


def load_text(cache: Path = BUILD / "king-james.txt") -> torch.Tensor:
    """The whole text as bytes, printed once by the program `bible` and kept in `cache`."""
    if not cache.exists():
        try:
            printed = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], capture_output=True, check=True).stdout
        except FileNotFoundError:
            sys.exit("king_james.py: the text is missing: install the package bible-kjv (deploy/packages.sh data)")
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial = cache.with_suffix(f".partial-{os.getpid()}")  # another may be at it too
        partial.write_bytes(printed)
        partial.rename(cache)
    return torch.frombuffer(bytearray(cache.read_bytes()), dtype=torch.uint8).long()


def draw_batch(text: torch.Tensor, size: int, random: torch.Generator):
    """`size` random pieces of the text, and the same pieces one byte further on."""
    starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=random).tolist()
    pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def held_out_loss(model: nn.Module, batches) -> float:
    return statistics.fmean(model.loss(batch).item() for batch in batches)


# --- training -------------------------------------------------------------------------------------------------------


def make_optimizer(options, model: nn.Module):
    recipe = recipes.RECIPES[options.recipe]
    if options.optimizer == "torch":
        return recipe.by_torch(model, LEARNING)
    import ballast

    learning = LEARNING | recipe.rates(model)
    of_recipe = recipe.switch(model)  # its layers, and the formats that go with them
    stored = {} if recipe.rule != "AdamW" else {"master_weight_bits": options.master_bits, "state_dtype": options.state}
    kind = getattr(ballast, recipe.rule)
    return kind(model.named_parameters(), **learning, server=options.server, run=options.run, **stored, **of_recipe)


def train(options, model: nn.Module, text: torch.Tensor, report) -> None:
    split = len(text) * 9 // 10
    training, held_out = text[:split], text[split:]
    fixed = torch.Generator().manual_seed(0)
    evaluation = [draw_batch(held_out, 32, fixed) for _ in range(2)]
    random = torch.Generator().manual_seed(options.seed)
    optimizer = make_optimizer(options, model)

    for step in range(1, options.steps + 1):
        batch = draw_batch(training, BATCH, random)
        started = time.perf_counter()
        loss = model.loss(batch)
        # Through Ballast each gradient leaves as it is made, and is dropped.
        (loss * getattr(optimizer, "loss_scale", 1.0)).backward()
        report.gradients_held(model)
        if options.optimizer == "torch":
            optimizer.step()
        else:
            optimizer.step(loss=loss)  # returns when every new weight is in place
        optimizer.zero_grad(set_to_none=True)
        report.step_done(step, time.perf_counter() - started, optimizer)
        if step % EVALUATE_EVERY == 0:
            report.evaluated(step, loss.item(), held_out_loss(model, evaluation))
    report.finished(model, optimizer)


# --- what is measured, shown and written ----------------------------------------------------------------------------


def storage_bytes(tensors) -> int:
    """Bytes of the memory behind the tensors, each storage counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class Report:
    """Collects the figures of one training run, and draws its progress."""

    def __init__(self, options, parameters: int):
        self.steps, self.on_terminal, self.loss = options.steps, sys.stderr.isatty(), math.nan
        self.step_seconds, self.pushed_early, self.pulled_early = [], [], []
        self.figures = {
            "optimizer": options.optimizer,
            "recipe": options.recipe,
            "seed": options.seed,
            "steps": options.steps,
            "parameters": parameters,
            "torch_threads": torch.get_num_threads(),
            "torch_version": torch.__version__,
            "evaluations": [],
            "trainer_bytes": {"gradients": 0},
        }

    def gradients_held(self, model):
        held = storage_bytes(p.grad for p in model.parameters() if type(p.grad) is torch.Tensor)
        self.figures["trainer_bytes"]["gradients"] = max(held, self.figures["trainer_bytes"]["gradients"])

    def step_done(self, step, seconds, optimizer):
        self.step_seconds.append(seconds)
        timing = getattr(getattr(optimizer, "last_result", None), "timing", None)
        if timing is not None:
            self.pushed_early.append(timing.pushed_bytes_in_backward / max(1, timing.pushed_bytes))
            self.pulled_early.append(timing.pulled_bytes_in_backward / max(1, timing.pulled_bytes))
        self.draw(step)

    def evaluated(self, step, training_loss, held_out):
        self.loss = held_out
        self.figures["evaluations"].append({"step": step, "training": training_loss, "held_out": held_out})

    def draw(self, step):
        name, seconds = self.figures["optimizer"], statistics.median(self.step_seconds[-20:])
        told = f"{step}/{self.steps}  held-out loss {self.loss:.3f}  {1000 * seconds:.0f} ms a step"
        if self.on_terminal:
            done = 30 * step // self.steps
            end = "\n" if step == self.steps else ""
            print(f"\r  {name:8}[{'#' * done}{'.' * (30 - done)}] {told} ", end=end, file=sys.stderr, flush=True)
        elif step % 50 == 0 or step == self.steps:
            print(f"  {name:8}{told}", file=sys.stderr, flush=True)

    def finished(self, model, optimizer):
        held, figures = self.figures["trainer_bytes"], self.figures
        held["parameters"] = storage_bytes([*model.parameters(), *recipes.codes_of(model)])
        states = (value for state in optimizer.state.values() for value in state.values())
        held["state"] = storage_bytes(value for value in states if torch.is_tensor(value))
        last = [evaluation["held_out"] for evaluation in figures["evaluations"][-LAST_EVALUATIONS:]]
        figures["held_out_loss"] = statistics.fmean(last) if last else None
        figures["held_out_evaluations"] = len(last)
        quartiles = (
            statistics.quantiles(self.step_seconds, n=4) if len(self.step_seconds) > 1 else 3 * self.step_seconds
        )
        figures["step_seconds"] = {"q1": quartiles[0], "median": quartiles[1], "q3": quartiles[2]}
        if self.pushed_early:
            figures["pushed_in_backward"] = statistics.median(self.pushed_early)
            figures["pulled_in_backward"] = statistics.median(self.pulled_early)
        if figures["optimizer"] == "ballast":
            figures["server"] = describe_run(optimizer.run_status())


def describe_run(status) -> dict:
    """What the daemon says of the run: the bytes it holds, by kind, counted from its live allocations."""
    kinds = ("weights", "momentum", "variance", "gradients", "staging", "padding")
    return {
        "run": status.run_id,
        "optimizer": status.optimizer,
        "bytes": {kind: getattr(status.bytes, kind) for kind in kinds},
        "trainer_buffer_bytes": status.plan.trainer_buffer_bytes,
        "steps_applied": status.steps_applied,
    }


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=("ballast", "torch"), default="ballast")
    parser.add_argument("--recipe", choices=tuple(recipes.RECIPES), default="plain", help="what the model computes in")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1, help="of the initial weights and of the batches")
    parser.add_argument("--server", help="the daemon's address (default: $BALLAST_SERVER, else one of its own)")
    parser.add_argument("--run", help="the run's name on the daemon (default: a new one)")
    parser.add_argument("--master-bits", type=int, choices=(24, 32), default=24, help="of the daemon's weights")
    parser.add_argument("--state", choices=("companded8", "fp32"), default="companded8", help="the daemon's moments")
    parser.add_argument("--threads", type=int, default=1, help="torch's (on two cores, leave one to the daemon)")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    options.run = options.run or f"king-james-{options.seed}-{os.getpid()}"
    return options


def main():
    options = parse_options()
    torch.set_num_threads(options.threads)
    text = load_text()
    torch.manual_seed(options.seed)
    model = recipes.RECIPES[options.recipe].make_model(ByteModel)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    report = Report(options, parameters)
    train(options, model, text, report)
    if report.figures["held_out_loss"] is not None:
        print(f"held-out loss {report.figures['held_out_loss']:.4f} ({options.optimizer}, {parameters} parameters)")
    if options.json:
        options.json.write_text(json.dumps(report.figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
