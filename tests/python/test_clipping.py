"""torch's clipping functions, of gradients that are the daemon's: they answer with its norm, and step() clips."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_before

import ballast
from daemon import Daemon
from models import assert_close, layered, same_bits, weights_of
from side_by_side import side_by_side

AdamW = Callable[..., ballast.AdamW]
EXACT = {"state_dtype": "fp32", "master_weight_bits": 32}
# That reach torch's clipping otherwise than by a module's attribute need its inner functions.
INNER = hasattr(torch.nn.utils.clip_grad, "_clip_grads_with_norm_")


def with_total_norm(parameters: Any, max_norm: float) -> torch.Tensor:
    given = list(parameters)
    norm = torch.nn.utils.get_total_norm([p.grad for p in given if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(given, max_norm, norm)
    return norm


CLIPS: dict[str, Callable[[Any, float], torch.Tensor]] = {
    "torch.nn.utils.clip_grad_norm_": lambda given, norm: torch.nn.utils.clip_grad_norm_(given, norm),
    "imported before": imported_before,
    "in two": with_total_norm,
    "filtered": lambda given, norm: torch.nn.utils.clip_grad_norm_([p for p in given if p.grad is not None], norm),
}


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


@pytest.mark.skipif(not INNER, reason="this torch clips in one function")
@pytest.mark.parametrize("how", CLIPS)
@pytest.mark.parametrize("max_norm", [0.5, 1e3, math.inf])
def test_it_gives_torchs_norms_and_torchs_weights(how: str, max_norm: float, adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit="staged", **EXACT)
    theirs = torch.optim.AdamW(twin.parameters())
    for step in range(10):
        for one in (model, twin):
            one(batch(step)).square().mean().backward()
        norm = CLIPS[how](model.parameters(), max_norm)
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        assert norm.dtype == torch.float32 and norm.shape == ()
        torch.testing.assert_close(norm, expected)
        for one in (optimizer, theirs):
            one.step()
            one.zero_grad()
        assert optimizer.last_result is not None and optimizer.last_result.applied
        assert optimizer.last_result.grad_norm == pytest.approx(float(norm), rel=1e-6)
    assert_close(model, twin)


def test_clipping_by_the_call_gives_the_bits_of_the_option(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    called = adamw(model.named_parameters(), commit="staged")
    option = adamw(twin.named_parameters(), max_grad_norm=0.25, run=f"{called.run}-twin")
    for step in range(5):
        model(batch(step)).square().mean().backward()
        called.clip_grad_norm_(0.25)
        called.step()
        twin(batch(step)).square().mean().backward()
        option.step()
        assert called.last_result is not None and option.last_result is not None
        assert called.last_result.clip_coefficient == option.last_result.clip_coefficient
    assert same_bits(weights_of(model), weights_of(twin))


def test_the_smaller_of_call_and_option_holds(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), max_grad_norm=0.5)
    for asked, holds in ((0.25, 0.25), (1.0, 0.5), (math.inf, 0.5)):
        (10 * model(batch(1)).square().mean()).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), asked))
        optimizer.step()
        assert norm > 1 and optimizer.last_result is not None
        assert optimizer.last_result.clip_coefficient == pytest.approx(holds / norm, rel=1e-4)


def test_a_second_call_sees_what_the_first_clipped(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit="staged")
    for one in (model, twin):
        (10 * one(batch(1)).square().mean()).backward()
    for asked in (math.inf, 0.5, math.inf, 0.25, math.inf):
        ours = torch.nn.utils.clip_grad_norm_(model.parameters(), asked)
        torch.testing.assert_close(ours, torch.nn.utils.clip_grad_norm_(twin.parameters(), asked))
    optimizer.step()


def test_it_follows_accumulation_whose_length_nobody_told(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit="staged", **EXACT)
    theirs = torch.optim.AdamW(twin.parameters())
    number = 0
    for micros in (3, 1, 2):
        for _ in range(micros):
            number += 1
            for one in (model, twin):
                (one(batch(number)).square().mean() / micros).backward()
        torch.testing.assert_close(
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3),
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.3),
        )
        for opt in (optimizer, theirs):
            opt.step()
            opt.zero_grad()
    assert_close(model, twin)


@pytest.mark.parametrize("world", [2, 8])
def test_the_norm_is_of_the_mean_over_ranks(world: int, daemon: Daemon, run: str) -> None:
    models, trained = ([layered(seed=1) for _ in range(world)] for _ in range(2))
    for rank, model in enumerate(models):
        model(batch(rank)).square().mean().backward()
    mean = [
        torch.stack([p.grad for p in ps if p.grad is not None]).mean(0) for ps in zip(*(m.parameters() for m in models))
    ]
    expected = float(torch.stack([g.norm() for g in mean]).norm())

    def trainer(rank: int) -> tuple[float, float]:
        model = trained[rank]
        options: dict[str, Any] = {"rank": rank, "world": world, "commit": "staged"}
        with ballast.AdamW(model.named_parameters(), server=daemon.server, run=run, **options) as optimizer:
            model(batch(rank)).square().mean().backward()
            norm = float(optimizer.clip_grad_norm_(0.1))
            optimizer.step()
            assert optimizer.last_result is not None and optimizer.last_result.applied
            return norm, optimizer.last_result.clip_coefficient

    answers = side_by_side(world, trainer)
    assert len(set(answers)) == 1
    assert answers[0] == (pytest.approx(expected, rel=1e-5), pytest.approx(0.1 / expected, rel=1e-4))


def test_unscaling_and_clipping_as_torchs_recipe_does(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), **EXACT)
    theirs = torch.optim.AdamW(twin.parameters())
    scaler = ballast.GradScaler(optimizer, init_scale=1024.0)
    for step in range(3):
        scaler.scale(model(batch(step)).square().mean()).backward()
        twin(batch(step)).square().mean().backward()
        scaler.unscale_(optimizer)
        torch.testing.assert_close(
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3),
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.3),
        )
        scaler.step(optimizer)
        scaler.update()
        theirs.step()
        theirs.zero_grad()
    assert_close(model, twin)


def test_a_gradient_that_is_not_finite(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit="staged", nonfinite="skip_step", **EXACT)
    before = weights_of(model)
    (model(batch(1)).sum() * float("nan")).backward()
    assert not math.isfinite(optimizer.clip_grad_norm_(1.0))
    with pytest.raises(RuntimeError, match="not? ?finite|cannot be clipped"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    with pytest.warns(UserWarning, match="SKIPPED"):
        optimizer.step()
    assert same_bits(before, weights_of(model))


def test_without_a_gradient_it_is_torchs_zero(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit="staged")
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == 0
    model(batch(1)).sum().backward()
    optimizer.step()
    assert float(optimizer.clip_grad_norm_(1.0)) == 0


def other(model: nn.Module) -> list[nn.Parameter]:
    foreign = nn.Linear(8, 8)
    foreign(torch.ones(2, 8)).sum().backward()
    return [*model.parameters(), *foreign.parameters()]


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "some": (lambda m: torch.nn.utils.clip_grad_norm_(m[0].parameters(), 1.0), "without parameter '2.(weight|bias)'"),
    "one": (lambda m: torch.nn.utils.clip_grad_norm_(m[0].weight, 1.0), "without parameter '"),
    "others too": (lambda m: torch.nn.utils.clip_grad_norm_(other(m), 1.0), "trains some, and others not"),
    "norm_type": (lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0, math.inf), "norm_type=inf.*L2"),
    "max_norm": (lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.0), "max_norm=0.0.*above 0"),
    "value": (lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 1.0), "clip_grad_value_ cannot.*adagc"),
    "some norms": (lambda m: torch.nn.utils.get_total_norm([m[0].weight.grad]), "without parameter '"),
    "total_norm": (
        lambda m: torch.nn.utils.clip_grads_with_norm_(m.parameters(), 1.0, torch.tensor(7.0)),
        "total_norm=7.0.*get_total_norm",
    ),
}


@pytest.mark.skipif(not INNER, reason="this torch clips in one function")
@pytest.mark.parametrize("what", WRONG)
def test_what_the_daemon_cannot_do_is_refused_and_the_step_goes_on(what: str, adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit="staged")
    model(batch(1)).sum().backward()
    call, message = WRONG[what]
    with pytest.raises(ballast.Rejected, match=message):
        call(model)
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied


@pytest.mark.parametrize("how", CLIPS)
def test_a_release_run_refuses_with_what_works(how: str, adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    model(batch(1)).sum().backward()
    with pytest.raises(ballast.Rejected, match="max_grad_norm=.*commit='staged'"):
        CLIPS[how](model.parameters(), 1.0)
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied


def test_a_gradient_after_the_norm_is_refused(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit="staged")
    model(batch(1)).sum().backward()
    optimizer.clip_grad_norm_()
    with pytest.raises(ballast.Rejected, match="got a gradient after the norm of step 1 was asked for"):
        model(batch(2)).sum().backward()
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied


@pytest.mark.skipif(not INNER, reason="this torch clips in one function")
@pytest.mark.parametrize("how", CLIPS)
def test_a_run_that_clips_each_tensor_refuses_and_goes_on(how: str, adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), commit="staged", tensor_clip="adagc")
    for _ in range(2):
        model(batch(1)).sum().backward()
        with pytest.raises(ballast.Rejected, match="max_norm=1.0.* tensor_clip='adagc'.*leave one of the two out"):
            CLIPS[how](model.parameters(), 1.0)
        assert float(CLIPS[how](model.parameters(), math.inf)) > 0
        optimizer.step()
        assert optimizer.last_result is not None and optimizer.last_result.applied
