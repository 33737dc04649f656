"""Layers of ballast.nn that compute in the codes that the daemon serves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ballast
from ballast import nn as bnn
from coded import KINDS, WIDTH, batch, codes_of, is_coded, memory_of, model_of, same, train

AdamW = Callable[..., ballast.AdamW]


@pytest.fixture(params=KINDS)
def format(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_a_trainer_holds_one_byte_a_parameter(format: str, adamw: AdamW) -> None:
    model = model_of(format)
    weights = 2 * 48 * WIDTH
    others = sum(p.nbytes for p in model.parameters()) - 2 * weights
    optimizer = adamw(model.named_parameters(), lr=1e-3, formats=bnn.served_formats(model))
    train(model, optimizer, range(1))
    scales = {"int8-tensor": 2, "int8-row": 48 + WIDTH, "fp8-e4m3": 0}[format]
    assert is_coded(model)
    assert memory_of(model) == weights + 4 * scales + others + 2 * 2  # and a bf16 NaN for each weight


@pytest.mark.parametrize(
    "options", [{}, {"commit": "staged"}, {"overlap_forward": True}, {"transport": "grpc"}], ids=str
)
def test_the_codes_are_those_of_the_weights_to_the_bit(
    options: dict[str, Any], format: str, adamw: AdamW, run: str
) -> None:
    """Of a twin that gets its weights in fp32, all that the daemon has, and quantizes them by itself: at each step."""
    one, two = model_of(format, dtype=torch.float32), model_of(format, dtype=torch.float32)
    ours = adamw(one.named_parameters(), lr=1e-2, formats=bnn.served_formats(one), **options)
    theirs = adamw(two.named_parameters(), lr=1e-2, run=f"{run}-twin", **options)
    for step in range(12):
        assert train(one, ours, range(step, step + 1)) == train(two, theirs, range(step, step + 1))
        for optimizer in (ours, theirs):
            optimizer.wait()
        assert same(codes_of(one), codes_of(two)), step
    assert is_coded(one) and not is_coded(two)


def test_with_a_master_in_bf16_they_are_those_of_the_bf16_weights(adamw: AdamW, run: str) -> None:
    one, two = model_of(), model_of()
    stored = {"master": "bf16", "state": "fp32", "rounding": "nearest"}
    ours = adamw(one.named_parameters(), lr=1e-2, formats=bnn.served_formats(one), **stored)
    theirs = adamw(two.named_parameters(), lr=1e-2, run=f"{run}-twin", **stored)
    assert train(one, ours, range(8)) == train(two, theirs, range(8))
    assert same(codes_of(one), codes_of(two))


def test_training_comes_down(format: str, adamw: AdamW) -> None:
    model = model_of(format)
    losses = train(model, adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model)), range(60))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize("pattern", ["0.weight", "2.weight"])
def test_layers_may_be_served_one_by_one(pattern: str, adamw: AdamW) -> None:
    model = model_of()
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats={pattern: {"serving": "int8-tensor"}})
    train(model, optimizer, range(2))
    strides = {name: p.stride() == (0, 0) for name, p in model.named_parameters() if p.dim() == 2}
    assert strides == {name: name == pattern for name in ("0.weight", "2.weight")}


# --- weights that travel otherwise -------------------------------------------------------------------------------------


def test_the_state_dict_has_the_weights_that_the_layer_multiplies(format: str, adamw: AdamW) -> None:
    model = model_of(format, dtype=torch.float32)
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, optimizer, range(3))
    state = model.state_dict()
    served = model[0].weight_codes()
    assert torch.equal(state["0.weight"], served.decode(torch.float32))
    plain = nn.Linear(WIDTH, 48)
    plain.load_state_dict({"weight": state["0.weight"], "bias": state["0.bias"]})
    x = batch(1, torch.float32)
    assert (plain(x) - model[0](x)).norm() < 0.05 * plain(x).norm()
    master = optimizer.state_dict()["state"][0]["master"]
    assert (master - state["0.weight"]).abs().max() < 0.07 * master.abs().max()


def test_a_trainer_started_anew_takes_the_codes(format: str, adamw: AdamW) -> None:
    model, unbroken = model_of(format), model_of(format)
    formats = bnn.served_formats(model)
    first = adamw(model.named_parameters(), lr=1e-2, formats=formats)
    train(model, first, range(4))
    before = codes_of(model)
    first.close()
    again = model_of(format, seed=2)
    second = adamw(again.named_parameters(), lr=1e-2, formats=formats, weights="server")
    assert is_coded(again) and same(codes_of(again), before)
    late = train(again, second, range(4, 8))
    twin = adamw(unbroken.named_parameters(), lr=1e-2, formats=formats, run=f"{second.run}-unbroken")
    assert train(unbroken, twin, range(8))[4:] == late


def test_one_that_lives_on_takes_its_run_up_again(format: str, adamw: AdamW) -> None:
    model = model_of(format)
    formats = bnn.served_formats(model)
    first = adamw(model.named_parameters(), lr=1e-2, formats=formats)
    train(model, first, range(2))
    before = codes_of(model)
    first.close()
    train(model, adamw(model.named_parameters(), lr=1e-2, formats=formats), range(2, 4))  # compares codes
    assert is_coded(model) and not same(before, codes_of(model))


def test_weights_put_into_a_layer_are_refused_and_pull_takes_the_daemons(format: str, adamw: AdamW) -> None:
    model, other = model_of(format), model_of(format, seed=2)
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, optimizer, range(2))
    before = codes_of(model)
    model.load_state_dict(other.state_dict())
    assert not is_coded(model)
    with pytest.raises(ballast.Rejected, match="the weights of '0.weight'.* were changed after step 2"):
        train(model, optimizer, range(2, 3))
    optimizer.zero_grad()
    optimizer.pull()
    assert is_coded(model) and same(before, codes_of(model))
    train(model, optimizer, range(2, 3))


def test_its_own_weights_loaded_again_are_no_change(format: str, adamw: AdamW) -> None:
    model = model_of(format)
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, optimizer, range(2))
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert not is_coded(model)
    train(model, optimizer, range(2, 4))
    assert is_coded(model)


def test_weights_put_into_a_layer_may_be_uploaded(format: str, adamw: AdamW) -> None:
    model, other = model_of(format), model_of(format, seed=2)
    formats = bnn.served_formats(model)
    optimizer = adamw(model.named_parameters(), lr=0.0, weight_decay=0.0, formats=formats, changed_weights="upload")
    train(model, optimizer, range(2))
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        model[0].bias.add_(1)
    train(model, optimizer, range(2, 3))
    assert is_coded(model) and same(codes_of(model), codes_of(other))


def test_moving_and_converting_give_a_layer_weights_of_its_own(adamw: AdamW) -> None:
    model = model_of(dtype=torch.float32)
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, optimizer, range(2))
    state = model.state_dict()
    model.to("cpu")
    assert not is_coded(model) and all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    train(model, optimizer, range(2, 4))
    assert is_coded(model)
    optimizer.close()
    assert model.double()[0].weight.dtype == torch.float64 and model[0].weight.isfinite().all()


def test_a_copy_has_weights_of_its_own(format: str, adamw: AdamW) -> None:
    model = model_of(format, dtype=torch.float32)
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, optimizer, range(2))
    other = copy.deepcopy(model)
    before = codes_of(other)
    assert not is_coded(other) and other[0].weight.isfinite().all()
    x = batch(0, torch.float32)
    assert (other(x) - model(x)).norm() < 0.02 * model(x).norm()
    train(model, optimizer, range(2, 4))
    assert same(before, codes_of(other))


def test_an_average_of_parameters_that_are_not_there_is_told(adamw: AdamW) -> None:
    """It would be one of NaN."""
    model = model_of(dtype=torch.float32)
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, optimizer, range(2))
    average = AveragedModel(model)
    average.update_parameters(model)
    average.update_parameters(model)
    with pytest.raises(ballast.Rejected, match="holds a NaN"):
        average(batch(0, torch.float32))


def test_writing_to_what_stands_in_is_refused_by_torch(adamw: AdamW) -> None:
    model = model_of()
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, optimizer, range(1))
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        model[0].weight.mul_(2)


def test_a_state_dict_of_both_goes_on_in_another_run_to_the_bit(format: str, adamw: AdamW, run: str) -> None:
    """The weights that the layers multiply, and the masters beside the moments."""
    model, other = model_of(format, dtype=torch.float32), model_of(format, seed=2, dtype=torch.float32)
    formats = bnn.served_formats(model)
    one = adamw(model.named_parameters(), lr=1e-2, formats=formats, rounding="nearest")
    train(model, one, range(4))
    weights, state = copy.deepcopy(model.state_dict()), one.state_dict()
    late = train(model, one, range(4, 8))
    other.load_state_dict(weights)
    two = adamw(other.named_parameters(), lr=1e-2, formats=formats, rounding="nearest", run=f"{run}-other")
    two.load_state_dict(state)
    assert train(other, two, range(4, 8)) == late
    assert same(codes_of(model), codes_of(other))


@pytest.mark.parametrize("switched", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_masters_outlive_weights_that_were_served_narrower(
    dtype: torch.dtype, switched: bool, format: str, adamw: AdamW, run: str
) -> None:
    model, other = model_of(format, dtype=dtype), model_of(format, seed=2, dtype=dtype)
    formats = bnn.served_formats(model)
    if not switched:
        model, other = (
            nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)).to(dtype) for _ in range(2)
        )
    one = adamw(model.named_parameters(), lr=1e-2, formats=formats)
    train(model, one, range(4))
    weights, state = copy.deepcopy(model.state_dict()), one.state_dict()
    other.load_state_dict(weights)
    two = adamw(other.named_parameters(), lr=0.0, weight_decay=0.0, formats=formats, run=f"{run}-other")
    two.load_state_dict(state)
    for group in two.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    train(other, two, range(4, 5))
    after = two.state_dict()["state"]
    assert all(torch.equal(after[index]["master"], state["state"][index]["master"]) for index in (0, 2))


def test_a_rewind_brings_the_codes_back(format: str, adamw: AdamW) -> None:
    model = model_of(format)
    options: dict[str, Any] = {"formats": bnn.served_formats(model), "snapshots": 4, "snapshot_every": 1}
    optimizer = adamw(model.named_parameters(), lr=1e-2, **options)
    train(model, optimizer, range(3))
    before = codes_of(model)
    late = train(model, optimizer, range(3, 5))
    optimizer.rewind(2)
    assert is_coded(model) and same(before, codes_of(model))
    assert train(model, optimizer, range(3, 5)) == late


# --- bad input ---------------------------------------------------------------------------------------------------------


def test_other_codes_than_the_layer_computes_in_are_refused(adamw: AdamW) -> None:
    model = model_of("int8-row")
    said = r"serving='int8-tensor' of parameter '0.weight'.*'serving': 'int8-row'"
    with pytest.raises(ballast.Rejected, match=said):
        train(model, adamw(model.named_parameters(), formats={"?.weight": {"serving": "int8-tensor"}}), range(1))
    model = model_of("int8-row")
    optimizer = adamw(model.named_parameters(), serving=None)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["serving"] = "int8-tensor"
    with pytest.raises(ballast.Rejected, match=said):  # and nothing was sent
        train(model, optimizer, range(1, 2))
    optimizer.zero_grad()
    optimizer.param_groups[0]["serving"] = None
    train(model, optimizer, range(1, 2))


def test_a_scaled_layer_is_served_in_its_own_dtype_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    bnn.switch(model, "*", bnn.Float8Linear)
    with pytest.raises(ballast.Rejected, match="scale=None"):
        bnn.served_formats(model)
