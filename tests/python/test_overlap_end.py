"""overlap_forward: the last step() of a training, which no forward waits for."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from models import assert_close

Make = Callable[..., Any]
FP32 = {"master": "fp32", "state": "fp32", "rounding": "nearest"}
WIDTH = 600  # so that weights take their time


def wide(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randn(32, 8, generator=random)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("commit", ["release", "staged"])
@pytest.mark.parametrize("how", ["close", "with", "del"])
def test_it_is_made_and_its_weights_are_here(how: str, commit: str, make: Make) -> None:
    model, twin = wide(seed=1), wide(seed=1)
    options = {"lr": 0.1, "overlap_forward": True, "commit": commit, **FP32}
    optimizer = make(ballast.SGD, model.named_parameters(), **options) if how != "del" else None
    if optimizer is None:
        optimizer = ballast.SGD(model.named_parameters(), **options)
    train(model, optimizer, 3)
    if how == "close":
        optimizer.close()
    if how == "with":
        with optimizer:
            pass
    del optimizer
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 3)
    assert_close(model, twin)
    again = make(ballast.SGD, wide(seed=2).named_parameters(), weights="server", **options)
    joined = again.connect()
    assert joined.step == 3 and again.last_result.applied


def test_one_that_cannot_be_made_is_told_of_and_holds_nobody_up(make: Make) -> None:
    """The other rank never sends its part; who leaves by an exception does not wait for it."""
    model = wide(seed=1)
    options = {"lr": 0.1, "overlap_forward": True, "world": 2, **FP32}
    optimizer = make(ballast.SGD, model.named_parameters(), rank=0, **options)
    peer = make(ballast.SGD, wide(seed=1).named_parameters(), rank=1, **options)
    joining = threading.Thread(target=peer.connect)
    joining.start()
    optimizer.connect()
    joining.join()
    with pytest.raises(KeyError), optimizer:
        train(model, optimizer, 1)
        raise KeyError
    assert optimizer._membership.session is None


def test_load_state_dict_of_a_module_comes_after_its_weights(make: Make) -> None:
    model = wide(seed=1)
    optimizer = make(ballast.SGD, model.named_parameters(), lr=0.1, overlap_forward=True, **FP32)
    train(model, optimizer, 1)
    best = copy.deepcopy(model.state_dict())
    train(model, optimizer, 3)
    model.load_state_dict(best)
    for name, value in model.state_dict().items():
        assert torch.equal(value, best[name]), name
