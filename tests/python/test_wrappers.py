"""torch.distributed: what of it is taken over, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import distributed, nn

import ballast
from models import layered

AdamW = Callable[..., ballast.AdamW]


@pytest.fixture
def process_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_module_in_ddp_is_refused_by_name(process_group: None, adamw: AdamW) -> None:
    wrapped = nn.parallel.DistributedDataParallel(layered(seed=1))
    optimizer = adamw(wrapped.named_parameters())
    with pytest.raises(
        ballast.Rejected, match="'module.0.weight' is in a DistributedDataParallel module.*plain module"
    ):
        wrapped(torch.ones(2, 8)).sum().backward()
    assert optimizer.last_result is None


def test_a_module_wrapped_after_the_optimizer_was_made_is_refused(process_group: None, adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(ballast.Rejected, match="DistributedDataParallel"):
        optimizer.connect()
    del wrapped


def test_fully_sharded_modules_are_refused_by_name(process_group: None, adamw: AdamW) -> None:
    from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    model = layered(seed=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ballast.Rejected, match="'0.weight' is sharded by DTensor"):
        adamw(model.named_parameters())


def numbers(optimizer: ballast.AdamW) -> tuple[int, int]:
    rank = optimizer._settings.rank
    return rank.number, rank.world


def test_rank_and_world_are_those_of_torch_distributed(adamw: AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 3)
    optimizer = adamw(layered(seed=1).named_parameters())
    assert numbers(optimizer) == (2, 3)
    given = adamw(layered(seed=1).named_parameters(), rank=0, world_size=1)
    assert numbers(given) == (0, 1)


def test_contradictory_and_strange_places_are_refused(adamw: AdamW) -> None:
    for options, message in (
        ({"world": 2, "world_size": 3}, "world=2 and world_size=3"),
        ({"world": 0}, "world=0: it must be a whole number of at least 1"),
        ({"rank": -1}, "rank=-1"),
        ({"rank": "0"}, "rank='0'"),
    ):
        with pytest.raises(ballast.Rejected, match=message):
            adamw(layered(seed=1).named_parameters(), **options)
