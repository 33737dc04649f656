"""ballast.AdamW as a torch.optim.Optimizer."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import ballast
from ballast.session import Session
from daemon import Daemon
from models import layered

AdamW = Callable[..., ballast.AdamW]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_it_is_an_optimizer(adamw: AdamW) -> None:
    optimizer = adamw(layered(seed=1).named_parameters(), lr=0.25)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults["lr"] == 0.25
    assert optimizer.defaults["betas"] == (0.9, 0.999)
    assert [len(group["params"]) for group in optimizer.param_groups] == [6]
    assert "lr: 0.25" in repr(optimizer)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 1)]),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=1e-2),
}


def test_every_scheduler_of_torch_is_tested() -> None:
    known = {name for name in lr_scheduler.__all__ if name != "LRScheduler"}
    assert known <= SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_sets_what_each_step_uses(name: str, adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    ours = adamw(model.named_parameters(), lr=1e-2, state_dtype="fp32", master_weight_bits=32)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    schedulers = SCHEDULERS[name](ours), SCHEDULERS[name](theirs)
    for _ in range(4):
        train(model, ours)
        train(twin, theirs)
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_group_can_be_added_before_the_first_gradient(adamw: AdamW, run: str) -> None:
    model = layered(seed=1)
    optimizer = adamw(model[0].named_parameters(prefix="0"))
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.5})
    optimizer.add_param_group({"params": model[2].weight, "weight_decay": 0})
    before = [layer.weight.detach().clone() for layer in model]
    train(model, optimizer)
    assert not any(torch.equal(layer.weight, old) for layer, old in zip(model, before, strict=True))
    tensors = optimizer._membership.connected().get_run(run)["spec"]["tensors"]
    assert [tensor["name"] for tensor in tensors] == ["0.weight", "0.bias", "param.2", "param.3", "param.4"]


def test_a_refused_group_leaves_the_optimizer_as_it_was(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.parameters())
    for unfit in ({"params": model.parameters()}, {"params": iter(())}, {"params": {nn.Parameter(torch.zeros(1))}}):
        with pytest.raises(ballast.Rejected):
            optimizer.add_param_group(unfit)
    assert len(optimizer.param_groups) == 1
    train(model, optimizer)
    assert optimizer.last_result is not None and optimizer.last_result.applied


def test_state_dict_before_the_first_step(adamw: AdamW) -> None:
    state = adamw(layered(seed=1).parameters()).state_dict()
    assert state.keys() == {"state", "param_groups", "ballast"}
    assert state["state"] == {} and state["ballast"]["step"] == 0
    assert state["param_groups"][0]["params"] == list(range(6))


@pytest.mark.parametrize("steps", [0, 1])
def test_state_dict_goes_through_a_file(steps: int, adamw: AdamW, run: str) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), lr=0.5)
    for _ in range(steps):
        train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.125
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    pickle.dumps(optimizer.state_dict())
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert len(state["state"]) == 6 * steps
    token = state.get("ballast")
    assert (token is not None and (token["run"], token["step"], token["generation"]) == (run, 1, 1)) == bool(steps)
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.125
    train(model, optimizer)
    assert optimizer.last_result is not None and optimizer.last_result.step == steps + 1


def test_torchs_own_state_dict_gives_its_options(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    theirs = torch.optim.AdamW(layered(seed=1).parameters(), lr=0.5)
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["state_dtype"] == "companded8"
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


def test_it_cannot_be_copied_or_pickled(adamw: AdamW) -> None:
    optimizer = adamw(layered(seed=1).parameters())
    for take in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ballast.Rejected, match="state_dict"):
            take(optimizer)


def test_a_closure_is_evaluated_and_its_loss_returned(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.requires_grad
    assert optimizer.run_status()["loss"] == pytest.approx(loss.item())


def test_the_loss_reaches_the_daemon(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.parameters())
    loss = model(torch.ones(2, 8)).sum()
    loss.backward()
    assert optimizer.step(loss=loss) is None
    status = optimizer.run_status()
    assert status.loss == pytest.approx(loss.item())
    assert status["step"] == status.last_result.step == 1
    assert status.last_result.outcome == "APPLIED"
    assert status.bytes.weights > 0
    with pytest.raises(AttributeError, match="no 'los' here; there are run_id"):
        status.los


def test_step_hooks_and_profiler_work(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.parameters())
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    with torch.profiler.profile() as profile:
        train(model, optimizer)
    assert called == ["before", "after"]
    assert any("Optimizer.step#AdamW.step" in event.key for event in profile.key_averages())


def test_closing_leaves_the_run_to_another(adamw: AdamW) -> None:
    model = layered(seed=1)
    with adamw(model.named_parameters()) as optimizer:
        train(model, optimizer)
    with pytest.raises(ballast.Rejected, match="closed"):
        optimizer.step()
    successor = adamw(model.named_parameters())
    train(model, successor)
    assert successor.last_result is not None and successor.last_result.step == 2


def test_deleting_leaves_the_run_to_another(daemon: Any, run: str) -> None:
    model = layered(seed=1)
    optimizer = ballast.AdamW(model.named_parameters(), server=daemon.server, run=run)
    train(model, optimizer)
    del optimizer
    with ballast.AdamW(model.named_parameters(), server=daemon.server, run=run) as successor:
        train(model, successor)
        assert successor.last_result is not None and successor.last_result.step == 2


@pytest.mark.parametrize("options", [{}, {"overlap_forward": True}, {"commit": "staged"}], ids=str)
def test_nothing_that_it_has_keeps_it_alive(daemon: Any, run: str, options: dict[str, Any]) -> None:
    """Neither its parts, hooks nor guards, at any time: no garbage collection is needed to close it."""
    model = layered(seed=1)
    torch.optim.SGD(model.parameters())  # the first optimizer of a process is kept by what torch imports for it
    gc.disable()
    try:
        for stage in ("made", "connected", "trained", "accumulated", "rewound"):
            optimizer = ballast.AdamW(
                model.named_parameters(), server=daemon.server, run=run, snapshots=1, snapshot_every=1, **options
            )
            optimizer.register_client_state("rng", torch.get_rng_state, torch.set_rng_state)
            if stage != "made":
                optimizer.connect()
            if stage in ("trained", "rewound"):
                train(model, optimizer)
            if stage == "rewound":
                optimizer.rewind()
            if stage == "accumulated":
                with optimizer.accumulate(final=True) as micro:
                    micro.report(model(torch.ones(2, 8)).sum())
                optimizer.step()
            optimizer.wait()
            alive = weakref.ref(optimizer)
            del optimizer
            assert alive() is None, stage
    finally:
        gc.enable()


def test_a_parameter_that_leads_to_it_does_not_keep_it_alive(daemon: Any, run: str) -> None:
    """A cycle by way of a parameter goes with the next garbage collection, as every other does."""
    model = layered(seed=1)
    optimizer = ballast.AdamW(model.named_parameters(), server=daemon.server, run=run)
    model[0].weight.trained_by = optimizer
    alive = weakref.ref(optimizer)
    del optimizer, model
    gc.collect()
    assert alive() is None


def test_a_hook_that_runs_keeps_it_alive(daemon: Any, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last name goes away while backward() is in it, as when another thread deletes it, or a collection does."""
    model = layered(seed=1)
    names = [ballast.AdamW(model.named_parameters(), server=daemon.server, run=run)]
    alive = weakref.ref(names[0])
    admit = Session.admit

    def forget_and_admit(*args: Any) -> None:
        names.clear()
        assert alive() is not None
        admit(*args)

    monkeypatch.setattr(Session, "admit", forget_and_admit)
    model(torch.ones(2, 8)).sum().backward()
    assert alive() is None


