"""Layers of ballast.nn that compute in the codes that the daemon serves."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import ballast
from ballast import nn as bnn
from daemon import Daemon
from models import until
from side_by_side import side_by_side

AdamW = Callable[..., ballast.AdamW]
Kind = tuple[type[bnn.CodedLinear], dict[str, Any]]

KINDS: dict[str, Kind] = {
    "int8-tensor": (bnn.SwitchBackLinear, {}),
    "int8-row": (bnn.SwitchBackLinear, {"variant": "q"}),
    "fp8-e4m3": (bnn.Float8Linear, {"scale": None}),
}
WIDTH = 32


@pytest.fixture(params=KINDS)
def format(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def model_of(format: str = "int8-tensor", seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH), nn.LayerNorm(WIDTH)).to(dtype)
    layer, options = KINDS[format]
    bnn.switch(model, "*", layer, **options)
    return model


def batch(step: int, dtype: torch.dtype = torch.bfloat16, rank: int = 0) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step)).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - x.float().flip(0)).square().mean()


def train(model: nn.Module, optimizer: ballast.AdamW, steps: range, rank: int = 0) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, batch(step, next(model.parameters()).dtype, rank))
        loss.backward()
        optimizer.step(loss=loss)
        losses.append(loss.item())
    return losses


def codes_of(model: nn.Module) -> dict[str, Tensor]:
    """What its layers multiply, as bytes."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, bnn.CodedLinear)}
    return {name: layer.weight_codes().codes.view(torch.uint8).clone() for name, layer in layers.items()}


def is_coded(model: nn.Module) -> bool:
    return all(layer.weight.stride() == (0, 0) for layer in model.modules() if isinstance(layer, bnn.CodedLinear))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(values, other[name]) for name, values in one.items())


def memory_of(model: nn.Module) -> int:
    """The bytes of all storages that its parameters, and the codes of its layers, are in."""
    served = [layer.served for layer in model.modules() if isinstance(layer, bnn.CodedLinear)]
    codes = [part for one in served if one is not None for part in (one.codes, one.scales)]
    storages = {tensor.untyped_storage() for tensor in (*model.parameters(), *codes)}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


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
    first.close()
    again = model_of(format, seed=2)
    second = adamw(again.named_parameters(), lr=1e-2, formats=formats, weights="server")
    assert is_coded(again) and same(codes_of(again), codes_of(model))
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


# --- beside other features ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool, format: str, adamw: AdamW, run: str) -> None:
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of(format)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant)
            return y

    one, two = Recomputing(), model_of(format)
    ours = adamw(one.named_parameters(), lr=1e-2, formats=bnn.served_formats(one))
    theirs = adamw(two.named_parameters(), lr=1e-2, formats=bnn.served_formats(two), run=f"{run}-twin")
    for step in range(6):
        losses = train(one, ours, range(step, step + 1)), train(two, theirs, range(step, step + 1))
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # names, and so random bits, are others
    assert is_coded(one)


def test_accumulation_and_clipping(format: str, adamw: AdamW) -> None:
    model = model_of(format)
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model), **options)
    for step in range(4):
        for micro in range(2):
            (loss_of(model, batch(2 * step + micro)) / 2).backward()
        optimizer.step()
        assert optimizer.last_result and optimizer.last_result.grad_norm > 0 and is_coded(model)


def test_gradients_in_fp8_with_a_scaler(adamw: AdamW) -> None:
    model = model_of("int8-row")
    optimizer = adamw(
        model.named_parameters(),
        lr=1e-2,
        formats=bnn.served_formats(model),
        gradient_dtype="fp8-e5m2",
        nonfinite="skip_step",
    )
    scaler = ballast.GradScaler(optimizer, init_scale=2.0**10)
    losses = []
    for step in range(30):
        loss = loss_of(model, batch(step))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5]) and is_coded(model)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_graph_from_before_a_step_is_refused(steps: int, format: str, adamw: AdamW) -> None:
    """As torch refuses one of nn.Linear: its weights are others by now."""
    model = model_of(format)
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, optimizer, range(steps - 1))
    loss = loss_of(model, batch(0))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compiled(format: str, adamw: AdamW, run: str) -> None:
    one, two = model_of(format), model_of(format)
    ours = adamw(one.named_parameters(), lr=1e-2, formats=bnn.served_formats(one))
    theirs = adamw(two.named_parameters(), lr=1e-2, formats=bnn.served_formats(two), run=f"{run}-twin")
    compiled = torch.compile(one, backend="aot_eager")
    for step in range(4):
        losses = train(compiled, ours, range(step, step + 1)), train(two, theirs, range(step, step + 1))
        assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert is_coded(one)


def test_evaluation_and_frozen_layers(format: str, adamw: AdamW) -> None:
    model = model_of(format)
    model[0].weight.requires_grad_(False)
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, optimizer, range(2))
    assert model[0].weight.stride() != (0, 0) and model[2].weight.stride() == (0, 0)
    with torch.inference_mode():
        assert model(batch(1)).isfinite().all()
    model[0].weight.requires_grad_(True)
    amended = {**bnn.served_formats(model)}
    assert amended.keys() == {"0.weight", "2.weight"}
    train(model, optimizer, range(2, 4))
    assert model[2].weight.stride() == (0, 0)


def test_eight_ranks_have_the_same_codes(format: str, daemon: Daemon, run: str) -> None:
    models = [model_of(format) for _ in range(8)]
    begin = threading.Barrier(8)

    def work(rank: int) -> list[float]:
        model = models[rank]
        options: dict[str, Any] = {"server": daemon.server, "run": run, "rank": rank, "world": 8}
        optimizer = ballast.AdamW(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model), **options)
        begin.wait()
        losses = train(model, optimizer, range(5), rank)
        optimizer.close()
        return losses

    side_by_side(8, work)
    until(lambda: all(is_coded(model) for model in models))
    assert all(same(codes_of(models[0]), codes_of(model)) for model in models)


# --- bad input ---------------------------------------------------------------------------------------------------------


def test_other_codes_than_the_layer_computes_in_are_refused(adamw: AdamW) -> None:
    model = model_of("int8-row")
    optimizer = adamw(model.named_parameters(), formats={"*.weight": {"serving": "int8-tensor"}})
    with pytest.raises(ballast.Rejected, match=r"serving='int8-tensor' of parameter '0.weight'.*'serving': 'int8-row'"):
        train(model, optimizer, range(1))


def test_a_scaled_layer_is_served_in_its_own_dtype_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    bnn.switch(model, "*", bnn.Float8Linear)
    with pytest.raises(ballast.Rejected, match="scale=None"):
        bnn.served_formats(model)
