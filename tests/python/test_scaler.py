"""ballast.GradScaler: torch's interface. What it does with a daemon's verdict is in test_staged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ballast
from models import layered, until

AdamW = Callable[..., ballast.AdamW]


def test_its_state_is_torchs(adamw: AdamW) -> None:
    scaler = ballast.GradScaler(adamw(layered(seed=1).named_parameters()), init_scale=8.0, growth_interval=5)
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    assert scaler.state_dict() == theirs.state_dict()
    theirs.load_state_dict({**scaler.state_dict(), "scale": 4.0, "_growth_tracker": 3})
    scaler.load_state_dict(theirs.state_dict())
    assert (scaler.get_scale(), scaler._optimizer.loss_scale) == (4.0, 4.0)
    assert scaler.state_dict()["_growth_tracker"] == 3
    with pytest.raises(ballast.Rejected, match="is empty"):
        scaler.load_state_dict({})


def test_it_scales_tensors_and_collections_of_them(adamw: AdamW) -> None:
    scaler = ballast.GradScaler(adamw(layered(seed=1).named_parameters()), init_scale=4.0)
    assert scaler.scale(torch.tensor(2.0)) == 8.0
    assert scaler.scale([torch.tensor(1.0), (torch.tensor(2.0),)]) == [4.0, (8.0,)]


def test_a_float16_loss_is_scaled_in_float32_as_torch_does(adamw: AdamW) -> None:
    ours = ballast.GradScaler(adamw(layered(seed=1).named_parameters()), init_scale=65536.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=65536.0)
    loss, batch = torch.tensor(2.0, dtype=torch.float16), torch.full((2,), 0.25, dtype=torch.float16)
    for given in (loss, batch, torch.tensor(2.0), torch.tensor(2.0, dtype=torch.bfloat16)):
        scaled, expected = ours.scale(given), theirs.scale(given)
        assert scaled.dtype == expected.dtype and torch.equal(scaled, expected)
    assert ours.scale(loss) == 131072.0
    scaled = [ours.scale([loss, (loss,)]), *ours.scale(value for value in [loss])]
    assert scaled == [[131072.0, (131072.0,)], 131072.0]
    with pytest.raises(ballast.Rejected, match="scale\\(\\) of a float"):
        ours.scale(2.0)


def test_the_scale_is_a_float32_as_torchs_is(adamw: AdamW) -> None:
    optimizer = adamw(layered(seed=1).named_parameters())
    scaler = ballast.GradScaler(optimizer, init_scale=1000.1)
    theirs = torch.amp.GradScaler("cpu", init_scale=1000.1)
    theirs.scale(torch.tensor(1.0))
    assert scaler.get_scale() == theirs.get_scale() == optimizer.loss_scale


def test_one_that_is_not_enabled_does_nothing(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    scaler = ballast.GradScaler(optimizer, enabled=False)
    scaler.scale(model(torch.ones(2, 8)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.last_result is not None and optimizer.last_result.applied
    assert (scaler.get_scale(), scaler.state_dict(), optimizer.loss_scale) == (1.0, {}, 1.0)


def test_misuse_is_refused_with_the_fix(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    scaler = ballast.GradScaler(optimizer)
    with pytest.raises(ballast.Rejected, match="update\\(\\) before step\\(\\)"):
        scaler.update()
    with pytest.raises(ballast.Rejected, match="made for another optimizer"):
        scaler.step(adamw(layered(seed=2).named_parameters()))
    with pytest.raises(ballast.Rejected, match="GradScaler of a SGD"):
        ballast.GradScaler(torch.optim.SGD(layered(seed=1).parameters(), lr=1.0))  # type: ignore[arg-type]
    with pytest.raises(ballast.Rejected, match="growth_factor=1.0"):
        ballast.GradScaler(optimizer, growth_factor=1.0)
    with pytest.raises(ballast.Rejected, match="backoff_factor=1.0"):
        ballast.GradScaler(optimizer, backoff_factor=1.0)
    with pytest.raises(ballast.Rejected, match="commit='release' and a GradScaler"):
        ballast.GradScaler(adamw(layered(seed=3).named_parameters(), commit="release"))


def test_a_step_whose_loss_it_has_not_scaled_is_refused_with_the_fix(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    scaler = ballast.GradScaler(optimizer, init_scale=4.0)
    losses = [
        lambda: scaler.scale(model(torch.ones(2, 8)).sum()),
        lambda: model(torch.ones(2, 8)).sum() * scaler.get_scale(),
    ]
    for number, loss in enumerate(losses, 1):
        loss().backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.last_result is not None and optimizer.last_result.step == number
        with pytest.raises(ballast.Rejected, match=r"has not scaled.*divided by 4.0: write scaler.scale\(loss\)"):
            model(torch.ones(2, 8)).sum().backward()
        optimizer.zero_grad()
    scaler.update(1.0)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert optimizer.last_result.step == 3


def test_a_scaled_loss_may_replace_one_that_was_dropped_or_be_of_two_optimizers(adamw: AdamW) -> None:
    model, other = layered(seed=1), layered(seed=2)
    first = adamw(model.named_parameters())
    optimizers = [first, adamw(other.named_parameters(), run=f"{first.run}-other")]
    scalers = [ballast.GradScaler(optimizer, init_scale=4.0) for optimizer in optimizers]
    scalers[0].scale(model(torch.ones(2, 8)).sum()).backward()
    model.zero_grad()
    for _ in range(2):
        scalers[0].scale(other(model(torch.ones(2, 8))).sum()).backward()
        for scaler, optimizer in zip(scalers, optimizers):
            scaler.step(optimizer)
            scaler.update()
            assert optimizer.last_result is not None and optimizer.last_result.applied


def test_gradients_that_are_set_by_hand_are_divided_as_torch_does(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    scaler = ballast.GradScaler(optimizer, init_scale=4.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    scaler.step(optimizer)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert optimizer.last_result is not None
    assert optimizer.last_result.grad_norm == pytest.approx(count**0.5 / 4)


def test_one_made_after_the_run_was_joined_is_refused(adamw: AdamW) -> None:
    optimizer = adamw(layered(seed=1).named_parameters())
    optimizer.connect()
    with pytest.raises(ballast.Rejected, match="make the GradScaler before connect"):
        ballast.GradScaler(optimizer)


def test_with_the_daemons_weights_it_comes_after_the_run_was_joined(adamw: AdamW) -> None:
    """As in a loop that is the same whether it begins or goes on."""
    begun, later = layered(seed=1), layered(seed=2)
    for model, options in ((begun, {}), (later, {"weights": "server"})):
        with adamw(model.named_parameters(), **options) as optimizer:
            scaler = ballast.GradScaler(optimizer, init_scale=8.0)
            scaler.scale(model(torch.ones(2, 8)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert optimizer.last_result is not None and optimizer.last_result.step == 2


def test_with_the_daemons_weights_a_staged_run_stays_staged(adamw: AdamW) -> None:
    """As one that a framework drives, which may be set up after the optimizer."""
    for options in ({"commit": "staged"}, {"weights": "server"}):
        model = layered(seed=1)
        with adamw(model.named_parameters(), **options) as optimizer:
            model(torch.ones(2, 8)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.step == 2
    with pytest.raises(ballast.Rejected, match="commit is 'staged', asked for is 'release'"):
        adamw(model.named_parameters(), weights="server", commit="release")


def test_a_run_that_scales_is_not_gone_on_with_unscaled(adamw: AdamW) -> None:
    model = layered(seed=1)
    with adamw(model.named_parameters()) as optimizer:
        scaler = ballast.GradScaler(optimizer)
        scaler.scale(model(torch.ones(2, 8)).sum()).backward()
        scaler.step(optimizer)
    optimizer = adamw(model.named_parameters(), weights="server")
    with pytest.raises(ballast.Rejected, match="begun with a ballast.GradScaler.*make GradScaler"):
        model(torch.ones(2, 8)).sum().backward()


def test_a_run_without_one_stays_so(adamw: AdamW) -> None:
    model = layered(seed=1)
    with adamw(model.named_parameters()) as optimizer:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    optimizer = adamw(layered(seed=2).named_parameters(), weights="server")
    with pytest.raises(ballast.Rejected, match="was begun without one: leave it out"):
        ballast.GradScaler(optimizer)


class Scaled:
    """A trainer whose scale is client state. Each step's gradient is the scale: above 65504 it overflows."""

    def __init__(self, adamw: AdamW, **options: bool):
        self.weight = nn.Parameter(torch.ones(64))
        self.optimizer = adamw(
            [("w", self.weight)], commit="staged", gradient_dtype="fp16", snapshots=8, snapshot_every=1, **options
        )
        self.scaler = ballast.GradScaler(self.optimizer, init_scale=2.0**17, growth_interval=2)
        self.optimizer.register_client_state("scaler", self.scaler)
        self.optimizer.connect()

    def steps(self, count: int) -> list[float]:
        """The scale after each of them."""
        seen = []
        for _ in range(count):
            self.scaler.scale(self.weight.sum()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            seen.append(self.scaler.get_scale())
        return seen


SCALES = [2.0**power for power in (16, 15, 15, 16, 15, 15, 16, 15)]


@pytest.mark.parametrize("overlap", [False, True], ids=["waits", "overlap"])
@pytest.mark.parametrize("last", range(1, 6))
def test_a_trainer_that_is_started_again_has_the_scale_after_its_last_step(
    last: int, overlap: bool, adamw: AdamW
) -> None:
    """Whether the step has overflowed, was one of two that let the scale grow, or the second of them."""
    first = Scaled(adamw, overlap_forward=overlap)
    assert first.steps(last) == SCALES[:last]
    first.optimizer.close()
    second = Scaled(adamw, overlap_forward=overlap)
    assert second.scaler.get_scale() == SCALES[last - 1]
    assert second.steps(len(SCALES) - last) == SCALES[last:]


@pytest.mark.parametrize("last", [3, 4, 5])
def test_one_that_dies_within_a_step_leaves_the_scale_of_the_step_before(last: int, adamw: AdamW) -> None:
    first = Scaled(adamw)
    assert first.steps(last) == SCALES[:last]
    before = first.optimizer.run_status().received_bytes
    first.scaler.scale(first.weight.sum()).backward()
    until(lambda: first.optimizer.run_status().received_bytes > before)
    first.optimizer.close()
    with pytest.warns(UserWarning, match="1 step older"):
        second = Scaled(adamw)
    assert second.optimizer.last_result is not None and second.optimizer.last_result.outcome == "ABORTED"
    assert second.scaler.get_scale() == SCALES[last - 1]
    assert second.steps(len(SCALES) - last) == SCALES[last:]


@pytest.mark.parametrize("last", range(1, 6))
def test_a_rewind_takes_the_scale_back_to_that_after_the_step(last: int, adamw: AdamW) -> None:
    trainer = Scaled(adamw)
    assert trainer.steps(6) == SCALES[:6]
    assert trainer.optimizer.rewind(to=last) == last
    trainer.scaler.update()  # as a loop may that has caught RunRewound: it is made already
    assert trainer.scaler.get_scale() == SCALES[last - 1]
    assert trainer.steps(len(SCALES) - last) == SCALES[last:]
