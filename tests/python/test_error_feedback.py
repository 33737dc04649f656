"""error_feedback: what narrow gradients lose is added to the next ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ballast
from ballast.error_feedback import ErrorFeedback
from models import losses_of, perceptron, same_bits, weights_of

AdamW = Callable[..., ballast.AdamW]
Make = Callable[..., Any]
E5M2 = torch.float8_e5m2


def drawn(seed: int, count: int = 1000) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("dtype", [E5M2, torch.bfloat16, torch.float16], ids=str)
def test_the_sum_over_many_steps_is_right(dtype: torch.dtype, scale: float) -> None:
    feedback = ErrorFeedback()
    truth, sent, plain = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000)
    for step in range(100):
        gradient = 1.05 + 0.01 * drawn(step)
        truth += gradient
        sent += feedback.round(gradient * scale, dtype, scale).float() / scale
        plain += (gradient * scale).to(dtype).float() / scale
    rounding = torch.finfo(dtype).eps * 1.2  # of one gradient
    assert (sent - truth).abs().max() < rounding + 100 * 2**-9 * rounding
    assert dtype == torch.float16 or (plain - truth).abs().mean() > 5 * (sent - truth).abs().mean()


def test_what_lies_below_the_format_comes_through_in_time() -> None:
    feedback = ErrorFeedback()
    tiny = torch.full((4,), 1e-7)  # below e5m2's least, 1.5e-5
    sent = [feedback.round(tiny, E5M2, 1.0).float() for _ in range(400)]
    assert not sent[0].any()
    torch.testing.assert_close(sum(sent), torch.full((4,), 4e-5), rtol=0.3, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 1e9])
def test_an_element_that_is_not_finite_keeps_what_it_had(bad: float) -> None:
    feedback = ErrorFeedback()
    feedback.round(torch.tensor([1.05, 1.05]), E5M2, 1.0)
    assert not feedback.round(torch.tensor([1.0, bad]), E5M2, 1.0)[1].isfinite()
    for _ in range(3):
        assert feedback.round(torch.tensor([1.05, 1.05]), E5M2, 1.0).isfinite().all()
    assert feedback.round(torch.tensor([0.0, 0.0]), E5M2, 1.0).float().abs().max() < 0.3


def test_it_follows_a_loss_scale_that_changes() -> None:
    feedback = ErrorFeedback()
    sent = feedback.round(torch.tensor([1.05 * 1024]), E5M2, 1024.0).float() / 1024
    sent += feedback.round(torch.tensor([1.05 * 2]), E5M2, 2.0).float() / 2
    sent += feedback.round(torch.tensor([0.0]), torch.float32, 1.0)
    torch.testing.assert_close(sent, torch.tensor([2.1]), rtol=1e-3, atol=0)


# --- through the daemon ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"commit": "staged"}, {"transport": "grpc"}], ids=str)
def test_sgd_comes_where_whole_gradients_lead(options: dict[str, Any], make: Make, run: str) -> None:
    """A constant gradient of 1.05, which e5m2 rounds to 1."""

    def moved(name: str, **more: Any) -> Tensor:
        weight = nn.Parameter(torch.zeros(64))
        stored = {"master": "fp32", "state": "fp32", "run": f"{run}-{name}"}
        optimizer = make(ballast.SGD, [("w", weight)], lr=0.01, **stored, **options, **more)
        for _ in range(40):
            (1.05 * weight).sum().backward()
            optimizer.step()
        return -weight.detach()

    truth = torch.full((64,), 40 * 0.01 * 1.05)
    assert (moved("fed", gradient_dtype="fp8-e5m2", error_feedback=True) - truth).abs().max() < 0.01 * 0.2
    assert (moved("plain", gradient_dtype="fp8-e5m2") - truth).abs().min() > 0.01 * 1.5


def test_it_changes_nothing_where_gradients_leave_as_they_are(make: Make, run: str) -> None:
    models = []
    for name, options in {"fed": {"error_feedback": True, "gradient_dtype": "fp32"}, "plain": {}}.items():
        models.append(perceptron(seed=1))
        losses_of(
            models[-1], make(ballast.AdamW, models[-1].named_parameters(), lr=1e-2, run=f"{run}-{name}", **options), 5
        )
    assert same_bits(weights_of(models[0]), weights_of(models[1]))


def test_a_format_by_name_is_fed_back_alone(adamw: AdamW) -> None:
    model = perceptron(seed=1)
    optimizer = adamw(
        model.named_parameters(), lr=1e-2, formats={"0.*": {"gradient_dtype": "fp8-e5m2"}}, error_feedback=True
    )
    losses_of(model, optimizer, 3)
    session = optimizer._membership.session
    assert session is not None
    fed = {binding.name: binding._feedback is not None for binding in session._bindings}
    assert fed == {name: name.startswith("0.") for name, _ in model.named_parameters()}


def test_a_rewind_forgets_what_was_lost(adamw: AdamW) -> None:
    model = perceptron(seed=1)
    options: dict[str, Any] = {"gradient_dtype": "fp8-e5m2", "error_feedback": True}
    optimizer = adamw(model.named_parameters(), lr=1e-2, snapshots=2, snapshot_every=1, **options)
    losses_of(model, optimizer, 3)
    session = optimizer._membership.session
    assert session is not None
    feedbacks = [binding._feedback for binding in session._bindings]
    assert all(one is not None and one._lost is not None for one in feedbacks)
    optimizer.rewind(1)
    assert all(one is not None and one._lost is None for one in feedbacks)
    losses_of(model, optimizer, 2)


@pytest.mark.parametrize("drops", ["zero_grad", "nonfinite"])
def test_a_step_that_was_not_made_leaves_nothing_behind(drops: str, make: Make) -> None:
    weight = nn.Parameter(torch.zeros(64))
    options: dict[str, Any] = {"nonfinite": "skip_step"} if drops == "nonfinite" else {"commit": "staged"}
    optimizer = make(
        ballast.SGD,
        [("w", weight)],
        lr=1.0,
        master="fp32",
        state="fp32",
        gradient_dtype="fp8-e5m2",
        error_feedback=True,
        **options,
    )
    weight.sum().backward()
    optimizer.step()
    spike = torch.full((64,), 1.1e4)
    if drops == "nonfinite":
        spike[5] = torch.nan
    (spike * weight).sum().backward()
    if drops == "nonfinite":
        optimizer.step()
    else:
        optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full((64,), -2.0))


def test_it_begins_where_a_group_is_sent_narrower_in_the_middle(make: Make) -> None:
    weight = nn.Parameter(torch.zeros(64))
    optimizer = make(
        ballast.SGD,
        [{"params": [("w", weight)], "gradient_dtype": "bf16"}],
        lr=0.01,
        master="fp32",
        state="fp32",
        error_feedback=True,
    )
    for step in range(20):
        if step == 2:
            optimizer.param_groups[0]["gradient_dtype"] = "fp8-e5m2"
        (1.05 * weight).sum().backward()
        optimizer.step()
    assert (weight.detach() + 20 * 0.01 * 1.05).abs().max() < 0.01 * 0.2


@pytest.mark.parametrize(
    "options, said",
    [
        ({"error_feedback": True}, "error_feedback=True and no gradient_dtype"),
        ({"error_feedback": 2, "gradient_dtype": "bf16"}, "error_feedback=2: it must be True or False"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], said: str, adamw: AdamW) -> None:
    model = perceptron(seed=1)
    with pytest.raises(ballast.Rejected, match=said):
        losses_of(model, adamw(model.named_parameters(), **options), 1)
