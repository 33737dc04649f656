"""The binding of the C++ client: ranks that hold shards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

import ballast
from ballast import _core
from daemon import Daemon

Shards = Sequence[tuple[int, int, bool] | None]
ELEMENTS = (10, 5)
# Of the first tensor each holds a part; the second is the first rank's, or, for the last rank, replicated.
PLACES: tuple[Shards, ...] = (((0, 3, True), None), ((3, 3, True), (0, 5, False)), ((3, 10, True), (5, 5, True)))


class Rank:
    """One of the run's ranks, with what it holds of each tensor."""

    def __init__(self, daemon: Daemon, run: str, rank: int, world: int, shards: Shards | None):
        self.client = _core.Client.connect(daemon.server, 5.0, 5.0)
        self.run = run
        self.spec(world)
        self.client.attach(run, rank, world, False, 0.0, shards=shards)
        held = shards or [None] * len(ELEMENTS)
        self.shards = [shard or (0, n, True) for shard, n in zip(held, ELEMENTS, strict=True)]
        self.weights = [torch.zeros(end - begin) for begin, end, _ in self.shards]
        for i, weights in enumerate(self.weights):
            self.client.bind_weights(i, weights.data_ptr(), weights.nbytes)

    def spec(self, world: int) -> None:
        tensors = [{"name": f"t{i}", "shape": [n], "dtype": "fp32"} for i, n in enumerate(ELEMENTS)]
        group = {"rule": "adamw", "master": "fp32", "state": "fp32"}
        spec = {"run_id": self.run, "tensors": tensors, "groups": [group], "ranks": world, "reduction": 2}
        self.client.create_run(json.dumps(spec))

    def load(self, weights: Sequence[Tensor]) -> None:
        self.client.load_weights([(i, "weights", "fp32", w.data_ptr(), w.nbytes) for i, w in enumerate(weights)])

    def push(self, gradients: Sequence[Tensor]) -> None:
        for i, ((begin, end, contributes), gradient) in enumerate(zip(self.shards, gradients, strict=True)):
            shard = gradient[begin:end].clone()
            if contributes and begin < end:
                self.client.push(i, shard.data_ptr(), shard.nbytes)

    def pulled(self, slot: str) -> list[Tensor]:
        parts = [torch.zeros_like(weights) for weights in self.weights]
        places = [(i, slot, part.data_ptr(), part.nbytes) for i, part in enumerate(parts)]
        updates = self.client.pull_state(self.run, places)
        assert updates == {i: 1 for i, (begin, end, _) in enumerate(self.shards) if begin < end}
        return parts


def step(ranks: Sequence[Rank], gradients: Sequence[Tensor]) -> None:
    for rank in ranks:
        rank.client.begin_step([{"lr": 0.1}])
        rank.push(gradients)
    for pending in [rank.client.end_step(None) for rank in ranks]:
        result = pending.wait(60.0)
        assert result is not None and result["outcome"] == "APPLIED"


@pytest.fixture
def ranks(daemon: Daemon, run: str) -> Iterator[list[Rank]]:
    ranks: list[Rank] = []
    for rank, shards in enumerate(PLACES):
        ranks.append(Rank(daemon, run, rank, len(PLACES), shards))
    yield ranks
    for one in ranks:
        one.client.close()


def test_ranks_with_shards_make_the_step_of_one_rank(daemon: Daemon, run: str, ranks: list[Rank]) -> None:
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(n, generator=random) for n in ELEMENTS]
    gradients = [torch.randn(n, generator=random) for n in ELEMENTS]
    alone = Rank(daemon, run + "-alone", 0, 1, None)
    alone.load(weights)
    step([alone], gradients)
    ranks[0].load(weights)
    step(ranks, gradients)
    whole = {slot: alone.pulled(slot) for slot in ("master", "momentum", "variance")}
    for rank in ranks:
        for i, (begin, end, _) in enumerate(rank.shards):
            assert torch.equal(rank.weights[i], alone.weights[i][begin:end])
            for slot, of_slot in whole.items():
                assert torch.equal(rank.pulled(slot)[i], of_slot[i][begin:end]), slot
        parts = [torch.zeros_like(held) for held in rank.weights]
        rank.client.pull(rank.run, [(i, part.data_ptr(), part.nbytes) for i, part in enumerate(parts)])
        assert all(torch.equal(part, held) for part, held in zip(parts, rank.weights, strict=True))
    alone.client.close()


def test_what_is_not_held_is_not_pushed(ranks: list[Rank]) -> None:
    ranks[0].load([torch.zeros(n) for n in ELEMENTS])
    gradient = torch.ones(5)
    ranks[1].client.begin_step([{}])
    for tensor, held in ((0, r"\[3, 3\)"), (1, r"\[0, 5\)")):
        with pytest.raises(ballast.Rejected, match=f"'t{tensor}': rank 1 holds elements {held}.*contributes nothing"):
            ranks[1].client.push(tensor, gradient.data_ptr(), gradient.nbytes)
    with pytest.raises(ballast.Rejected, match="digests are of whole tensors"):
        ranks[0].client.pull(ranks[0].run, [(0, gradient.data_ptr(), 12)], {0: 1})


def test_wrong_shards_are_refused(daemon: Daemon, run: str) -> None:
    first = Rank(daemon, run, 0, 2, [(0, 4, True), None])
    other = _core.Client.connect(daemon.server, 5.0, 5.0)
    for shards, message in (
        ([(0, 4, True)], "shards: got 1, wanted one for each of the run's 2 tensors"),
        ([(4, 11, True), None], r"shards: \[4, 11\) of tensor 't0', which has 10 elements"),
        ([(5, 10, True), None], r"no rank contributes to elements \[4, 5\) of tensor 0 't0'"),
        ([(4, 10, False), None], r"no rank contributes to elements \[4, 10\) of tensor 0 't0'"),
    ):
        with pytest.raises(ballast.Rejected, match=message):
            other.attach(run, 1, 2, False, 0.0, shards=shards)
    with pytest.raises(TypeError):
        other.attach(run, 1, 2, False, 0.0, shards=[(-1, 10, True), None])
    first.client.close()
    other.close()
