#!/usr/bin/env python3
"""Does a deep model whose layers compute in fp8 diverge, and does a LayerScale of 0 keep it from that?

    deep.py OUT [--device cuda] [--depth N] [--width N] [--batch N] [--steps N]
            [--seconds S] [--rate LR]... [--report-only] [--record]

SwitchBack's finding (arXiv 2304.13013, section 2.3) at a size that study.py is too small for: a transformer over bytes, its
blocks' linear layers in fp8 with one scale a tensor, or in bf16, each with and without LayerScale(0), at several learning
rates. Optimizer: torch's AdamW, so that the layers alone differ. A way has diverged when its loss is no number, or at the end
above what the text's bytes, each for itself, would give. All ways take turns, some steps each, until S seconds are over or N
steps are done; so all have seen the same batches. OUT/deep.json, OUT/deep_layers.md and a picture; --record: into
tests/studies/results as well. On a GPU a step is one CUDA graph.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(ROOT / "client" / "python" / "examples"), str(HERE.parents[1] / "bench")]

import king_james  # noqa: E402
from ballast import nn as layers  # noqa: E402
from collect import machine, study_command  # noqa: E402
from tasks import Scaled  # noqa: E402

WARM_UP, TURN = 100, 20
LAYERS = ("bf16", "fp8")
Batch = tuple[Tensor, Tensor]


def build(depth: int, width: int, in_fp8: bool, scaled: bool) -> Any:
    torch.manual_seed(1)
    model: Any = king_james.ByteModel(width, 0, width // 64)
    block = Scaled if scaled else king_james.Block
    model.layers = nn.ModuleList(block(width, width // 64) for _ in range(depth))
    if in_fp8:
        layers.switch(model, "layers.*", layers.Float8Linear)
    return model


class Way:
    """One training. rate: after WARM_UP steps; loss: of the last step."""

    def __init__(self, options: argparse.Namespace, kind: str, scaled: bool, rate: float):
        self.kind, self.scaled, self.rate = kind, scaled, rate
        self.device = torch.device(options.device)
        self.model = build(options.depth, options.width, kind == "fp8", scaled).to(self.device)
        on_gpu = self.device.type == "cuda"
        self._lr = torch.zeros((), device=self.device)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self._lr, betas=(0.9, 0.99), weight_decay=0.1, capturable=on_gpu, foreach=on_gpu
        )
        self._inputs = torch.zeros(options.batch, king_james.CONTEXT, dtype=torch.long, device=self.device)
        self._targets = torch.zeros_like(self._inputs)
        self._loss = torch.zeros((), device=self.device)
        self._graph: Any = None
        self.curve: list[tuple[int, float]] = []
        self.seconds = 0.0

    def loss_of(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        with torch.autocast(self.device.type, torch.bfloat16):
            made = self.model(inputs)
        return F.cross_entropy(made.flatten(0, 1).float(), targets.flatten())

    def _work(self) -> None:
        self._optimizer.zero_grad(set_to_none=False)
        loss = self.loss_of((self._inputs, self._targets))
        loss.backward()
        self._optimizer.step()
        self._loss.copy_(loss.detach())

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # at a rate of 0
                self._work()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=_pool()):
            self._work()

    def step(self, number: int, batch: Batch) -> None:
        self._inputs.copy_(batch[0])
        self._targets.copy_(batch[1])
        if self.device.type == "cuda" and self._graph is None:
            self._lr.zero_()
            self._capture()
        self._lr.fill_(self.rate * min(1.0, number / WARM_UP))
        if self._graph is None:
            self._work()
        else:
            self._graph.replay()

    def turn(self, first: int, batches: list[Batch]) -> None:
        """Every fourth loss is kept."""
        started = time.perf_counter()
        kept = []
        for number, batch in enumerate(batches, first):
            self.step(number, batch)
            if number % 4 == 0:
                kept.append((number, self._loss.clone()))
        self.curve += [(number, loss.item()) for number, loss in kept]
        self.seconds += time.perf_counter() - started

    @torch.no_grad()
    def told(self, steps: int, held_out: list[Batch], limit: float) -> dict[str, Any]:
        """What became of it."""
        mean, most = self._magnitudes(held_out[0])
        loss = math.fsum(self.loss_of(batch).item() for batch in held_out) / len(held_out)
        return {
            "layers": self.kind,
            "layer_scale": self.scaled,
            "rate": self.rate,
            "loss": loss if math.isfinite(loss) else None,
            "diverged": not loss < limit,
            "worst": max((value for at, value in self.curve if at > WARM_UP and math.isfinite(value)), default=None),
            "mean": mean,
            "most": most,
            "ms": 1e3 * self.seconds / max(steps, 1),
            "curve": [(at, value if math.isfinite(value) else None) for at, value in self.curve],
        }

    def _magnitudes(self, batch: Batch) -> tuple[list[float], list[float]]:
        """Of each block's output: the mean, and the largest."""
        mean, most = [], []

        def see(_module: nn.Module, _inputs: Any, y: Tensor) -> None:
            mean.append(y.abs().mean().item())
            most.append(y.abs().max().item())

        hooks = [block.register_forward_hook(see) for block in self.model.layers]
        self.loss_of(batch)
        for hook in hooks:
            hook.remove()
        return mean, most


@functools.cache
def _pool() -> Any:
    """Memory of all graphs, none of which leaves anything there."""
    return torch.cuda.graph_pool_handle()


