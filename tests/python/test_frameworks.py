"""Who makes the steps decides what commit="auto" is. The frameworks themselves are not here: their state is made up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import ballast
from models import layered

AdamW = Callable[..., ballast.AdamW]


def accelerate(
    monkeypatch: pytest.MonkeyPatch, set_up: bool = True, precision: str = "no", **gradients: bool
) -> SimpleNamespace:
    state = SimpleNamespace(
        AcceleratorState=SimpleNamespace(_shared_state={"_mixed_precision": precision}),
        PartialState=SimpleNamespace(_shared_state={"device": "cpu"} if set_up else {}),
        GradientState=SimpleNamespace(_shared_state=dict(gradients)),
    )
    monkeypatch.setitem(sys.modules, "accelerate.state", state)  # type: ignore[arg-type]
    return state


def commit_of(optimizer: ballast.AdamW) -> str:
    optimizer.connect()
    return optimizer._settings.step_rules.commit


@pytest.mark.parametrize("module", ["lightning.pytorch", "pytorch_lightning", "torchtune"])
def test_auto_is_staged_beside_a_framework(
    module: str, adamw: AdamW, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    assert commit_of(adamw(layered(seed=1).named_parameters())) == "release"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace())  # type: ignore[arg-type]
    assert commit_of(adamw(layered(seed=1).named_parameters(), run=f"{run}-auto")) == "staged"
    asked = adamw(layered(seed=1).named_parameters(), run=f"{run}-asked", commit="release")
    assert commit_of(asked) == "release"


@pytest.mark.parametrize("set_up", [False, True])
def test_auto_is_staged_where_accelerate_is_set_up_before_the_run(
    set_up: bool, adamw: AdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = adamw(layered(seed=1).named_parameters())
    accelerate(monkeypatch, set_up=set_up)
    assert commit_of(optimizer) == ("staged" if set_up else "release")


def test_accelerate_tells_a_release_run_which_micro_batch_is_the_last(
    adamw: AdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = accelerate(monkeypatch, sync_gradients=True)
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit="release", gradient_accumulation_steps=4)
    assert optimizer._is_accelerate_prepared  # as Accelerate asks
    for micros in (4, 1, 3):
        for micro in range(micros):
            state.GradientState._shared_state["sync_gradients"] = micro + 1 == micros
            model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert optimizer.last_result is not None and optimizer.last_result.applied
    assert optimizer.last_result.step == 3


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("commit", ["release", "staged"])
def test_accelerates_accumulation_is_of_what_it_has_prepared(
    prepared: bool, commit: str, adamw: AdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another optimizer, of the same loop, makes a step whenever it is told to, as torch's."""
    accelerate(monkeypatch, sync_gradients=False)
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit=commit, gradient_accumulation_steps=1 + prepared)
    if prepared:
        optimizer._is_accelerate_prepared = True
    for _ in range(1 if prepared else 3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.run_status().step == (0 if prepared else 3)


def test_losses_that_accelerate_scales_are_refused_when_it_prepares(
    adamw: AdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = adamw(layered(seed=1).named_parameters())
    accelerate(monkeypatch, precision="fp16", sync_gradients=True)
    with pytest.raises(ballast.Rejected, match="mixed_precision='fp16'.*'bf16'.*ballast.GradScaler"):
        getattr(optimizer, "_is_accelerate_prepared", False)
    accelerate(monkeypatch, precision="bf16", sync_gradients=True)
    assert optimizer._is_accelerate_prepared
