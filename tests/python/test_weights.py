"""Who has the right weights: the trainer or the daemon."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ballast
from ballast import _core
from models import layered, same_bits, weights_of

AdamW = Callable[..., ballast.AdamW]


def train(model: nn.Module, optimizer: ballast.AdamW, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(2, 8).to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()


def result_of(optimizer: ballast.AdamW) -> ballast.StepResult:
    assert optimizer.last_result is not None
    return optimizer.last_result


def test_weights_loaded_after_construction_are_the_ones_trained(adamw: AdamW) -> None:
    model, other = layered(seed=1), layered(seed=2)
    optimizer = adamw(model.named_parameters(), lr=1e-3)
    model.load_state_dict(other.state_dict())
    train(model, optimizer)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (p - q).abs().max() < 3e-3


@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_restarted_trainer_goes_on_where_it_was(dtype: torch.dtype, bits: int, adamw: AdamW) -> None:
    model, unbroken = layered(seed=1, dtype=dtype), layered(seed=1, dtype=dtype)
    optimizer = adamw(model.named_parameters(), master_weight_bits=bits)
    train(model, optimizer, 2)
    optimizer.close()
    again = adamw(model.named_parameters(), master_weight_bits=bits)  # compares weights
    train(model, again, 2)
    assert result_of(again).step == 4
    train(unbroken, adamw(unbroken.named_parameters(), master_weight_bits=bits, run=f"{again.run}-unbroken"), 4)
    assert same_bits(weights_of(model), weights_of(unbroken))


def test_weights_that_the_daemon_rounds_are_taken_over_even_without_a_gradient(adamw: AdamW) -> None:
    model = layered(seed=1)
    before = weights_of(model)
    optimizer = adamw(model.named_parameters())
    model[2](torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert not same_bits(before[:1], weights_of(model)[:1])  # of 24 bits now
    torch.testing.assert_close(model[0].weight, before[0], rtol=2**-15, atol=0)
    optimizer.close()
    train(model, adamw(model.named_parameters()))


def test_other_weights_are_refused_with_the_ways_out(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    train(model, optimizer)
    optimizer.close()
    with torch.no_grad():
        model[1].bias[3] += 1
    before = weights_of(model)
    stale = adamw(model.named_parameters())
    for _ in range(2):
        with pytest.raises(
            ballast.Rejected, match=r"'1\.bias' differ.*step 1: digest \w{16} here, \w{16} there.*weights='server'"
        ):
            train(model, stale)
    assert same_bits(before, weights_of(model))
    stale.pull()
    train(model, stale)
    assert result_of(stale).step == 2


def test_weights_server_overwrites_in_place_at_once(adamw: AdamW) -> None:
    model, fresh = layered(seed=1), layered(seed=2)
    optimizer = adamw(model.named_parameters())
    train(model, optimizer)
    optimizer.close()
    places = [p.data_ptr() for p in fresh.parameters()]
    successor = adamw(fresh.named_parameters(), weights="server")
    assert same_bits(weights_of(model), weights_of(fresh))
    assert [p.data_ptr() for p in fresh.parameters()] == places
    assert result_of(successor).step == 1 and result_of(successor).timing is None
    train(fresh, successor)
    assert result_of(successor).step == 2


def test_weights_server_is_still_verified_at_the_first_gradient(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    train(model, optimizer)
    optimizer.close()
    successor = adamw(model.named_parameters(), weights="server")
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(ballast.Rejected, match=r"'0\.weight' differ"):
        train(model, successor)


def test_weights_pulled_into_other_memory_are_the_ones_trained(adamw: AdamW) -> None:
    model, unbroken = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters())
    train(model, optimizer)
    for p in model.parameters():
        p.data = torch.zeros_like(p)
    optimizer.pull()
    train(model, optimizer, 2)
    train(unbroken, adamw(unbroken.named_parameters(), run=f"{optimizer.run}-unbroken"), 3)
    assert same_bits(weights_of(model), weights_of(unbroken))


def test_weights_server_without_a_run_is_refused(adamw: AdamW, admin: _core.Client, run: str) -> None:
    with pytest.raises(ballast.Rejected) as refused:
        adamw(layered(seed=1).named_parameters(), weights="server")
    assert refused.value.code == "NOT_FOUND"
    assert run not in [status["run_id"] for status in admin.list_runs()["runs"]]


def test_weights_that_are_not_there_are_refused(adamw: AdamW) -> None:
    model, other = layered(seed=1), layered(seed=1)
    adamw(model.named_parameters()).connect()
    with pytest.raises(ballast.Rejected, match="no weights yet.*weights='client'"):
        adamw(other.named_parameters(), weights="server", takeover=True)
    matching = adamw(other.named_parameters(), weights="match", takeover=True)
    with pytest.raises(ballast.Rejected, match="no weights yet.*weights='client'"):
        train(other, matching)


def test_weights_client_is_refused_after_the_first_step(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    train(model, optimizer)
    optimizer.close()
    late = adamw(model.named_parameters(), weights="client")
    with pytest.raises(ballast.Rejected, match="is at step 1: weights can be uploaded before its first step only"):
        train(model, late)


def test_a_run_without_a_step_takes_other_weights(adamw: AdamW) -> None:
    model, other = layered(seed=1), layered(seed=2)
    first = adamw(model.named_parameters())
    first.connect()
    assert first._membership.session is not None
    first._membership.session.weights.settle(None, {})
    first.close()
    train(other, adamw(other.named_parameters()))


def test_nonfinite_weights_are_refused(adamw: AdamW) -> None:
    model = layered(seed=1)
    with torch.no_grad():
        model[1].bias[3] = float("nan")
    optimizer = adamw(model.named_parameters())
    with pytest.raises(ballast.Rejected, match=r"1\.bias"):
        train(model, optimizer)


def test_pull_is_refused_while_a_step_is_open(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ballast.Rejected, match="step 1 is open"):
        optimizer.pull()
    optimizer.step()
    before = weights_of(model)
    with torch.no_grad():
        model[0].weight.zero_()
    assert optimizer.pull() == 1
    assert same_bits(before, weights_of(model))
