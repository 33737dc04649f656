"""Steps that go on without a trainer that is lost for good, and with its replacement."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ballast
from daemon import Daemon
from models import perceptron, spirals

WORLD = 3
LOST = 2
POINTS, LABELS = spirals(seed=1)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    own = slice((step + rank) % WORLD, None, WORLD)
    return F.cross_entropy(model(POINTS[own]), LABELS[own])


def make_optimizer(model: nn.Module, server: str, run: str, rank: int, weights: str | None = None) -> ballast.AdamW:
    return ballast.AdamW(
        model.named_parameters(),
        lr=1e-2,
        server=server,
        run=run,
        rank=rank,
        world=WORLD,
        weights=weights,
        state_dtype="fp32",
        master_weight_bits=32,
        on_lost_rank="continue",
        rank_timeout=0.5,
    )


def train(model: nn.Module, optimizer: ballast.AdamW, rank: int, lost: threading.Event) -> list[ballast.StepResult]:
    """Until two steps were made with all ranks after some without one."""
    results: list[ballast.StepResult] = []
    whole_again = 0
    step = optimizer.last_result.step if optimizer.last_result is not None else 0
    while whole_again < 2:
        step += 1
        loss_of(model, step, rank).backward()
        optimizer.step()
        assert optimizer.last_result is not None and optimizer.last_result.step == step
        results.append(optimizer.last_result)
        if results[-1].ranks_left_out:
            lost.set()
        elif lost.is_set():
            whole_again += 1
    optimizer.close()
    return results


def reference(left_out: list[tuple[int, ...]]) -> nn.Module:
    model = perceptron(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, missing in enumerate(left_out, start=1):
        losses = [loss_of(model, step, rank) for rank in range(WORLD) if rank not in missing]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return model


def test_the_others_go_on_without_a_killed_trainer_and_then_with_its_replacement(
    daemon: Daemon, run: str, program: Callable[..., object]
) -> None:
    models = [perceptron(seed=1) for _ in range(WORLD)]
    lost = threading.Event()
    with ThreadPoolExecutor(WORLD) as pool:
        survivors = []
        for rank in range(2):
            optimizer = make_optimizer(models[rank], daemon.server, run, rank)
            survivors.append(pool.submit(train, models[rank], optimizer, rank, lost))
        victim = program("one_of_three")
        assert victim.hear() == "two steps"
        victim.send(signal.SIGKILL)
        assert victim.end() == -signal.SIGKILL
        assert lost.wait(60)
        replacement = make_optimizer(models[LOST], daemon.server, run, LOST, weights="server")
        joined = pool.submit(train, models[LOST], replacement, LOST, lost).result(60)
        first, second = (survivor.result(60) for survivor in survivors)
    assert [result.outcome for result in first] == ["APPLIED"] * len(first)
    left_out = [result.ranks_left_out for result in first]
    assert left_out == [result.ranks_left_out for result in second]
    without = left_out.count((LOST,))
    assert left_out == [()] * 2 + [(LOST,)] * without + [()] * 2 and without > 0
    assert joined[-1].step == first[-1].step and joined[-2].ranks_left_out == ()
    for one, other, new in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other) and torch.equal(one, new)
    for ours, theirs in zip(models[0].parameters(), reference(left_out).parameters(), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-4
