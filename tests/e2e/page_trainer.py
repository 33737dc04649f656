"""Trains a small model for the page's test, SERVER RUN: 130 steps at once, with inputs that make the loss spike at 97 and
a loss that is infinite at 110, then 20 a second until its input ends. It follows a rewind. One tensor's name is an attack
on a page."""

import math
import os
import select
import sys

import torch

import ballast

LAYERS, WIDTH = 6, 32
ATTACK = "embed.<img src=x onerror=alert(1)>.weight"


def make_weights() -> dict[str, torch.nn.Parameter]:
    shapes = {ATTACK: (16, WIDTH)}
    for layer in range(LAYERS):
        shapes[f"model.layers.{layer}.up.weight"] = (WIDTH, WIDTH)
        shapes[f"model.layers.{layer}.down.weight"] = (WIDTH, WIDTH)
    shapes["head.weight"] = (WIDTH, 1)
    return {name: torch.nn.Parameter(torch.randn(*shape) * 0.1) for name, shape in shapes.items()}


def predict(weights: dict[str, torch.nn.Parameter], x: torch.Tensor) -> torch.Tensor:
    hidden = x @ weights[ATTACK]
    for layer in range(LAYERS):
        up = torch.tanh(hidden @ weights[f"model.layers.{layer}.up.weight"])
        hidden = hidden + up @ weights[f"model.layers.{layer}.down.weight"]
    return hidden @ weights["head.weight"]


def main() -> None:
    server, run = sys.argv[1:]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    weights = make_weights()
    spikes = ballast.Spikes(warmup_steps=20, rms_min_elements=1, rms_margin=1.5)
    options = {"max_grad_norm": 5.0, "nonfinite": "skip_step", "spikes": spikes, "snapshots": 2}
    opt = ballast.AdamW(list(weights.items()), lr=3e-3, betas=(0.9, 0.99), server=server, run=run, **options)
    step = 0
    while step < 130 or not select.select([sys.stdin], [], [], 0.05)[0]:
        step += 1
        x = torch.randn(64, 16)
        y = x[:, :4].sum(1, keepdim=True).sin()
        error = predict(weights, x * 6 if step in (97, 98) else x) - y
        loss = (error**2).mean() * (math.inf if step == 110 else 1)
        try:
            loss.backward()
            opt.step(loss=loss)
        except ballast.RunRewound as rewound:
            step = rewound.step
        opt.zero_grad()
    os._exit(0)  # the run stays, as after a trainer that was stopped


if __name__ == "__main__":
    main()
