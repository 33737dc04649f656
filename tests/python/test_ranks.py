"""Several trainers of one run."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ballast
from ballast.binding import Binding
from ballast.weights import Weights
from daemon import Daemon
from models import perceptron, spirals
from side_by_side import side_by_side

WORLD = 3
STEPS = 12


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    points, labels = spirals(seed=1)
    own = [(points[i::WORLD], labels[i::WORLD]) for i in range(WORLD)]
    return [own[(rank + step) % WORLD] for step in range(STEPS)]


def same_models() -> list[nn.Module]:
    """One for each rank, made one after another: torch's seed is the process's."""
    return [perceptron(seed=1) for _ in range(WORLD)]


def train(
    daemon: Daemon, run: str, rank: int, model: nn.Module, **options: object
) -> tuple[nn.Module, list[ballast.StepResult]]:
    results = []
    with ballast.AdamW(
        model.named_parameters(), lr=1e-2, server=daemon.server, run=run, rank=rank, world=WORLD, **options
    ) as optimizer:
        for points, labels in batches(rank):
            loss = F.cross_entropy(model(points), labels)
            loss.backward()
            optimizer.step(loss=loss)
            assert optimizer.last_result is not None
            results.append(optimizer.last_result)
    return model, results


def test_every_rank_has_the_same_weights_and_they_are_torchs_of_the_mean(daemon: Daemon, run: str) -> None:
    exact = {"state_dtype": "fp32", "master_weight_bits": 32, "betas": (0.9, 0.99), "weight_decay": 0.1}
    models = same_models()
    ranks = side_by_side(WORLD, lambda rank: train(daemon, run, rank, models[rank], **exact))
    reference = perceptron(seed=1)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(STEPS):
        losses = [F.cross_entropy(reference(x), y) for x, y in (batches(rank)[step] for rank in range(WORLD))]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    first = ranks[0][0]
    for model, results in ranks:
        assert [result.outcome for result in results] == ["APPLIED"] * STEPS
        for ours, others in zip(first.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, others)
    for ours, theirs in zip(first.parameters(), reference.parameters(), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-4


def test_the_default_recipe_learns(daemon: Daemon, run: str) -> None:
    models = same_models()
    ranks = side_by_side(WORLD, lambda rank: train(daemon, run, rank, models[rank]))
    points, labels = spirals(seed=1)
    losses = {F.cross_entropy(model(points), labels).item() for model, _ in ranks}
    assert len(losses) == 1
    assert losses.pop() < F.cross_entropy(perceptron(seed=1)(points), labels).item()


def test_micro_batches_of_two_ranks_give_the_bits_of_one_rank_that_makes_them_all(daemon: Daemon, run: str) -> None:
    """The sums have one order, by micro-batch and then by rank, and a mean over two is exact."""
    points, labels = spirals(seed=1)
    models = [perceptron(seed=1) for _ in range(3)]

    def loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
        own = slice(8 * (4 * step + 2 * micro + rank), 8 * (4 * step + 2 * micro + rank + 1))
        return F.cross_entropy(model(points[own]), labels[own])

    def trainer(rank: int) -> None:
        model = models[rank]
        with ballast.AdamW(
            model.named_parameters(),
            server=daemon.server,
            run=run,
            rank=rank,
            world=2,
            gradient_accumulation_steps=2,
        ) as optimizer:
            for step in range(4):
                for micro in range(2):
                    with optimizer.accumulate(final=micro == 1):
                        loss(model, step, micro, rank).backward()
                optimizer.step()

    side_by_side(2, trainer)
    with ballast.AdamW(
        models[2].named_parameters(), server=daemon.server, run=f"{run}-alone", gradient_accumulation_steps=4
    ) as alone:
        for step in range(4):
            for micro in range(2):
                for rank in range(2):
                    (loss(models[2], step, micro, rank) / 2).backward()
            alone.step()
    for one, other, whole in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other) and torch.equal(one, whole)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"master_weight_bits": 32}),
        (torch.float32, {"serving": "fp8-e4m3"}),
        (torch.float32, {"serving": "int8-row"}),
        (torch.float32, {"serving": "int8-tensor"}),
        (torch.float32, {"master": "flash24", "state": "flash8"}),
        (torch.bfloat16, {}),
        (torch.float16, {"master": "bf16"}),
    ],
    ids=str,
)
def test_ranks_that_begin_alike_compare_digests_and_are_sent_what_is_unlike(
    daemon: Daemon, run: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, options: dict[str, object]
) -> None:
    points, labels = spirals(seed=1)
    models = [perceptron(seed=1).to(dtype) for _ in range(3)]
    with torch.no_grad():  # as another machine's rounding may do
        models[2][2].weight[3, 4] += 0.05 * models[2][2].weight.abs().max()
    sent: list[tuple[str, int]] = []
    lock = threading.Lock()

    def compare_one(weights: Weights, binding: Binding, theirs: Tensor) -> None:
        with lock:
            sent.append((binding.name, weights._rank.number))
        compare(weights, binding, theirs)

    compare = Weights._compare_one
    monkeypatch.setattr(Weights, "_compare_one", compare_one)

    def trainer(rank: int) -> bytes:
        model = models[rank]
        parameters = model.named_parameters()
        with ballast.AdamW(parameters, server=daemon.server, run=run, rank=rank, world=3, **options) as optimizer:
            F.cross_entropy(model[:3](points.to(dtype)).float(), labels).backward()  # the last layer has no gradient
            optimizer.step()
        return b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters())

    one, *others = side_by_side(3, trainer)
    assert others == [one, one]
    assert sent == [("2.weight", 2)]


def test_a_rank_that_begins_with_other_weights_is_refused(daemon: Daemon, run: str) -> None:
    points, labels = spirals(seed=1)
    models = [perceptron(seed=1), perceptron(seed=2)]

    def trainer(rank: int) -> str:
        model = models[rank]
        with ballast.AdamW(model.named_parameters(), server=daemon.server, run=run, rank=rank, world=2) as optimizer:
            if rank == 0:
                F.cross_entropy(model(points), labels).backward()
                return "sent"
            with pytest.raises(ballast.Rejected, match="differ from those that rank 0 uploaded"):
                F.cross_entropy(model(points), labels).backward()
            assert optimizer.last_result is None
            return "refused"

    assert side_by_side(2, trainer) == ["sent", "refused"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_rank_that_begins_with_weights_that_are_not_finite_is_refused(daemon: Daemon, run: str, value: float) -> None:
    models = [perceptron(seed=1), perceptron(seed=1)]
    with torch.no_grad():
        models[1][2].weight[3, 4] = value

    def trainer(rank: int) -> str:
        model = models[rank]
        with ballast.AdamW(model.named_parameters(), server=daemon.server, run=run, rank=rank, world=2):
            if rank == 0:
                model[0].weight.sum().backward()
                return "sent"
            with pytest.raises(ballast.Rejected, match="weights of '2.weight' differ from those that rank 0 uploaded"):
                model[0].weight.sum().backward()
            return "refused"

    assert side_by_side(2, trainer) == ["sent", "refused"]


def test_a_rank_beyond_the_world_is_refused(daemon: Daemon, run: str) -> None:
    model = perceptron(seed=1)
    with ballast.AdamW(model.named_parameters(), server=daemon.server, run=run, rank=2, world=2) as optimizer:
        with pytest.raises(ballast.Rejected, match="rank is 2 of world 2"):
            optimizer.connect()
