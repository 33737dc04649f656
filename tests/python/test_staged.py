"""Steps that the daemon judges as a whole: clipping, loss scaling, skipping."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from daemon import Daemon
from models import layered, same_bits, weights_of

AdamW = Callable[..., ballast.AdamW]
# What float16 cannot hold is an infinity on the wire.
NARROW = {"gradient_dtype": "fp16"}


def result_of(optimizer: ballast.AdamW) -> ballast.StepResult:
    assert optimizer.last_result is not None
    return optimizer.last_result


def commit_of(optimizer: ballast.AdamW) -> str:
    optimizer.connect()
    return optimizer._settings.step_rules.commit


def test_auto_is_staged_where_something_needs_it(adamw: AdamW, run: str) -> None:
    def commit(name: str, scaler: bool = False, **options: Any) -> str:
        with adamw(layered(seed=1).named_parameters(), run=f"{run}-{name}", **options) as optimizer:
            if scaler:
                ballast.GradScaler(optimizer)
            return commit_of(optimizer)

    assert commit("plain") == "release"
    assert commit("stop", nonfinite="stop") == "release"
    assert commit("norm", max_grad_norm=1.0) == "staged"
    assert commit("skip", nonfinite="skip_step") == "staged"
    assert commit("scaler", scaler=True) == "staged"
    assert commit("asked", commit="staged") == "staged"


def test_a_staged_step_gives_the_bits_of_a_released_one(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    released = adamw(model.named_parameters())
    staged = adamw(twin.named_parameters(), run=f"{released.run}-twin", commit="staged")
    for _ in range(5):
        for net, optimizer in ((model, released), (twin, staged)):
            net(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
    assert same_bits(weights_of(model), weights_of(twin))


def test_weights_stay_until_the_verdict_and_lr_may_change_until_then(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), lr=0.5, commit="staged")
    reference = adamw(twin.named_parameters(), lr=0.25, run=f"{optimizer.run}-twin")
    before = weights_of(model)
    model(torch.ones(2, 8)).sum().backward()
    assert same_bits(before, weights_of(model))
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    twin(torch.ones(2, 8)).sum().backward()
    reference.step()
    assert same_bits(weights_of(model), weights_of(twin))


def test_a_skipped_step_changes_nothing_and_schedulers_can_tell(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), lr=0.1, master_weight_bits=32, nonfinite="skip_step")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = weights_of(model)
    for factor, skipped in ((float("nan"), True), (1.0, False)):
        (model(torch.ones(2, 8)).sum() * factor).backward()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            optimizer.step()
        assert optimizer.step_was_skipped == skipped == result_of(optimizer).skipped == (not result_of(optimizer))
        assert [str(w.message) for w in told if "SKIPPED (nonfinite" in str(w.message)] != [] if skipped else not told
        if not optimizer.step_was_skipped:
            scheduler.step()
        assert same_bits(before, weights_of(model)) == skipped
    assert optimizer.param_groups[0]["lr"] == 0.05 and result_of(optimizer).step == 2


def scales_of(optimizer: ballast.AdamW, w: nn.Parameter, steps: int) -> list[tuple[float, str]]:
    """Each step's scale, and how it ended. The gradient is the scale: above 65504 it is too large for float16."""
    scaler = ballast.GradScaler(optimizer, init_scale=2.0**17, growth_interval=2)
    seen = []
    for _ in range(steps):
        scaler.scale(w.sum()).backward()
        before = w.detach().clone()
        scaler.step(optimizer)
        seen.append((scaler.get_scale(), result_of(optimizer).outcome))
        assert torch.equal(w, before) == optimizer.step_was_skipped
        scaler.update()
    return seen


SEQUENCE = [
    (2.0**17, "SKIPPED"),
    (2.0**16, "SKIPPED"),
    (2.0**15, "APPLIED"),
    (2.0**15, "APPLIED"),
    (2.0**16, "SKIPPED"),
    (2.0**15, "APPLIED"),
    (2.0**15, "APPLIED"),
]


def test_the_scale_falls_at_an_overflow_and_grows_again(adamw: AdamW) -> None:
    w = nn.Parameter(torch.ones(64))
    optimizer = adamw([("w", w)], **NARROW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an overflow is nothing to warn of
        assert scales_of(optimizer, w, 7) == SEQUENCE
    assert result_of(optimizer).grad_norm == pytest.approx(8.0)  # of 64 ones: unscaled
    status = optimizer.run_status()
    assert (status.steps_applied, status.steps_skipped) == (4, 3)


def test_the_scale_is_the_same_on_every_rank(daemon: Daemon, run: str) -> None:
    def trainer(rank: int) -> list[tuple[float, str]]:
        w = nn.Parameter(torch.ones(64))
        with ballast.AdamW([("w", w)], server=daemon.server, run=run, rank=rank, world=2, **NARROW) as optimizer:
            return scales_of(optimizer, w, 7)

    with ThreadPoolExecutor(2) as pool:
        assert [done.result(timeout=120) for done in [pool.submit(trainer, r) for r in range(2)]] == [SEQUENCE] * 2


def test_a_scale_gives_the_weights_of_none(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    plain = adamw(model.named_parameters())
    scaled = adamw(twin.named_parameters(), run=f"{plain.run}-twin")
    scaler = ballast.GradScaler(scaled, init_scale=1024.0)
    for _ in range(3):
        model(torch.ones(2, 8)).square().sum().backward()
        plain.step()
        scaler.scale(twin(torch.ones(2, 8)).square().sum()).backward()
        scaler.step(scaled)
        scaler.update()
    assert same_bits(weights_of(model), weights_of(twin))


def test_overlap_forward_gives_the_same_bits(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    waits = adamw(model.named_parameters(), max_grad_norm=0.5)
    overlaps = adamw(twin.named_parameters(), max_grad_norm=0.5, run=f"{waits.run}-twin", overlap_forward=True)
    for _ in range(5):
        for net, optimizer in ((model, waits), (twin, overlaps)):
            net(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
    overlaps.wait()
    assert same_bits(weights_of(model), weights_of(twin))
    assert result_of(overlaps).grad_norm == result_of(waits).grad_norm > 0.5
