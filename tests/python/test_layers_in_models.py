"""Layers of ballast.nn in models that do more with them than call them: ties, hooks, copies, pruning, torch's own modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import ballast
import unit_scaling as uu
from ballast import nn as bnn
from ballast.nn import int8
from ballast.served_codes import encode
from ballast.weight_codes import codes_of
from models import layered

LAYERS: dict[str, Callable[[], bnn.CodedLinear]] = {
    "int8": lambda: bnn.SwitchBackLinear(16, 8),
    "int8 by row": lambda: bnn.SwitchBackLinear(16, 8, variant="q"),
    "fp8": lambda: bnn.Float8Linear(16, 8, scale=None),
    "scaled fp8": lambda: bnn.Float8Linear(16, 8),
    "unit-scaled fp8": lambda: bnn.UnitScaledFloat8Linear(16, 8, bias=True),
}


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> bnn.CodedLinear:
    torch.manual_seed(0)
    return LAYERS[request.param]()


def serve(weight: Tensor) -> None:
    """As a run's first step does."""
    codes = codes_of(weight)
    assert codes is not None
    codes.take(weight, encode(weight, codes.format))


def serve_all(model: nn.Module) -> None:
    for parameter in model.parameters():
        if codes_of(parameter) is not None:
            serve(parameter)


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


# --- who reads a weight ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_by_one", [True, False])
def test_layers_that_share_a_weight_keep_it(one_by_one: bool) -> None:
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in "abc"})
    model["b"].weight = model["a"].weight
    for pattern in "abc" if one_by_one else "*":
        bnn.switch(model, pattern)
    assert bnn.served_formats(model) == {"c.weight": {"serving": "int8-tensor"}}
    serve_all(model)
    assert all(model[name](x(3, 8)).isfinite().all() for name in "abc")
    assert torch.equal(model["a"](x(3, 8)), model["b"](x(3, 8)))


def test_a_weight_that_is_tied_by_hand_is_kept() -> None:
    one, two = bnn.SwitchBackLinear(8, 8), bnn.SwitchBackLinear(8, 8)
    two.weight = one.weight
    assert codes_of(one.weight) is None
    del two
    assert codes_of(one.weight) is not None


def test_a_module_in_two_places_is_made_once() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert bnn.switch(model) == ["0", "2"]
    assert model[0] is model[2] and type(model[0]) is bnn.SwitchBackLinear
    assert bnn.served_formats(model) == {"0.weight": {"serving": "int8-tensor"}}


def test_a_refused_switch_has_asked_for_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 200_000, device="meta"))
    with pytest.raises(ballast.Rejected, match="int32"):
        bnn.switch(model)
    assert codes_of(model[0].weight) is None


def test_a_layer_that_is_gone_asks_no_more() -> None:
    model = layered(1)
    bnn.switch(model, "0")
    plain = nn.Linear(8, 8)
    plain.weight = model[0].weight
    model[0] = plain
    assert codes_of(plain.weight) is None


def test_a_pruned_layer_keeps_its_weight(layer: bnn.CodedLinear) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)
    assert codes_of(layer.weight_orig) is None
    assert layer(x(3, 16)).isfinite().all() and (layer.weight == 0).sum() == 64


def test_a_parametrized_layer_keeps_its_weight(layer: bnn.CodedLinear) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    before = layer(x(3, 16))
    parametrize.register_parametrization(layer, "weight", Doubled())
    assert codes_of(layer.parametrizations.weight.original) is None
    assert not torch.equal(layer(x(3, 16)), before)


def test_a_linear_that_was_pruned_is_not_replaced() -> None:
    model = layered(1)
    prune.l1_unstructured(model[0], "weight", 0.5)
    assert bnn.switch(model) == ["1", "2"]


