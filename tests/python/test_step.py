"""One step: gradients leave in backward, weights return in place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ballast
from ballast.binding import Binding
from ballast.sent_gradient import SentGradient
from models import assert_close, layered, same_bits, until, weights_of

AdamW = Callable[..., ballast.AdamW]


def result_of(optimizer: ballast.AdamW) -> ballast.StepResult:
    assert optimizer.last_result is not None
    return optimizer.last_result


def test_gradients_are_gone_and_weights_are_in_place(adamw: AdamW) -> None:
    model = layered(seed=1)
    before, places = weights_of(model), [p.data_ptr() for p in model.parameters()]
    optimizer = adamw(model.named_parameters())
    model(torch.ones(2, 8)).sum().backward()
    assert all(isinstance(p.grad, SentGradient) for p in model.parameters())
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    assert [p.data_ptr() for p in model.parameters()] == places
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    result = result_of(optimizer)
    assert (result.step, result.outcome, result.reason, result.applied) == (1, "APPLIED", "", True)
    assert result.grad_norm > 0 and not result.not_applied and not optimizer.step_was_skipped


@pytest.mark.parametrize(
    "loss", [2, 2.0, torch.tensor(2.0), torch.tensor([2.0]), np.float32(2.0), np.array(2.0)], ids=repr
)
def test_a_loss_of_one_number_is_told(loss: Any, adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step(loss=loss)
    assert optimizer.run_status().loss == 2


@pytest.mark.parametrize("loss", [torch.ones(3), np.ones(3), "2", [2.0]], ids=repr)
def test_a_loss_that_is_not_one_number_is_refused_and_the_step_stays_open(loss: Any, adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    model(torch.ones(2, 8)).sum().backward()
    for tell in (optimizer.report_loss, lambda given: optimizer.step(loss=given)):
        with pytest.raises(ballast.Rejected, match="the loss is .*: it must be one number, such as the mean"):
            tell(loss)
    optimizer.step()
    assert result_of(optimizer).step == 1 and optimizer.run_status().loss is None


def test_a_closure_may_return_what_is_no_loss(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())

    def closure() -> str:
        model(torch.ones(2, 8)).sum().backward()
        return "done"

    assert optimizer.step(closure) == "done"
    assert result_of(optimizer).applied


def test_bytes_move_while_backward_runs(adamw: AdamW) -> None:
    model = layered(seed=1, width=64)
    optimizer = adamw(model.named_parameters())
    last = model[2].weight
    before = last.detach().clone()
    hidden = model[0](torch.ones(2, 64))
    # Reached by backward after the last layer and before the first.
    hidden.register_hook(lambda grad: until(lambda: not torch.equal(last, before)))
    model[2](model[1](hidden)).sum().backward()
    optimizer.step()
    timing = result_of(optimizer).timing
    assert timing is not None
    whole = sum(p.nbytes for p in model.parameters())
    assert timing.pushed_bytes == timing.pulled_bytes == whole
    assert timing.pushed_bytes_in_backward >= last.nbytes
    assert timing.pulled_bytes_in_backward >= last.nbytes
    assert timing.backward_s > 0 and timing.wait_s > 0


def test_a_parameter_without_a_gradient_is_left_alone(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), weight_decay=0.5, master_weight_bits=32)
    before = weights_of(model)
    model[1:](torch.ones(2, 8)).sum().backward()
    optimizer.step()
    after = weights_of(model)
    assert same_bits(before[:2], after[:2])
    assert not any(torch.equal(*pair) for pair in zip(before[2:], after[2:], strict=True))
    assert result_of(optimizer).applied


def test_a_step_without_gradients_is_none(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    optimizer.step()
    assert optimizer.step_was_skipped and optimizer.last_result is None
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.step()
    assert optimizer.step_was_skipped and result_of(optimizer).step == 1


def test_how_the_last_step_ended_is_known_after_close(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.close()
    assert result_of(optimizer).step == 1 and not optimizer.step_was_skipped


def test_gradients_set_by_hand_are_sent(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), state_dtype="fp32", master_weight_bits=32)
    theirs = torch.optim.AdamW(twin.parameters())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        p.grad = torch.ones_like(p).expand_as(p)
        q.grad = torch.ones_like(q)
    optimizer.step()
    theirs.step()
    assert all(p.grad is None for p in model.parameters())
    assert_close(model, twin)


def test_zero_grad_drops_what_has_not_left(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    model[0].weight.grad = torch.ones(8, 8)
    optimizer.zero_grad()
    assert model[0].weight.grad is None
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ballast.Rejected, match="cannot take back the gradients of step 1"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def test_a_second_backward_is_refused_before_anything_is_sent(adamw: AdamW) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters())
    reference = adamw(twin.named_parameters(), run=f"{optimizer.run}-twin")
    for one in (model, twin):
        one(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ballast.Rejected, match=r"'2\.(weight|bias)' got a second gradient in step 1.*step\(\) after"):
        model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    reference.step()
    assert all(p.grad is None for p in model.parameters())
    assert same_bits(weights_of(model), weights_of(twin))


def test_a_stale_graph_raises(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    loss = model(torch.ones(2, 8)).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation|second gradient"):
        loss.backward()


def test_a_weight_used_twice_has_one_gradient(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model[0].named_parameters(), master_weight_bits=32, state_dtype="fp32")
    twin = layered(seed=1)[0]
    theirs = torch.optim.AdamW(twin.parameters())
    for layer in (model[0], twin):
        layer(torch.tanh(layer(torch.ones(2, 8)))).sum().backward()
    optimizer.step()
    theirs.step()
    torch.testing.assert_close(model[0].weight, twin.weight)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_works(reentrant: bool, adamw: AdamW) -> None:
    from torch.utils.checkpoint import checkpoint

    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), master_weight_bits=32, state_dtype="fp32")
    theirs = torch.optim.AdamW(twin.parameters())
    for _ in range(2):
        for layers in (model, twin):
            hidden = torch.ones(2, 8, requires_grad=True)
            for layer in layers:
                hidden = torch.tanh(checkpoint(layer, hidden, use_reentrant=reentrant))
            hidden.sum().backward()
        optimizer.step()
        theirs.step()
        theirs.zero_grad()
    assert_close(model, twin)


def test_changing_lr_between_backward_and_step_is_refused(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), lr=0.5)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.param_groups[0]["lr"] = 0.25
    with pytest.raises(ballast.Rejected, match=r"lr of param_groups\[0\] changed from 0.5 to 0.25"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert result_of(optimizer).applied


def test_a_parameter_frozen_later_is_left_alone(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    model[1].requires_grad_(False)
    before = weights_of(model)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert same_bits(before[2:4], weights_of(model)[2:4])
    model[1].requires_grad_(True)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert not torch.equal(before[2], model[1].weight)


def test_a_parameter_unfrozen_before_the_run_is_part_of_it(adamw: AdamW) -> None:
    model = layered(seed=1)
    model[1].requires_grad_(False)
    optimizer = adamw(model.named_parameters())
    model[1].requires_grad_(True)
    before = weights_of(model)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_sparse_gradient_is_refused(adamw: AdamW) -> None:
    table = nn.Embedding(4, 4, sparse=True)
    adamw(table.named_parameters())
    with pytest.raises(ballast.Rejected, match="gradient of 'weight'.*sparse=False"):
        table(torch.tensor([1])).sum().backward()


def test_a_converted_model_is_refused(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    model.bfloat16()
    with pytest.raises(ballast.Rejected, match="convert the model before"):
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()


def test_weights_that_moved_are_followed(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        for p in model.parameters():
            p.data = p.data.clone()
        before = weights_of(model)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_parameters_that_the_host_cannot_write_get_the_same_weights(
    adamw: AdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters())
    for _ in range(3):
        model[1:](torch.ones(2, 8)).sum().backward()
        optimizer.step()
    monkeypatch.setattr(Binding, "on_host", False)  # as in a CUDA parameter: every tensor lands in a copy
    staged = adamw(twin.named_parameters(), run=f"{optimizer.run}-twin")
    for _ in range(3):
        twin[1:](torch.ones(2, 8)).sum().backward()
        staged.step()
    assert same_bits(weights_of(model), weights_of(twin))


def test_backward_on_another_thread(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    thread = threading.Thread(target=lambda: model(torch.ones(2, 8)).sum().backward())
    thread.start()
    thread.join()
    optimizer.step()
    assert result_of(optimizer).applied


def test_a_compiled_model_trains(adamw: AdamW) -> None:
    model = layered(seed=1)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = adamw(model.named_parameters())
    before = weights_of(model)
    for _ in range(2):
        compiled(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    assert result_of(optimizer).step == 2
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_nonfinite_gradient_poisons_nothing(bad: float, adamw: AdamW) -> None:
    w = nn.Parameter(torch.ones(128))
    u = nn.Parameter(torch.ones(32))
    optimizer = adamw([("w", w), ("u", u)], lr=0.1)
    grad = torch.ones(128)
    grad[40] = bad  # in the second block of 32
    w.grad, u.grad = grad, torch.ones(32)
    optimizer.step()
    result = result_of(optimizer)
    assert (result.nonfinite_tensors, result.rejected_blocks) == (1, 1)
    assert "1 block of 32 elements in 1 tensor kept the old contents" in result.warnings[0]
    assert torch.equal(w[32:64], torch.ones(32))
    assert (w[:32] < 1).all() and (w[64:] < 1).all() and (u < 1).all()
    w.grad, u.grad = torch.ones(128), torch.ones(32)
    optimizer.step()
    assert torch.isfinite(w).all() and (w[32:64] < 1).all()
    assert result_of(optimizer).nonfinite_tensors == 0


def test_a_gradient_that_is_too_large_is_told_of_where_it_is(adamw: AdamW) -> None:
    w = nn.Parameter(torch.ones(64))
    optimizer = adamw([("w", w), ("u", nn.Parameter(torch.ones(32)))])
    w.grad = torch.full((64,), 1e30)  # which is finite, and its square is not
    optimizer.step()
    result = result_of(optimizer)
    assert (result.nonfinite_tensors, result.rejected_blocks) == (0, 2)
    assert "2 blocks of 32 elements in 1 tensor kept the old contents" in result.warnings[0]
