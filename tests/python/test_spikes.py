"""Loss spikes: what a trainer asks for, and what it is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ballast
from ballast.step_warnings import StepWarnings
from models import layered, same_bits, weights_of
from side_by_side import side_by_side

AdamW = Callable[..., ballast.AdamW]
# The tensors here are small. With this margin the threshold is the limit, since RMS_t is about 1.
WATCHED = ballast.Spikes(warmup_steps=20, rms_min_elements=1, rms_margin=2)
CALM = 80  # steps: past the warm-up below, and half a window of norms


def step(
    model: nn.Module, optimizer: ballast.AdamW, factor: float = 1.0, loss: float | None = None
) -> ballast.StepResult:
    (factor * model(torch.ones(2, 8)).square().sum()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step(loss=loss)
    assert optimizer.last_result is not None
    return optimizer.last_result


def calm(adamw: AdamW, **options: object) -> tuple[nn.Module, ballast.AdamW]:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), lr=1e-6, betas=(0.9, 0.99), **options)
    for i in range(CALM):
        assert step(model, optimizer, 1 + 0.01 * (i % 3), 2 + 0.1 * (i % 3)).spikes == ()
    return model, optimizer


def test_a_gradient_that_outgrows_its_second_moment_is_told_at_once(adamw: AdamW) -> None:
    model, optimizer = calm(adamw, spikes=WATCHED)
    result = step(model, optimizer, 100)
    assert result.applied
    kinds = [event.kind for event in result.spikes]
    assert "rms" in kinds and "gradient_norm" in kinds
    event = result.spikes[kinds.index("rms")]
    assert event.value >= event.threshold == 2.3 and event.since_step == 0
    assert event.tensor in dict(model.named_parameters()) and event.tensor.startswith(event.layer)
    assert event.text in result.warnings


def test_it_is_a_python_warning_too(adamw: AdamW) -> None:
    model, optimizer = calm(adamw, spikes=WATCHED)
    (100 * model(torch.ones(2, 8)).square().sum()).backward()
    with pytest.warns(
        UserWarning, match=r"run '.*', step 81: RMS_t of .* is .*, its limit 2.3: .* counts more events of kind 'rms'"
    ) as told:
        optimizer.step()
    assert {warning.filename for warning in told} == {__file__}, "where the user's line is"


def test_python_warns_of_each_kind_once_and_counts_the_others(adamw: AdamW) -> None:
    model, optimizer = calm(adamw, spikes=WATCHED)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(5):
            (1e4 * model(torch.ones(2, 8)).square().sum()).backward()
            optimizer.step(loss=2)
            (model(torch.ones(2, 8)).square().sum()).backward()
            optimizer.step(loss=100)
    kinds = [str(warning.message).rsplit("'", 2)[-2] for warning in told]
    assert sorted(kinds) == ["loss", "rms"], "of the norm nobody is warned"
    assert optimizer.spike_counts["gradient_norm"] == 5 and optimizer.spike_counts["loss"] == 1


def test_a_loss_that_is_far_above_the_others_is_a_spike_only_if_it_stays(adamw: AdamW) -> None:
    model, optimizer = calm(adamw, spikes=WATCHED)
    assert step(model, optimizer, 1, 3.0).spikes == ()
    for _ in range(10):
        assert step(model, optimizer, 1, 2.1).spikes == ()
    found = [step(model, optimizer, 1, 3.0).spikes for _ in range(6)]
    assert [len(events) for events in found] == [0, 0, 0, 0, 1, 0]
    (event,) = found[4]
    assert (event.kind, event.value, event.since_step) == ("loss", 3.0, CALM + 12)
    assert event.text.startswith(f"the loss spikes since step {CALM + 12}, when it was 3 and expected was at most 2.")


def test_a_threshold_for_small_tensors_alone_watches_them(adamw: AdamW) -> None:
    """As it did before there was a least size: such a script is not to be told to choose one."""
    for run, asked in (("all", {"rms_threshold": 2.5}), ("layers", {"layers": {".*": 2.5}})):
        model, optimizer = calm(adamw, spikes=ballast.Spikes(warmup_steps=20, **asked), run=f"small-{run}")
        assert "rms" in {event.kind for event in step(model, optimizer, 100).spikes}


def test_a_loss_that_is_no_number_is_a_spike(adamw: AdamW) -> None:
    model, optimizer = calm(adamw, spikes=WATCHED)
    assert [event.kind for event in step(model, optimizer, 1, float("nan")).spikes] == ["loss"]


def test_no_kind_uses_up_the_warning_of_another() -> None:
    """A spike, that of a loss that is not finite; what is high while it goes on, that of a prediction."""

    def result(step: int, kind: str, value: float, since_step: int = 0) -> ballast.StepResult:
        text = f"{kind} {value}"
        event = ballast.SpikeEvent(kind, "", "", value, 1.0, text, since_step)
        return ballast.StepResult(step, "APPLIED", "", "", 0, 1, (), (), 0, 0, (text,), (event,), 0, None)

    at_s = 0.0
    told = StepWarnings("r", now_s=lambda: at_s)
    with pytest.warns(UserWarning) as said:
        told.tell(result(200, "loss", 7.0, 200))
        told.tell(result(201, "rms", 3.0, 200))
        for at_s in (36_000.0, 36_001.0, 36_061.0):
            told.tell(result(90_000, "loss", float("nan"), 90_000))
        told.tell(result(95_000, "rms", 4.0))
        told.tell(result(95_100, "rms", 5.0))
        told.tell(result(95_200, "loss", 8.0, 95_200))
    assert [str(warning.message).partition(" (")[0] for warning in said] == [
        "run 'r', step 200: loss 7.0",
        *2 * ["run 'r', step 90000: loss nan"],
        "run 'r', step 95000: rms 4.0",
    ]
    assert told.counts == {"loss": 5, "rms": 3}


def two_ranks(adamw: AdamW, *spikes: ballast.Spikes) -> list[tuple[nn.Module, ballast.AdamW]]:
    made = []
    for rank, of_rank in enumerate(spikes):
        model = layered(seed=1)
        made.append((model, adamw(model.named_parameters(), rank=rank, world=2, spikes=of_rank)))
    return made


def test_the_rank_whose_loss_is_no_number_is_named(adamw: AdamW) -> None:
    team = two_ranks(adamw, WATCHED, WATCHED)
    for result in side_by_side(2, lambda rank: step(*team[rank], loss=(1.0, float("nan"))[rank])):
        (event,) = result.spikes
        assert (event.kind, event.text) == ("loss", "the loss of rank 1 is not finite")


def test_ranks_that_ask_for_other_spikes_are_refused_by_name(adamw: AdamW) -> None:
    first, second = two_ranks(adamw, WATCHED, ballast.Spikes(warmup_steps=20, rms_min_elements=2, rms_margin=2))
    first[1].connect()
    with pytest.raises(ballast.Rejected, match="spikes.rms_min_elements is 1, asked for is 2"):
        second[1].connect()


def test_a_run_that_ends_before_it_is_watched_is_told_so(adamw: AdamW) -> None:
    model = layered(seed=1)
    with pytest.warns(UserWarning, match=r"is left at step 3: .* only what is not finite .* the first 100 steps"):
        with adamw(model.named_parameters(), spikes=ballast.Spikes(action="skip")) as optimizer:
            for _ in range(3):
                step(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.close()


def test_a_step_that_would_do_harm_is_skipped(adamw: AdamW) -> None:
    model, optimizer = calm(adamw, spikes=ballast.Spikes(warmup_steps=20, rms_min_elements=1, action="skip"))
    before = weights_of(model)
    result = step(model, optimizer, 1e6)
    assert (result.outcome, result.reason) == ("SKIPPED", "spike")
    assert result.skipped and optimizer.step_was_skipped
    assert same_bits(weights_of(model), before)
    assert step(model, optimizer).applied


def test_skipping_makes_the_run_staged(adamw: AdamW) -> None:
    optimizer = adamw(layered(seed=1).named_parameters(), spikes=ballast.Spikes(action="skip"))
    optimizer.connect()
    assert optimizer._settings.step_rules.staged
    with pytest.raises(ballast.Rejected, match=r"commit='release' and Spikes\(action='skip'\)"):
        adamw(layered(seed=1).named_parameters(), commit="release", spikes=ballast.Spikes(action="skip"))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: ballast.Spikes(action="halt"), "action='halt'"),
        (lambda: ballast.Spikes(action="skip", act_on=["norm"]), "'norm' is none of 'rms'"),
    ],
)
def test_a_wrong_word_is_refused_when_it_is_written(made: Callable[[], object], says: str) -> None:
    with pytest.raises(ballast.Rejected, match=says):
        made()


def test_what_the_daemon_refuses_names_the_field(adamw: AdamW) -> None:
    for spikes, says in (
        (ballast.Spikes(layers={"nothing": 3.0}), "'nothing' matches no layer"),
        (ballast.Spikes(rms_threshold=1000.0, rms_min_elements=1), "never be reached"),
        (ballast.Spikes(rms_threshold=3.0, rms_min_elements=5000), "spikes.rms_min_elements = 5000 elements"),
        (ballast.Spikes(rms_min_elements=5000), "spikes.rms_min_elements is 5000, and no tensor has so many"),
        (ballast.Spikes(rms_margin=1e6, rms_min_elements=1), "spikes.rms_margin is 1e.06, but RMS_t is at most"),
        (ballast.Spikes(rms_margin=0.5), "spikes.rms_margin is 0.5; wanted: a finite number of at least 1, or 0"),
        (ballast.Spikes(rms_min_elements=0), "spikes.rms_min_elements is 0; wanted: at least 1"),
    ):
        with pytest.raises(ballast.Rejected, match=says):
            adamw(layered(seed=1).named_parameters(), spikes=spikes).connect()
    with pytest.raises(ballast.Rejected, match="it must be None or a ballast.Spikes"):
        adamw(layered(seed=1).named_parameters(), spikes={"action": "skip"})


def test_each_tensor_is_held_to_its_own_usual_norm(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), lr=1e-3, betas=(0.9, 0.99), tensor_clip="adagc")
    twin = layered(seed=1)
    plain = adamw(twin.named_parameters(), run=f"{optimizer.run}-plain", lr=1e-3, betas=(0.9, 0.99))
    for _ in range(3):
        assert step(model, optimizer, 1e3).applied
        assert step(twin, plain, 1e3).applied
    assert not optimizer._settings.step_rules.staged
    assert not same_bits(weights_of(model), weights_of(twin))
    with pytest.raises(ballast.Rejected, match="tensor_clip='adagc' and max_grad_norm=1.0"):
        adamw(layered(seed=1).named_parameters(), tensor_clip="adagc", max_grad_norm=1.0)