@pytest.mark.parametrize("kind", ["layer", "stack"])
def test_torchs_encoder_evaluates_what_it_trains(kind: str) -> None:
    """Its fast path reads weights around the layers that have them."""
    torch.manual_seed(0)
    one = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = one if kind == "layer" else nn.TransformerEncoder(one, 2)
    bnn.switch(model)
    trained = model(x(2, 5, 16))
    serve_all(model)
    served = model(x(2, 5, 16))
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x(2, 5, 16)), trained.detach())
        torch.testing.assert_close(model(x(2, 5, 16)), served.detach())


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("pattern", ["*", "*layers.1.linear2"])
@pytest.mark.parametrize("within", [False, True], ids=["encoder", "parent"])
def test_torchs_encoder_of_padded_sequences(within: bool, pattern: str, padded: bool) -> None:
    """In evaluation it makes their batch nested, for that fast path."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0), 2)
    lengths = torch.tensor([5, 3, 2]) if padded else torch.tensor([5, 5, 5])
    mask = torch.arange(5) >= lengths[:, None] if padded else None

    def forwards() -> list[Tensor]:
        found = []
        for train, grad in ((True, True), (False, True), (False, False)):
            encoder.train(train)
            with torch.set_grad_enabled(grad):
                made = encoder(x(3, 5, 16), src_key_padding_mask=mask)
            found.append(torch.cat([one[:length] for one, length in zip(made, lengths)]).detach())
        return found

    wanted = forwards()
    bnn.switch(nn.Sequential(nn.Flatten(), nn.ModuleDict({"encoder": encoder})) if within else encoder, pattern)
    found = forwards()
    for ours, theirs in zip(found, wanted):
        torch.testing.assert_close(ours, found[0])
        assert 0 < (ours - theirs).abs().max() < 0.05 * theirs.abs().max()


def test_a_layer_that_was_switched_within_torchs_encoder_tells_what_to_write() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    bnn.switch(encoder.layers[1])
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        with pytest.raises(ballast.Rejected, match="encoder.use_nested_tensor = False"):
            encoder(x(2, 5, 16), src_key_padding_mask=mask)
        encoder.use_nested_tensor = False
        assert encoder(x(2, 5, 16), src_key_padding_mask=mask).isfinite().all()


# --- hooks, copies and moves -------------------------------------------------------------------------------------------


def test_hooks_of_every_kind_go_over_and_can_be_removed() -> None:
    model, seen = layered(1), []
    handles = [
        model[1].register_forward_pre_hook(lambda *_: seen.append("before")),
        model[1].register_forward_hook(lambda _m, _a, kwargs, _y: seen.append("after"), with_kwargs=True),
        model[1].register_full_backward_hook(lambda *_: seen.append("backward")),
        model[1].register_state_dict_post_hook(lambda *_: seen.append("state")),
    ]
    bnn.switch(model)
    model(x(3, 8)).sum().backward()
    model.state_dict()
    assert seen == ["before", "after", "backward", "state"]
    for handle in handles:
        handle.remove()
    model(x(3, 8)).sum().backward()
    assert len(seen) == 4


def test_memory_that_comes_late_is_asked_for_too(layer: bnn.CodedLinear) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 8))
    bnn.switch(model)
    model.to_empty(device="cpu")
    assert bnn.served_formats(model) == {"0.weight": {"serving": "int8-tensor"}}


def test_a_copy_of_a_served_layer_is_a_layer(layer: bnn.CodedLinear) -> None:
    layer.weight.note = "kept"  # type: ignore[attr-defined]
    if codes_of(layer.weight) is not None:
        serve(layer.weight)
    shallow, deep = copy.copy(layer), copy.deepcopy(layer)
    for one in (shallow, deep):
        torch.testing.assert_close(one(x(3, 16)), layer(x(3, 16)), rtol=0.05, atol=0.02)
        assert codes_of(layer.weight) is None or one.weight.note == "kept"  # type: ignore[attr-defined]


def test_u_mups_marks_outlive_a_copy_of_a_served_layer() -> None:
    model = nn.Sequential(uu.Linear(16, 8))
    bnn.switch(model, "*", bnn.UnitScaledFloat8Linear)
    serve(model[0].weight)
    other = copy.deepcopy(model)
    assert other[0].weight.mup_type == "weight" and other[0].weight.mup_scaling_depth is None


def test_given_weights_are_multiplied_in_place_of_what_was_served(layer: bnn.CodedLinear) -> None:
    if codes_of(layer.weight) is not None:
        serve(layer.weight)
    ones = torch.ones(1, 1).expand(8, 16)
    y = torch.func.functional_call(layer, {"weight": ones, "bias": torch.zeros(8)}, x(3, 16))
    assert torch.allclose(y[:, :1].expand_as(y), y)


# --- shapes, ranges and dtypes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16), (16,)], ids=str)
def test_batches_without_rows(shape: tuple[int, ...], layer: bnn.CodedLinear) -> None:
    inputs = x(*shape).requires_grad_()
    y = layer(inputs)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 8) and inputs.grad is not None and inputs.grad.shape == shape


@pytest.mark.parametrize("shape", [(5, 16), (2, 5, 16), (16,)], ids=str)
def test_what_a_layer_gives_may_be_written_to(shape: tuple[int, ...], layer: bnn.CodedLinear) -> None:
    found = []
    for inplace in (False, True):
        layer.zero_grad()
        y = nn.functional.relu(layer(x(*shape)), inplace=inplace)
        y.square().sum().backward()
        assert layer.weight.grad is not None
        found.append([y.detach().clone(), layer.weight.grad.clone()])
    assert all(map(torch.equal, *found))


def test_a_bias_that_is_no_memory_of_its_own(layer: bnn.CodedLinear) -> None:
    spread = {"bias": torch.ones(1).expand(8)}
    given = torch.func.functional_call(layer, spread, (x(3, 16),))
    assert torch.equal(given, torch.func.functional_call(layer, {"bias": torch.ones(8)}, (x(3, 16),)))


@pytest.mark.parametrize("size", [1e-37, 1e-30, 1e30])
def test_tiny_and_large_numbers_stay_finite(size: float, layer: bnn.CodedLinear) -> None:
    inputs = (x(4, 16) * size).requires_grad_()
    y = layer(inputs)
    y.backward(x(4, 8) * min(size, 1.0))
    assert inputs.grad is not None and layer.weight.grad is not None
    assert y.isfinite().all() and inputs.grad.isfinite().all() and layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
def test_autocast_takes_no_other_dtypes(dtype: torch.dtype, layer: bnn.CodedLinear) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ballast.Rejected, match=str(dtype)):
        layer(x(3, 16).to(dtype))


def test_shapes_are_told_without_memory(layer: bnn.CodedLinear, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "_chosen", [int8.by_onednn])  # as where it is exact
    assert layer.to("meta")(torch.empty(3, 16, device="meta")).shape == (3, 8)


def test_what_backward_keeps_of_a_frozen_layer(layer: bnn.CodedLinear) -> None:
    layer.weight.requires_grad_(False)
    kept: list[int] = []
    inputs = x(1000, 16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        layer(inputs)
    assert sum(kept) < 1000  # weight, codes and scales, and not 1,000 rows


def test_an_empty_tensor_loses_nothing() -> None:
    assert bnn.fp8_losses(torch.empty(0)) == (0.0, 0.0)


@pytest.mark.parametrize("served", [True, False])
def test_compiled(served: bool, layer: Any) -> None:
    torch.compiler.reset()  # what other tests have compiled counts
    if served and codes_of(layer.weight) is not None:
        serve(layer.weight)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for rows in (4, 7):
        torch.testing.assert_close(compiled(x(rows, 16)), layer(x(rows, 16)))
