"""Staged clipping, accumulation and several ranks against torch, on the same recorded gradients.

Open loop: 200 steps of gradients are recorded from a training in torch, those of each rank and micro-batch apart, and
given to both. So the weights' differences are the two implementations' alone and do not feed back.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ballast
from daemon import Daemon
from models import perceptron, spirals
from side_by_side import side_by_side

STEPS, RANKS, MICROS = 200, 4, 2
MAX_NORM = 0.25  # clips the larger half of the steps
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
# Relative to a tensor's norm, after all steps.
BOUND = 1e-6

Recording = list[list[list[list[Tensor]]]]  # by step, rank, micro-batch and parameter


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Written to a file and read back."""
    path: Path = tmp_path_factory.mktemp("recorded") / "gradients.pt"
    model = perceptron(seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    steps: Recording = []
    for step in range(STEPS):
        steps.append([[_gradients(model, step, rank, micro) for micro in range(MICROS)] for rank in range(RANKS)])
        for parameter, grad in zip(model.parameters(), _mean(steps[-1]), strict=True):
            parameter.grad = grad
        optimizer.step()
    torch.save(steps, path)
    read: Recording = torch.load(path, weights_only=True)
    return read


def _gradients(model: nn.Module, step: int, rank: int, micro: int) -> list[Tensor]:
    points, labels = spirals(seed=(step * RANKS + rank) * MICROS + micro, count=16)
    loss = F.cross_entropy(model(points), labels) / MICROS
    return list(torch.autograd.grad(loss, list(model.parameters())))


def _mean(ranks: list[list[list[Tensor]]]) -> list[Tensor]:
    """Over ranks, of the sums over micro-batches."""
    sums = [[torch.stack(list(grads)).sum(0) for grads in zip(*micros, strict=True)] for micros in ranks]
    return [torch.stack(list(grads)).mean(0) for grads in zip(*sums, strict=True)]


def in_torch(recording: Recording, ranks: int) -> tuple[list[Tensor], list[float]]:
    """The weights, and each step's norm before clipping. In double: in fp32 torch rounds 1 - lr weight_decay, which takes
    it 2e-6 away from this in these steps."""
    model = perceptron(seed=3).double()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    norms = []
    for step in recording:
        for parameter, grad in zip(model.parameters(), _mean(step[:ranks]), strict=True):
            parameter.grad = grad.double()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return [p.detach() for p in model.parameters()], norms


def in_ballast(daemon: Daemon, run: str, recording: Recording, rank: int, world: int, model: nn.Module) -> list[float]:
    """Trains `model`; each step's norm."""
    norms = []
    exact = {"master": "fp32", "state": "fp32", "rounding": "nearest", "max_grad_norm": MAX_NORM}
    with ballast.AdamW(
        model.named_parameters(),
        server=daemon.server,
        run=run,
        rank=rank,
        world=world,
        gradient_accumulation_steps=MICROS,
        **exact,
        **OPTIONS,
    ) as optimizer:
        for step in recording:
            for micro, grads in enumerate(step[rank]):
                with optimizer.accumulate(final=micro + 1 == MICROS):
                    # The gradient of sum(p g) by p is g.
                    torch.stack(
                        [(p * g).sum() for p, g in zip(model.parameters(), grads, strict=True)]
                    ).sum().backward()
            optimizer.step()
            result = optimizer.last_result
            assert result is not None and result.applied
            assert result.clip_coefficient == pytest.approx(min(1, MAX_NORM / (result.grad_norm + 1e-6)), rel=1e-6)
            norms.append(result.grad_norm)
    return norms


@pytest.mark.parametrize("world", [1, 4])
def test_clipping_over_ranks_and_micro_batches_is_torchs(
    world: int, daemon: Daemon, run: str, recording: Recording
) -> None:
    expected, expected_norms = in_torch(recording, world)
    assert 0.25 * STEPS < sum(norm > MAX_NORM for norm in expected_norms) < STEPS
    models = [perceptron(seed=3) for _ in range(world)]
    norms = side_by_side(world, lambda rank: in_ballast(daemon, run, recording, rank, world, models[rank]))
    assert all(of_rank == norms[0] for of_rank in norms)
    assert norms[0] == pytest.approx(expected_norms, rel=1e-5)
    for model in models:
        for ours, theirs in zip(model.parameters(), expected, strict=True):
            assert (ours - theirs).norm() <= BOUND * theirs.norm()
