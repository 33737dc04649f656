"""What kernels/NUMERICS.md says of gradients and curvature holds for the daemon: sums, clipping, the probe."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import document_formats as formats
import document_rules as rules
import numpy as np
import torch

import ballast
from ballast import numerics
from daemon import Daemon
from side_by_side import side_by_side

F = np.float32
SIZES = {"first": 70, "second": 9100}  # the second: two tiles and a ragged third
HYPER = {"lr": 1e-2, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}


def normals(name: str, *seed: int, scale: float = 1.0) -> np.ndarray:
    random = np.random.default_rng([len(name), *seed])
    return (random.standard_normal(SIZES[name]) * scale).astype(F)


def padded(x: np.ndarray) -> np.ndarray:
    return np.pad(x, (0, -x.size % 256))


def parameters() -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.from_numpy(normals(name, 0))) for name in SIZES}


def push(model: dict[str, torch.nn.Parameter], gradients: dict[str, np.ndarray]) -> None:
    """The gradients are these, to the bit."""
    torch.stack([(model[name] * torch.from_numpy(g)).sum() for name, g in gradients.items()]).sum().backward()


class Document:
    """A tensor as the document has it, in the default formats."""

    def __init__(self, name: str, rule: str = "adamw"):
        n = SIZES[name]
        count = padded(normals(name, 0)).size
        shapes = [
            [(count, kind), (count // 32, np.dtype(np.uint16))] for kind in (np.dtype(np.int8), np.dtype(np.uint8))
        ]
        weight = formats.load("split24", padded(normals(name, 0)))
        self.tensor = rules.new_tensor("split24", "companded8", weight, shapes, n)
        self.key, self.rule, self.t = numerics.tensor_key(name), rule, 0

    def update(self, g: np.ndarray, hyper: dict[str, float] = HYPER) -> None:
        self.t += 1
        rules.update(self.rule, hyper, self.t, padded(g), self.tensor, self.key, self.t, True)

    def assert_is(self, parameter: torch.nn.Parameter) -> None:
        ours = formats.MASTERS["split24"].decode(self.tensor.weight)[: self.tensor.n]
        assert np.array_equal(ours.view(np.uint32), parameter.detach().numpy().view(np.uint32))


def train(daemon: Daemon, run: str, rank: int) -> tuple[dict[str, torch.nn.Parameter], list[ballast.StepResult]]:
    model, results = parameters(), []
    clip = {"max_grad_norm": 50.0, "commit": "staged", "gradient_accumulation_steps": 2}
    with ballast.AdamW(
        model.items(), server=daemon.server, run=run, rank=rank, world=2, **OPTIONS, **clip
    ) as optimizer:
        for step in range(3):
            for micro in range(2):
                push(model, {name: normals(name, 1, step, micro, rank) for name in SIZES})
            optimizer.step()
            assert optimizer.last_result is not None
            results.append(optimizer.last_result)
    return model, results


def test_gradients_are_summed_and_clipped_as_written(daemon: Daemon, run: str) -> None:
    ranks = side_by_side(2, lambda rank: train(daemon, run, rank))
    documents = {name: Document(name) for name in SIZES}
    for step in range(3):
        gradients, squares = {}, 0.0
        for name in SIZES:
            parts = [normals(name, 1, step, micro, rank) for micro in range(2) for rank in range(2)]
            g = ((parts[0] + parts[1]) + parts[2]) + parts[3]
            gradients[name] = g * F(0.5)  # the mean over two ranks
            squares += formats.total(gradients[name] * gradients[name])
        norm = math.sqrt(squares)
        clip = F(min(1.0, 50.0 / (norm + 1e-6)))
        for _, results in ranks:
            assert results[step].grad_norm == norm and results[step].clip_coefficient == float(clip) < 1
        for name, g in gradients.items():
            documents[name].update(g * clip)
    for model, _ in ranks:
        for name, document in documents.items():
            document.assert_is(model[name])


def test_tensors_are_clipped_by_themselves_as_written(adamw: Callable[..., ballast.AdamW]) -> None:
    model, name, steps = parameters(), "first", 106
    parameter, document, average = model[name], Document(name), 0.0
    optimizer = adamw([(name, parameter)], tensor_clip="adagc", **OPTIONS)
    for step in range(steps):
        g = normals(name, 2, step, scale=0.1 * (1 + step % 3)) * F(step != 50)
        push(model, {name: g})
        optimizer.step()
        norm = math.sqrt(formats.total(g * g))
        clip = F(1)
        if norm > 0:
            warm = step > 100  # a gradient of zeros does not count
            clip = F(min(1.0, (1.05 * average if warm else 1.0) / norm))
            taken = float(clip) * norm
            average = 0.98 * average + (1 - 0.98) * taken if warm else min(average or taken, taken)
        document.update(g if clip == 1 else g * clip)
        document.assert_is(parameter)


def curvature(document: Document, g: np.ndarray, before: np.ndarray) -> float:
    """The first tile's curvature by the document's formulas for adamw, at the learning rate of the update before."""
    m, v = (form.decode(planes) for form, planes in zip(formats.slots("companded8"), document.tensor.slots))
    p1, p2 = (
        1 / (1 - rules.power(HYPER["beta1"], document.t)),
        1 / math.sqrt(1 - rules.power(HYPER["beta2"], document.t)),
    )
    n = min(document.tensor.n, 4096)
    p = formats.fma(np.sqrt(v[:n]), F(p2), F(HYPER["eps"]))
    u = (m[:n] * F(p1)) / p
    u_dg, u_pu = formats.total(u * (g[:n] - before[:n])), formats.total((u * u) * p)
    lr, b1 = HYPER["lr"], HYPER["beta1"]
    return -u_dg / u_pu * (lr / lr * (1 - b1) / (2 * (1 + b1)) / 1)


def test_curvature_is_measured_as_written(adamw: Callable[..., ballast.AdamW]) -> None:
    model, name = parameters(), "second"
    document = Document(name)
    optimizer = adamw([(name, model[name])], spikes=ballast.Spikes(curvature=True, warmup_steps=0), **OPTIONS)
    first = normals(name, 3)
    push(model, {name: first})
    optimizer.step()
    document.update(first)
    push(model, {name: first * F(-100)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    assert optimizer.last_result is not None
    found = [event.value for event in optimizer.last_result.spikes if event.kind == "curvature"]
    assert found == [curvature(document, first * F(-100), first)]
