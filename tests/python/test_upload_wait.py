"""How ranks above 0 wait for rank 0's upload: with small questions, and ever fewer of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ballast
from models import layered, same_bits, weights_of

AdamW = Callable[..., ballast.AdamW]


class Asked:
    """A client that notes what it is asked."""

    def __init__(self, client: Any):
        self._client = client
        self.questions: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.questions.append(name)
        return getattr(self._client, name)


def test_the_wait_never_asks_for_the_spec_and_asks_ever_less_often(
    adamw: AdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = layered(seed=1), layered(seed=1)
    ranks = [adamw(model.named_parameters(), rank=rank, world=2) for rank, model in enumerate((first, second))]
    for rank in ranks:
        rank.connect()
    session = ranks[1]._membership.session
    assert session is not None
    asked = Asked(session.weights._client)
    session.weights._client = asked  # type: ignore[assignment]
    pauses: list[float] = []

    def step(model: torch.nn.Module, optimizer: ballast.AdamW) -> None:
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()

    rank_0 = threading.Thread(target=step, args=(first, ranks[0]))

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 7:
            rank_0.start()

    monkeypatch.setattr("ballast.rank_zero.time.sleep", pause)
    step(second, ranks[1])
    rank_0.join()
    assert pauses[:7] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0] and set(pauses[7:]) <= {2.0}
    assert "get_run" not in asked.questions and asked.questions.count("list_runs") == len(pauses) + 1
    assert same_bits(weights_of(first), weights_of(second))
