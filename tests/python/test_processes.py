"""Forks and exits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ballast
from daemon import Daemon
from models import layered

AdamW = Callable[..., ballast.AdamW]


@pytest.mark.parametrize("attached", [False, True])
def test_a_data_loader_forks_its_workers(attached: bool, adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    if attached:
        optimizer.connect()
    loader = DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):  # workers end and are forked again, then in the middle of training
        for (batch,) in loader:
            model(batch).sum().backward()
            optimizer.step()
    assert optimizer.last_result is not None
    assert (optimizer.last_result.step, optimizer.last_result.outcome) == (8, "APPLIED")


class Scaled(torch.utils.data.Dataset[torch.Tensor]):
    """Its items pass through a module, in the workers."""

    def __init__(self) -> None:
        self.scale = torch.nn.Linear(8, 8)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            scaled: torch.Tensor = self.scale(torch.ones(8))
        return scaled


def test_workers_that_run_modules_do_not_wait_for_weights(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), overlap_forward=True)
    loader = DataLoader(Scaled(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):  # the second time, forked while a step is under way
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
    assert optimizer.last_result is not None
    assert (optimizer.last_result.step, optimizer.last_result.outcome) == (8, "APPLIED")


def test_forked_children_do_no_harm(program: Callable[..., object]) -> None:
    trainer = program("forks")
    assert [trainer.hear() for _ in range(5)] == ["exit: 0", "del: 0", "refused: True", "use: 0", "step 2 APPLIED"]
    assert trainer.end() == 0


def test_a_fork_connects_when_nothing_is_connected_and_is_refused_else(program: Callable[..., Any]) -> None:
    trainer = program("forks_that_connect")
    assert "spawn" in trainer.hear() and trainer.hear() == "beside: 0"
    for number in range(3):
        assert [trainer.hear(), trainer.hear()] == ["APPLIED", f"after-{number}: 0"]
    assert trainer.end() == 0


def test_a_program_that_ends_leaves_its_rank(run: str, daemon: Daemon, program: Callable[..., object]) -> None:
    trainer = program("left_open")
    assert trainer.hear() == "done"
    assert trainer.end() == 0
    model = layered(seed=1)
    with ballast.AdamW(model.named_parameters(), server=daemon.server, run=run, weights="server") as optimizer:
        assert optimizer.last_result is not None and optimizer.last_result.step == 1
