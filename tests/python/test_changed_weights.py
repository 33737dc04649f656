"""Weights that the trainer changes by itself, between steps and in the middle of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ballast
from models import assert_close, layered, same_bits, weights_of

AdamW = Callable[..., ballast.AdamW]
ANY_STATE = [{}, {"commit": "staged"}, {"overlap_forward": True}, {"serving": "int8-row"}, {"master": "flash24"}]


def backward(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, 8, dtype=dtype)).square().mean().backward()


def train(model: nn.Module, optimizer: ballast.AdamW, steps: int = 1) -> None:
    for _ in range(steps):
        backward(model)
        optimizer.step()
    optimizer.wait()


def in_place(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[1].weight.clamp_(-0.01, 0.01)


def loaded(model: nn.Sequential) -> None:
    state = model.state_dict()
    model.load_state_dict({**state, "1.weight": state["1.weight"] / 2})


def lookahead(model: nn.Sequential) -> None:
    with torch.no_grad():
        torch._foreach_lerp_([model[1].weight], [torch.zeros(8, 8)], 0.5)


def other_memory(model: nn.Sequential) -> None:
    model[1].weight.data = model[1].weight.data / 2


def through_data(model: nn.Sequential) -> None:
    model[1].weight.data.mul_(0.5)  # moves no version


def through_numpy(model: nn.Sequential) -> None:
    model[1].weight.detach().numpy()[3, 3] += 1


@pytest.mark.parametrize("change", [in_place, loaded, lookahead, other_memory, through_data, through_numpy])
def test_a_change_is_refused_before_a_gradient_leaves(adamw: AdamW, change: Callable[..., None]) -> None:
    model, unbroken = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters())
    train(model, optimizer, 2)
    change(model)
    before = weights_of(model)
    for _ in range(2):
        with pytest.raises(
            ballast.Rejected, match=r"'1\.weight' .*after step 2.*pull\(\).*changed_weights='overwrite'"
        ):
            backward(model)
    assert same_bits(before, weights_of(model))
    assert optimizer.pull() == 2
    train(model, optimizer, 2)
    assert optimizer.last_result is not None and optimizer.last_result.step == 4
    train(unbroken, adamw(unbroken.named_parameters(), run=f"{optimizer.run}-unbroken"), 4)
    assert same_bits(weights_of(model), weights_of(unbroken))


@pytest.mark.parametrize("options", ANY_STATE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_refused_in_every_kind_of_run(adamw: AdamW, dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = layered(seed=1, dtype=dtype)
    optimizer = adamw(model.named_parameters(), **options)
    train(model, optimizer)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)
    with pytest.raises(ballast.Rejected, match=r"'0\.weight', '0\.bias', '1\.weight' and 3 more"):
        backward(model)
    optimizer.pull()
    train(model, optimizer)


def swap_in_place(model: nn.Module) -> None:
    """As a moving average that is evaluated does."""
    kept = weights_of(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
        model(torch.ones(2, 8, dtype=kept[0].dtype))
        for p, old in zip(model.parameters(), kept, strict=True):
            p.copy_(old)


def swap_data(model: nn.Module) -> None:
    kept = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data / 2
    model(torch.ones(2, 8, dtype=kept[0].dtype))
    for p, old in zip(model.parameters(), kept, strict=True):
        p.data = old


def load_own(model: nn.Module) -> None:
    model.load_state_dict(model.state_dict())


def move(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def freeze_and_unfreeze(model: nn.Sequential) -> None:
    for frozen in (False, True):
        model[0].requires_grad_(frozen)


def average(model: nn.Module) -> None:
    torch.optim.swa_utils.AveragedModel(model).update_parameters(model)  # type: ignore[no-untyped-call]


UNCHANGED = [swap_in_place, swap_data, load_own, move, freeze_and_unfreeze, average]


@pytest.mark.parametrize("touch", UNCHANGED)
@pytest.mark.parametrize("options", ANY_STATE, ids=str)
def test_weights_that_are_as_they_were_pass(adamw: AdamW, touch: Callable[..., None], options: dict[str, Any]) -> None:
    model, unbroken = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), **options)
    for _ in range(3):
        train(model, optimizer)
        touch(model)
    train(unbroken, adamw(unbroken.named_parameters(), **options, run=f"{optimizer.run}-unbroken"), 3)
    assert same_bits(weights_of(model), weights_of(unbroken))


def test_before_the_first_step_unrounded_weights_are_no_change(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), master="flash24")
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ballast.Rejected, match="lr=-1"):
        backward(model)  # after the upload
    load_own(model)
    optimizer.param_groups[0]["lr"] = 1e-3
    train(model, optimizer)
    assert optimizer.last_result is not None and optimizer.last_result.step == 1


def test_overwrite_loses_the_change(adamw: AdamW) -> None:
    model, unbroken = nn.Linear(8, 8), nn.Linear(8, 8)
    unbroken.load_state_dict(model.state_dict())
    optimizer = adamw(model.named_parameters(), changed_weights="overwrite")
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()  # whose gradient does not depend on the weights
        with torch.no_grad():
            model.bias.add_(1)
        optimizer.step()
        with torch.no_grad():
            model.weight.zero_()
    optimizer.pull()
    other = adamw(unbroken.named_parameters(), run=f"{optimizer.run}-unbroken")
    for _ in range(3):
        unbroken(torch.ones(2, 8)).sum().backward()
        other.step()
    assert same_bits(weights_of(model), weights_of(unbroken))


@pytest.mark.parametrize("options", [{}, {"commit": "staged"}, {"overlap_forward": True}], ids=str)
def test_memory_that_is_put_in_place_in_a_step_gets_its_weights(adamw: AdamW, options: dict[str, Any]) -> None:
    """As recipes do that disturb weights for a second backward(), and put the first ones back."""
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), changed_weights="overwrite", **options)
    for _ in range(3):
        backward(model)
        model[1].weight.data = model[1].weight.data.clone()
        optimizer.step()
        optimizer.wait()
        weights = [weight.clone() for weight in weights_of(model)]
        optimizer.pull()
        assert same_bits(weights_of(model), weights)


@pytest.mark.parametrize("options", [{}, {"commit": "staged"}], ids=str)
def test_a_refused_change_of_memory_leaves_the_daemons_weights_in_place(adamw: AdamW, options: dict[str, Any]) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), **options)
    backward(model)
    model[1].weight.data = model[1].weight.data.clone()
    with pytest.raises(ballast.Rejected, match="the daemon's weights are in place"):
        optimizer.step()
    weights = [weight.clone() for weight in weights_of(model)]
    optimizer.pull()
    assert same_bits(weights_of(model), weights)


def test_another_policy_is_refused(adamw: AdamW) -> None:
    with pytest.raises(
        ballast.Rejected, match="changed_weights='keep': it must be one of 'refuse', 'upload', 'overwrite'"
    ):
        adamw(layered(seed=1).named_parameters(), changed_weights="keep")


@pytest.mark.parametrize("options", [{}, {"commit": "staged"}, {"overlap_forward": True}], ids=str)
def test_a_change_in_the_middle_of_a_step_is_told_at_its_end(adamw: AdamW, options: dict[str, Any]) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), **options)
    train(model, optimizer)
    backward(model)
    with torch.no_grad():
        model[1].bias.clamp_(0, 0.01)
    with pytest.raises(ballast.Rejected, match=r"'1\.bias' .*while step 2 was open.*changed_weights='overwrite'"):
        optimizer.step()
        optimizer.wait()
    assert optimizer.last_result is not None and (optimizer.last_result.step, optimizer.last_result.applied) == (
        2,
        True,
    )
    train(model, optimizer)


def test_a_change_of_what_gets_no_gradient_is_refused_by_the_next_step(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    train(model, optimizer)
    model[2](torch.ones(2, 8)).sum().backward()
    with torch.no_grad():
        model[0].bias.add_(1)
    optimizer.step()
    with pytest.raises(ballast.Rejected, match=r"'0\.bias' .*after step 2"):
        backward(model)


def test_the_first_step_tells_it_of_what_gets_no_gradient(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    model[2](torch.ones(2, 8)).sum().backward()
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(ballast.Rejected, match=r"'0\.weight' .*while step 1 was open"):
        optimizer.step()  # which brings the weights as the daemon rounded them
    train(model, optimizer)


@pytest.mark.parametrize("options", [{}, {"commit": "staged"}], ids=str)
def test_between_micro_batches(adamw: AdamW, options: dict[str, Any]) -> None:
    model, unbroken = layered(seed=1), layered(seed=1)
    one = adamw(model.named_parameters(), gradient_accumulation_steps=2, **options)
    other = adamw(unbroken.named_parameters(), gradient_accumulation_steps=2, **options, run=f"{one.run}-unbroken")
    for _ in range(2):
        backward(model)
        swap_in_place(model)
        backward(model)
        one.step()
        backward(unbroken)
        backward(unbroken)
        other.step()
    assert same_bits(weights_of(model), weights_of(unbroken))
    backward(model)
    in_place(model)
    backward(model)
    with pytest.raises(ballast.Rejected, match=r"'1\.weight' .*while step 3 was open"):
        one.step()
    backward(model)
    backward(model)
    one.step()


class Embeds(nn.Module):
    def __init__(self, max_norm: float):
        super().__init__()
        self.embedding = nn.Embedding(4, 8, max_norm=max_norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x.long()[:, 0])  # type: ignore[no-any-return]


def test_a_forward_that_changes_weights_is_refused_where_it_does(adamw: AdamW) -> None:
    wide, narrow = Embeds(max_norm=1000.0), Embeds(max_norm=0.1)
    optimizer = adamw(wide.named_parameters())
    train(wide, optimizer, 3)  # each moves the version, and changes nothing
    other = adamw(narrow.named_parameters(), lr=0.1, run=f"{optimizer.run}-narrow")
    train(narrow, other)
    with torch.no_grad():
        narrow.embedding.weight.mul_(100)
    other.pull()
    with pytest.raises(ballast.Rejected, match=r"'embedding\.weight' .*max_norm"):
        train(narrow, other, 3)


def test_a_change_that_moves_no_version_is_found_when_its_part_is_looked_at(adamw: AdamW) -> None:
    model = nn.Linear(64, 64)  # 16 KiB
    optimizer = adamw(model.named_parameters(), weight_decay=0.0)
    with pytest.raises(ballast.Rejected, match="'weight' "):
        for _ in range(17):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            model.weight.data[40, 40] = 7
    assert optimizer.last_result is not None and optimizer.last_result.step < 17


@pytest.mark.parametrize("options", ANY_STATE, ids=str)
def test_weights_land_where_the_storage_of_a_parameter_was_moved(adamw: AdamW, options: dict[str, Any]) -> None:
    model, unmoved = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters(), lr=0.1, **options)
    train(model, optimizer, 2)
    backward(model)
    optimizer.step()
    model.share_memory()  # as a queue of torch.multiprocessing does; what was there is freed
    train(model, optimizer, 3)
    train(unmoved, adamw(unmoved.named_parameters(), lr=0.1, run=f"{optimizer.run}-unmoved", **options), 6)
    assert same_bits(weights_of(model), weights_of(unmoved))


def test_a_storage_that_is_moved_before_a_staged_step_ends_is_refused(adamw: AdamW) -> None:
    model, unmoved = layered(seed=1), layered(seed=1)
    options: dict[str, Any] = {"lr": 0.1, "commit": "staged", "master": "fp32", "state": "fp32"}
    optimizer = adamw(model.named_parameters(), **options)
    train(model, optimizer)
    backward(model)
    model.share_memory()
    for _ in range(2):
        with pytest.raises(
            ballast.Rejected, match=r"the memory of '0\.weight', .*while step 2 was open.*zero_grad\(\)"
        ):
            optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 2)
    train(unmoved, adamw(unmoved.named_parameters(), run=f"{optimizer.run}-unmoved", **options), 3)
    assert_close(model, unmoved)


@pytest.mark.parametrize("commit", ["release", "staged"])
def test_parts_of_one_tensor_are_told_what_to_be(adamw: AdamW, commit: str) -> None:
    whole = torch.ones(8, 4)
    parts = [nn.Parameter(part) for part in whole.chunk(2)]
    optimizer = adamw(list(zip("ab", parts)), commit=commit)
    torch.stack([part.sum() for part in parts]).sum().backward()
    with pytest.raises(ballast.Rejected, match=r"are parts of one tensor .*nn\.Parameter\(part\.clone\(\)\)"):
        optimizer.step()
    optimizer.close()
    parts = [nn.Parameter(part.clone()) for part in whole.chunk(2)]
    optimizer = adamw(list(zip("ab", parts)), commit=commit, run=f"{optimizer.run}-cloned")
    for _ in range(3):
        torch.stack([part.sum() for part in parts]).sum().backward()
        optimizer.step()
