#!/usr/bin/env python3
"""The same gradients into Ballast and into torch's AdamW: do the weights stay the same?

    open_loop.py [--quick] [--json FILE]

A small model is trained with torch's AdamW in fp32 and its gradients of 200 steps are recorded. They are then fed to
torch's AdamW in double, and to Ballast with uncompressed moments and masters that hold fp32 exactly (fp32, split32). No
feedback: a difference is the update's own. Fails unless |w_ballast - w_double| <= 1e-6 |w_double| for every tensor after
every tenth step; torch's distance from double is printed beside it.
"""

import json

import ballast
import torch
import trainer
from trainer import king_james

ADAMW = {"lr": 2e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
TOLERANCE = 1e-6


def record(steps: int):
    """(initial weights, gradients by step, weights of every tenth step in double, torch's own in fp32)."""
    torch.manual_seed(1)
    model = king_james.ByteModel(width=64, layers=2, heads=2)
    text, random = king_james.load_text(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    exact = {name: torch.nn.Parameter(value.double()) for name, value in initial.items()}
    in_double = torch.optim.AdamW(list(exact.values()), **ADAMW)
    gradients, wanted, own = [], {}, {}
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model.loss(king_james.draw_batch(text, 8, random)).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        for name, gradient in gradients[-1].items():
            exact[name].grad = gradient.double()
        optimizer.step()
        in_double.step()
        if step % 10 == 0:
            wanted[step] = {name: p.detach().clone() for name, p in exact.items()}
            own[step] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return initial, gradients, wanted, own


def furthest(weights, wanted) -> tuple[float, str]:
    """The largest relative distance over tensors and steps, and where it is."""
    return max(
        (((weights[step][name] - exact).norm() / exact.norm()).item(), f"{name} after step {step}")
        for step, tensors in wanted.items()
        for name, exact in tensors.items()
    )


def feed(initial, gradients, steps, server: str, master: str):
    """Ballast's weights after those steps."""
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in initial.items()}
    kept = {}
    with ballast.AdamW(
        list(parameters.items()), **ADAMW, server=server, run=f"open-loop-{master}", master=master, state="fp32"
    ) as optimizer:
        for step, gradient in enumerate(gradients, 1):
            # The gradient of sum(p * g) with respect to p is g, to the bit.
            sum((parameters[name] * value).sum() for name, value in gradient.items()).backward()
            optimizer.step()
            if step in steps:
                kept[step] = {name: p.detach().clone() for name, p in parameters.items()}
    return kept


def main():
    options = trainer.parse_options(__doc__, quick="50 steps")
    steps = 50 if options.quick else 200
    torch.set_num_threads(1)
    initial, gradients, wanted, own = record(steps)
    rows = []
    worst, where = furthest(own, wanted)
    print(f"torch, fp32: largest |dw|/|w| {worst:.2e} ({where})")
    with trainer.own_daemon() as daemon:
        for master in ("fp32", "split32"):
            worst, where = furthest(feed(initial, gradients, wanted, daemon.server, master), wanted)
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
