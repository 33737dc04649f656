#!/usr/bin/env python3
"""The same gradients into Ballast and into torch's AdamW: do the weights stay the same?

    open_loop.py [--quick] [--json FILE]

A small model is trained with torch's AdamW in fp32 and its gradients of 200 steps are recorded. They are then fed to
Ballast, with uncompressed moments and masters that hold fp32 exactly (fp32, split32). No feedback: a difference is the
update's own. Fails unless |w_ballast - w_torch| <= 1e-6 |w_torch| for every tensor after every tenth step.
"""

import json

import ballast.spec
import torch
import trainer
from trainer import king_james

ADAMW = {"lr": 2e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
TOLERANCE = 1e-6


def record(steps: int):
    """(initial weights, gradients by step, torch's weights by step) of a model of 0.15 million parameters."""
    torch.manual_seed(1)
    model = king_james.ByteModel(width=64, layers=2, heads=2)
    text, random = king_james.load_text(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients, weights = [], {}
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model.loss(king_james.draw_batch(text, 8, random)).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        if step % 10 == 0:
            weights[step] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return initial, gradients, weights


def feed(initial, gradients, weights, server: str, master: str) -> tuple[float, str]:
    """The largest relative distance over tensors and steps, and the tensor's name."""
    # The client offers split32 alone, which holds the same bits as the plain fp32 master; here both are asked for.
    ballast.spec.MASTERS[32] = master
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in initial.items()}
    optimizer = ballast.AdamW(
        list(parameters.items()),
        **ADAMW,
        server=server,
        run=f"open-loop-{master}",
        master_weight_bits=32,
        state_dtype="fp32",
    )
    worst, where = 0.0, ""
    for step, gradient in enumerate(gradients, 1):
        # The gradient of sum(p * g) with respect to p is g, to the bit.
        sum((parameters[name] * value).sum() for name, value in gradient.items()).backward()
        optimizer.step()
        for name, wanted in weights.get(step, {}).items():
            distance = ((parameters[name].detach() - wanted).norm() / wanted.norm()).item()
            if distance > worst:
                worst, where = distance, f"{name} after step {step}"
    return worst, where


def main():
    options = trainer.parse_options(__doc__, quick="50 steps")
    steps = 50 if options.quick else 200
    torch.set_num_threads(1)
    recorded = record(steps)
    rows = []
    with trainer.own_daemon() as daemon:
        for master in ("fp32", "split32"):
            worst, where = feed(*recorded, daemon.server, master)
            print(f"{master} master, fp32 state: largest |dw|/|w| {worst:.2e} ({where}; allowed {TOLERANCE:.0e})")
            name = f"open loop, largest |dw|/|w| ({master}, fp32 state)"
            bound = {"bound": TOLERANCE, "ratio": worst / TOLERANCE, "n": steps}
            rows.append({"name": name, "value": worst, "unit": ""} | bound)
    if options.json:
        options.json.write_text(json.dumps(rows))
    for row in rows:
        assert row["value"] <= TOLERANCE, f"{row['name']}: {row['value']:.2e} > {TOLERANCE:.0e}"


if __name__ == "__main__":
    main()
