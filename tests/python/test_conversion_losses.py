"""What gradients lose on their way into fewer bits is counted, and is a metric."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from ballast.conversion_losses import ConversionLosses
from daemon import Daemon


def counted(values: list[float], dtype: torch.dtype, step: int = 1) -> tuple[float | None, float | None]:
    losses, gradient = ConversionLosses(), torch.tensor(values)
    losses.count(step, gradient, gradient.to(dtype))
    return losses.take()


def test_what_becomes_zero_or_infinite_is_counted() -> None:
    values = [0.0, 1e-9, -1e-7, 1.0, 2.0, 1e6, float("inf"), float("nan")]
    assert counted(values, torch.float8_e5m2) == (2 / 8, 1 / 8)
    assert counted([1e-5, 1.0, 7e4, -7e4], torch.float16) == (0.0, 0.5)
    assert counted([1e-9, 1.0], torch.float16) == (0.5, 0.0)


@pytest.mark.parametrize(("dtype", "step"), [(torch.bfloat16, 1), (torch.float32, 1), (torch.float8_e5m2, 2)])
def test_nothing_is_counted_where_nothing_is_lost_or_at_other_steps(dtype: torch.dtype, step: int) -> None:
    assert counted([1e-9, 1e6], dtype, step) == (None, None)


def test_shares_are_of_all_gradients_of_a_step_and_begin_anew() -> None:
    losses = ConversionLosses()
    for gradient in (torch.full((3,), 1e-9), torch.ones(5)):
        losses.count(11, gradient, gradient.to(torch.float8_e5m2))
    assert losses.take() == (3 / 8, 0.0)
    assert losses.take() == (None, None)


def metric(daemon: Daemon, name: str, run: str) -> float | None:
    with urllib.request.urlopen(daemon.metrics_url, timeout=10) as answer:
        found = re.search(rf'^{name}\{{run_id="{run}"\}} (\S+)$', answer.read().decode(), re.MULTILINE)
    return None if found is None else float(found[1])


def test_they_are_metrics(daemon: Daemon, make: Callable[..., Any], run: str) -> None:
    weight = nn.Parameter(torch.ones(8))
    optimizer = make(ballast.AdamW, [("w", weight)], gradient_dtype="fp8-e5m2")
    for _ in range(2):
        weight.grad = torch.tensor([1e-9] * 3 + [1.0] * 4 + [1e6])
        optimizer.step()
    assert metric(daemon, "ballast_gradient_flushed_ratio", run) == 3 / 8
    assert metric(daemon, "ballast_gradient_overflowed_ratio", run) == 1 / 8


def test_what_is_given_back_is_not_lost(daemon: Daemon, make: Callable[..., Any], run: str) -> None:
    weight = nn.Parameter(torch.ones(8))
    optimizer = make(ballast.AdamW, [("w", weight)], gradient_dtype="fp8-e5m2", error_feedback=True)
    weight.grad = torch.full((8,), 1e-9)
    optimizer.step()
    assert metric(daemon, "ballast_gradient_flushed_ratio", run) is None
