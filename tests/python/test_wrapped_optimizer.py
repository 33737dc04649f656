"""The optimizer inside an object that has its class, or a copy of its __dict__, as Lightning's has."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ballast
from ballast import hooks
from models import layered

AdamW = Callable[..., ballast.AdamW]


class LightningOptimizer:
    """As lightning.pytorch.core.optimizer makes it: step() goes to the real one by way of a strategy, and the class is of
    the real one's class too."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        return self._optimizer.step(closure, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class CopyingLightningOptimizer(LightningOptimizer):
    """As older ones make it: with a copy of the real one's __dict__."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.__dict__ = {key: value for key, value in vars(optimizer).items() if key not in ("step", "__del__")}
        super().__init__(optimizer)


KINDS = pytest.mark.parametrize("kind", [LightningOptimizer, CopyingLightningOptimizer])


def fit(model: torch.nn.Module, optimizer: Any) -> None:
    """A step, as Lightning makes it: backward() in the closure."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@KINDS
def test_a_wrapper_that_is_deleted_leaves_the_optimizer_open(kind: Any, adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    for step in (1, 3):
        wrapper = kind(optimizer)
        fit(model, wrapper)
        alive = weakref.ref(wrapper)
        del wrapper
        gc.collect()
        assert alive() is None
        fit(model, optimizer)
        assert optimizer.last_result is not None and (optimizer.last_result.step, bool(optimizer.last_result)) == (
            step + 1,
            True,
        )


@KINDS
def test_a_wrapper_has_the_options_of_the_optimizer(kind: Any, adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model[:2].named_parameters())
    wrapper = kind(optimizer)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(state)
    assert wrapper.param_groups is optimizer.param_groups and wrapper.param_groups[0]["lr"] == 0.5
    state["param_groups"][0]["lr"] = 0.25
    wrapper.load_state_dict(state)
    assert wrapper.param_groups is optimizer.param_groups and optimizer.param_groups[0]["lr"] == 0.25
    assert wrapper.state is optimizer.state and wrapper.defaults is optimizer.defaults
    wrapper.loss_scale = 8.0
    assert optimizer.loss_scale == 8.0
    wrapper.add_param_group({"params": model[2].named_parameters(prefix="2")})
    assert len(optimizer.param_groups) == 2


@KINDS
def test_a_wrapper_that_is_closed_closes_the_optimizer(kind: Any, adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    fit(model, optimizer)
    kind(optimizer).close()
    with pytest.raises(ballast.Rejected, match="is closed: make a new one"):
        optimizer.step()
    successor = adamw(model.named_parameters())
    fit(model, successor)
    assert successor.last_result is not None and successor.last_result.step == 2


@KINDS
def test_an_optimizer_that_is_collected_with_its_wrapper_gives_its_rank_back(kind: Any, daemon: Any, run: str) -> None:
    model = layered(seed=1)
    wrapper = kind(ballast.AdamW(model.named_parameters(), server=daemon.server, run=run))
    wrapper.itself = wrapper  # a cycle
    fit(model, wrapper)
    assert all(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    del wrapper
    gc.collect()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    with ballast.AdamW(model.named_parameters(), server=daemon.server, run=run) as successor:
        fit(model, successor)
        assert successor.last_result is not None and successor.last_result.step == 2


def test_weights_that_return_while_it_is_deleted_have_their_memory(
    daemon: Any, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is closed first, then what weights are written into is let go."""
    model = layered(seed=1)
    optimizer = ballast.AdamW(model.named_parameters(), server=daemon.server, run=run)
    optimizer.connect()
    session = weakref.ref(optimizer._membership.session)
    closed = []
    remove = hooks.release_clipping

    def look(owner: Any) -> None:
        closed.append(session() is not None)
        remove(owner)

    monkeypatch.setattr(hooks, "release_clipping", look)
    del optimizer
    assert closed == [True] and session() is None
