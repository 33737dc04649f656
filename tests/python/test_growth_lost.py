"""A run that has grown, and whose daemon comes back from a disk on which it has not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from daemon import Daemon, free_port
from models import layered, same_bits, weights_of
from side_by_side import side_by_side

Trainer = tuple[nn.Sequential, ballast.AdamW]


def join(server: str, world: int, **options: Any) -> list[Trainer]:
    models = [layered(seed=1) for _ in range(world)]
    return [
        (
            model,
            ballast.AdamW(
                model[1:].named_parameters(), lr=1e-2, server=server, run="r", rank=r, world=world, **options
            ),
        )
        for r, model in enumerate(models)
    ]


def train(model: nn.Sequential, optimizer: ballast.AdamW, last: int) -> list[int]:
    """Steps up to `last`, as a loop makes them that goes on after a rewind. Returns what it went back to."""
    went_back = []
    while True:
        try:
            if optimizer.last_result is not None and optimizer.last_result.step >= last:
                return went_back
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
        except ballast.RunRewound as rewound:
            went_back.append(rewound.step)
        optimizer.zero_grad()


def grow(model: nn.Sequential, optimizer: ballast.AdamW) -> None:
    optimizer.add_param_group({"params": model[0].named_parameters(prefix="new"), "lr": 0.02})


def change_formats(_: nn.Sequential, optimizer: ballast.AdamW) -> None:
    optimizer.param_groups[0].update({"master": "fp32", "eps": 1e-4})


def both(model: nn.Sequential, optimizer: ballast.AdamW) -> None:
    """In two steps, each of which changes the run."""
    grow(model, optimizer)
    train(model, optimizer, 4)
    change_formats(model, optimizer)


@pytest.mark.parametrize("options", [{}, {"commit": "staged"}, {"overlap_forward": True}], ids=str)
@pytest.mark.parametrize("change", [grow, change_formats, both])
@pytest.mark.parametrize("world", [1, 2])
def test_it_is_changed_once_more(
    world: int, change: Callable[..., None], options: dict[str, Any], tmp_path: Path
) -> None:
    port, disk, before = free_port(), tmp_path / "disk", tmp_path / "before"
    disk.mkdir()
    with Daemon(port, storage=disk) as daemon:
        ranks = join(daemon.server, world, **options)
        side_by_side(world, lambda rank: train(*ranks[rank], 3))
        assert ranks[0][1].checkpoint() == 3
        shutil.copytree(disk, before)

        def go_on(rank: int) -> None:
            change(*ranks[rank])
            train(*ranks[rank], 6)

        side_by_side(world, go_on)
        daemon.kill()
    shutil.rmtree(disk)
    before.rename(disk)
    with Daemon(port, storage=disk):
        assert side_by_side(world, lambda rank: train(*ranks[rank], 8)) == [[3]] * world
        model, optimizer = ranks[0]
        assert len(optimizer.param_groups) == (1 if change is change_formats else 2)
        there = [weight.clone() for weight in weights_of(model)]
        optimizer.pull()
        assert same_bits(weights_of(model), there)
        for other, _ in ranks:
            assert same_bits(weights_of(other), there)
        for _, one in ranks:
            one.close()