def test_a_parameter_has_one_optimizer(adamw: AdamW, run: str) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    with pytest.raises(ballast.Rejected, match=rf"'0\.weight' is trained by another.*'{run}': close\(\) that one"):
        adamw(model.named_parameters(), run=f"{run}-other")
    optimizer.close()
    adamw(model.named_parameters(), run=f"{run}-other")


@pytest.mark.parametrize("width", [8, 4], ids=["alike", "of another shape"])
def test_two_networks_under_one_name_are_told_of_each_other(width: int, adamw: AdamW, run: str) -> None:
    """As an actor and a critic whose optimizers are made with the same options."""
    first = adamw([("actor.weight", nn.Parameter(torch.ones(8)))])
    first.connect()
    words = rf"of this process, that of 'actor\.weight', is in run '{run}': .* run= of its own.* close\(\) it$"
    second = adamw([("actor.weight", nn.Parameter(torch.ones(width)))])
    with pytest.raises(ballast.Rejected, match=words):
        second.connect()
    first.close()
    with pytest.raises(ballast.Rejected) if width != 8 else nullcontext() as refused:
        second.connect()
    assert refused is None or "of this process" not in str(refused.value)


def test_an_optimizer_that_nobody_has_leaves_its_parameters_to_the_next(daemon: Daemon, run: str) -> None:
    model = layered(seed=1)

    def fit(number: int) -> None:
        loop: dict[str, Any] = {}
        loop["self"] = loop  # as Lightning's trainer is held by its parts
        loop["optimizer"] = ballast.AdamW(model.named_parameters(), server=daemon.server, run=f"{run}-{number}")
        model(torch.ones(2, 8)).sum().backward()
        loop["optimizer"].step()
        assert loop["optimizer"].last_result.applied

    gc.collect()
    gc.disable()
    try:
        fit(1)
        fit(2)
    finally:
        gc.enable()
        gc.collect()


def test_after_closing_torch_has_its_gradients_again(adamw: AdamW) -> None:
    model = layered(seed=1)
    adamw(model.named_parameters()).close()
    model(torch.ones(2, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