def entropy_of(text: Tensor) -> float:
    """Of a byte for itself, nats: the loss of a model that has learned how often each comes."""
    shares = torch.bincount(text, minlength=256).double() / len(text)
    return -(shares[shares > 0] * shares[shares > 0].log()).sum().item()


def train_all(options: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    text = king_james.load_text()
    split = len(text) * 9 // 10
    random, fixed = torch.Generator().manual_seed(1), torch.Generator().manual_seed(0)

    def draw(part: Tensor, generator: torch.Generator) -> Batch:
        inputs, targets = king_james.draw_batch(part, options.batch, generator)
        return inputs.to(options.device), targets.to(options.device)

    held_out = [draw(text[split:], fixed) for _ in range(4)]
    limit = entropy_of(text[split:])
    ways = [Way(options, kind, scaled, rate) for rate in options.rate for kind in LAYERS for scaled in (False, True)]
    done = 0
    while done < options.steps and time.perf_counter() - began < options.seconds:
        batches = [draw(text[:split], random) for _ in range(TURN)]
        for way in ways:
            way.turn(done + 1, batches)
        done += TURN
    on = torch.cuda.get_device_name() if options.device == "cuda" else machine()
    told = [way.told(done, held_out, limit) for way in ways]
    parameters = sum(p.numel() for p in ways[0].model.parameters())
    size = {name: getattr(options, name) for name in ("depth", "width", "batch")}
    today = time.strftime("%Y-%m-%d")
    return {"on": on, "date": today, "parameters": parameters, **size, "steps": done, "limit": limit, "ways": told}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rate", type=float, action="append", default=[])
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    options.rate = options.rate or [2e-3, 8e-3]
    return options


def name_of(way: dict[str, Any]) -> str:
    return way["layers"] + (", LayerScale of 0" if way["layer_scale"] else "")


def lines_of(found: dict[str, Any], command: str) -> list[str]:
    tokens = found["batch"] * king_james.CONTEXT
    lines = [
        "# Deep models in fp8, with and without a LayerScale of 0",
        "",
        f"`{command}` on {found['on']}; {found['date']}. {found['parameters'] / 1e6:.3g} million parameters in "
        f"{found['depth']} blocks of width {found['width']}, {found['steps']} steps of {tokens} bytes of the King James "
        "Bible, torch's AdamW, one seed. A model that knows how often each byte comes has a loss of "
        f"{found['limit']:.3f}: what is above at the end has diverged. Magnitudes are of the last block's output, on held-out "
        "text, after the last step.",
        "",
        "| rate | layers | held-out loss | largest loss after warm-up | mean of features | largest | ms a step |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for way in found["ways"]:
        loss = "no number" if way["loss"] is None else f"{way['loss']:.4f}"
        worst = "-" if way["worst"] is None else f"{way['worst']:.3f}"
        lines.append(
            f"| {way['rate']:g} | {name_of(way)} | {loss}{', diverged' if way['diverged'] else ''} | {worst} | "
            f"{way['mean'][-1]:.3g} | {way['most'][-1]:.3g} | {way['ms']:.1f} |"
        )
    lines += ["", "| rate | fp8's loss less bf16's | with a LayerScale of 0 |", "| --- | --- | --- |"]
    for rate in sorted({way["rate"] for way in found["ways"]}):
        lines.append(f"| {rate:g} | {lost_by_fp8(found, rate, False)} | {lost_by_fp8(found, rate, True)} |")
    return [*lines, "", "![pictures](deep_layers.png)", ""]


def lost_by_fp8(found: dict[str, Any], rate: float, scaled: bool) -> str:
    losses = {
        way["layers"]: way["loss"] for way in found["ways"] if (way["rate"], way["layer_scale"]) == (rate, scaled)
    }
    return "no number" if None in losses.values() else f"{losses['fp8'] - losses['bf16']:+.4f}"


def draw(found: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = sorted({way["rate"] for way in found["ways"]})
    figure, axes = pyplot.subplots(2, len(rates), figsize=(4.3 * len(rates), 6.4), dpi=110, squeeze=False)
    for column, rate in enumerate(rates):
        losses, features = axes[0][column], axes[1][column]
        for way in found["ways"]:
            if way["rate"] == rate:
                steps, values = zip(*way["curve"])
                losses.plot(steps, [math.nan if v is None else v for v in values], label=name_of(way), linewidth=0.8)
                features.plot(range(1, len(way["mean"]) + 1), way["mean"], label=name_of(way))
        losses.set(xlabel="step", ylabel="loss", title=f"learning rate {rate:g}", ylim=(None, 1.5 * found["limit"]))
        features.set(xlabel="block", ylabel="mean |x| after it", yscale="log")
        for one in (losses, features):
            one.grid(alpha=0.3)
            one.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(folder / "deep_layers.png")
    pyplot.close(figure)


def main() -> None:
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "deep.json"
    if not options.report_only:
        kept.write_text(json.dumps(train_all(options)))
    found = json.loads(kept.read_text())
    command = study_command("layer_study/deep.py", options.out)
    for folder in [options.out, *([HERE.parent / "results"] if options.record else [])]:
        (folder / "deep_layers.md").write_text("\n".join(lines_of(found, command)))
        draw(found, folder)


if __name__ == "__main__":
    main()
