"""Float8Linear and LayerScale by themselves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ballast
from ballast.nn import Float8Linear, LayerScale
from ballast.nn.float8 import to_fp8

MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
KINDS = list(itertools.product(("tensor", None), ("fp8", "input")))


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_of(
    scale: str | None = "tensor", weight_gradient: str = "fp8", dtype: torch.dtype = torch.float32
) -> Float8Linear:
    """Of 24 features to 16."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"scale": scale, "weight_gradient": weight_gradient}
    return Float8Linear(24, 16, dtype=dtype, **options)


# --- the formats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_every_number_of_the_format_is_kept_and_what_lies_between_goes_to_the_nearest(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].unique()
    codes, scale = to_fp8(numbers, dtype, scaled=False)
    assert torch.equal(codes.float(), numbers) and scale.numel() == 0
    between = torch.lerp(numbers[:-1], numbers[1:], 0.4)
    assert torch.equal(to_fp8(between, dtype, scaled=False)[0].float(), numbers[:-1])
    between = torch.lerp(numbers[:-1], numbers[1:], 0.6)
    assert torch.equal(to_fp8(between, dtype, scaled=False)[0].float(), numbers[1:])


@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_what_is_finite_stays_finite(dtype: torch.dtype) -> None:
    large = torch.tensor([1e6, -1e30, MOST[dtype] * 1.01])
    assert to_fp8(large, dtype, scaled=False)[0].float().tolist() == [MOST[dtype], -MOST[dtype], MOST[dtype]]
    codes, scale = to_fp8(large, dtype, scaled=True)
    torch.testing.assert_close(codes.float()[1] * scale[0], large[1])


@pytest.mark.parametrize("size", [1e-30, 1e-33, 1e-35, 1e-37, 1e-38])
@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_tiny_numbers_keep_their_size(dtype: torch.dtype, size: float) -> None:
    """Where what brings the largest of them to the format's is more than fp32 holds."""
    x = torch.linspace(0.5, 1.0, 64) * size
    codes, scale = to_fp8(x, dtype, scaled=True)
    torch.testing.assert_close(codes.double() * scale.double(), x.double(), rtol=0.13, atol=0)


def test_a_tiny_gradient_goes_through_the_layer() -> None:
    layer, inputs, gradient = layer_of(), randn(8, 24).requires_grad_(), randn(8, 16, seed=2)
    layer(inputs).backward(gradient)
    assert inputs.grad is not None and layer.weight.grad is not None
    wanted = [inputs.grad.double() * 2.0**-120, layer.weight.grad.double() * 2.0**-120]
    inputs.grad = layer.weight.grad = None
    layer(inputs).backward(gradient * 2.0**-120)
    for found, expected in zip((inputs.grad, layer.weight.grad), wanted):
        assert (found.double() - expected).norm() < 0.15 * expected.norm()  # what e5m2 rounds by


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype, scaled", list(itertools.product(MOST, (True, False))), ids=str)
def test_what_is_not_finite_stays_so(dtype: torch.dtype, scaled: bool, bad: float) -> None:
    codes, scale = to_fp8(torch.tensor([1.0, bad]), dtype, scaled)
    values = codes.float() * scale if scaled else codes.float()
    assert not values[1].isfinite()


def test_a_tensor_of_zeros_has_the_scale_zero() -> None:
    codes, scale = to_fp8(torch.zeros(3, 4), torch.float8_e4m3fn, scaled=True)
    assert not codes.float().any() and scale.item() == 0


# --- the layer ---------------------------------------------------------------------------------------------------------


def rounded(x: Tensor, dtype: torch.dtype, scaled: bool) -> Tensor:
    factor = MOST[dtype] / x.abs().max() if scaled else 1.0
    return (x * factor).clamp(-MOST[dtype], MOST[dtype]).to(dtype).double() / factor


@pytest.mark.parametrize("scale, weight_gradient", KINDS)
def test_forward_and_gradients_are_products_of_what_was_rounded(scale: str | None, weight_gradient: str) -> None:
    layer, x, g = layer_of(scale, weight_gradient), randn(10, 24).requires_grad_(), randn(10, 16, seed=2)
    y = layer(x)
    y.backward(g)
    scaled = scale is not None
    with torch.no_grad():
        x8, w8 = rounded(x, torch.float8_e4m3fn, scaled), rounded(layer.weight, torch.float8_e4m3fn, scaled)
        g8 = rounded(g, torch.float8_e5m2, scaled)
    assert x.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(y.double(), x8 @ w8.t() + layer.bias.double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), g8 @ w8, rtol=1e-4, atol=1e-5)
    of_weight = g8.t() @ x8 if weight_gradient == "fp8" else g.double().t() @ x.detach().double()
    torch.testing.assert_close(layer.weight.grad.double(), of_weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.bias.grad, g.sum(0))


def test_a_scale_saves_what_is_small_and_none_loses_it() -> None:
    x = randn(10, 24) * 1e-4
    errors = {}
    for scale in ("tensor", None):
        layer = layer_of(scale)
        with torch.no_grad():
            layer.bias.zero_()
        plain = nn.functional.linear(x, layer.weight)
        errors[scale] = ((layer(x) - plain).norm() / plain.norm()).item()
    assert errors["tensor"] < 0.06 and errors[None] == pytest.approx(1)


def test_backward_keeps_the_input_in_one_byte() -> None:
    def kept(weight_gradient: str) -> int:
        found: list[int] = []
        x = randn(100, 24, dtype=torch.bfloat16)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.nbytes) or t, lambda t: t):
            layer_of(None, weight_gradient, torch.bfloat16)(x)
        return sum(found)

    assert kept("input") - kept("fp8") == 100 * 24


@pytest.mark.parametrize("scale, weight_gradient", KINDS)
def test_autocast_checkpointing_and_compile(scale: str | None, weight_gradient: str) -> None:
    torch.compiler.reset()  # what other tests have compiled counts
    found = []
    for way in ("plain", "recomputed", "compiled"):
        layer, x = layer_of(scale, weight_gradient), randn(2, 5, 24).requires_grad_()
        forward: Any = torch.compile(layer, backend="aot_eager", fullgraph=True) if way == "compiled" else layer
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(forward, x, use_reentrant=False) if way == "recomputed" else forward(x)
        assert y.dtype == torch.bfloat16 and y.shape == (2, 5, 16)
        y.float().square().sum().backward()
        assert x.grad is not None and layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
        found.append((y.detach(), x.grad, layer.weight.grad, layer.bias.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[0], found[2], rtol=0.01, atol=1e-5)


@pytest.mark.parametrize(
    "what, said",
    [
        (lambda: Float8Linear(8, 8, scale="row"), "scale='row' .* 'tensor' or None"),  # type: ignore[arg-type]
        (lambda: Float8Linear(8, 8, weight_gradient="bf16"), "weight_gradient='bf16'"),  # type: ignore[arg-type]
        (lambda: layer_of()(randn(3, 25)), "last dimension is to be 24"),
        (lambda: layer_of()(randn(3, 24).double()), "torch.float64"),
        (lambda: layer_of()._check_shapes("cuda"), "multiples of 16"),
        (lambda: ballast.nn.served_formats(layer_of("tensor")), "scale=None"),
    ],
)
def test_what_cannot_be_is_refused_by_name(what: Any, said: str) -> None:
    with pytest.raises(ballast.Rejected, match=said):
        what()


@pytest.mark.parametrize("scale", ["tensor", None])
def test_a_weight_that_is_not_finite_is_refused(scale: str | None) -> None:
    layer = layer_of(scale)
    with torch.no_grad():
        layer.weight[3, 3] = torch.inf
    with pytest.raises(ballast.Rejected, match="holds a NaN or an infinity"):
        layer(randn(3, 24))


# --- LayerScale --------------------------------------------------------------------------------------------------------


def test_a_layer_scale_of_zero_makes_a_block_the_identity_that_learns() -> None:
    scale = LayerScale(24)
    x, branch = randn(3, 24), randn(3, 24, seed=2).requires_grad_()
    y = x + scale(branch)
    y.square().sum().backward()
    assert torch.equal(y, x) and scale.gamma.grad is not None and scale.gamma.grad.all()
    assert branch.grad is not None and not branch.grad.any()
    assert repr(scale) == "LayerScale(24, init=0.0)"


def test_a_layer_scale_has_its_init_also_after_a_reset() -> None:
    scale = LayerScale(4, init=0.1, dtype=torch.bfloat16)
    with torch.no_grad():
        scale.gamma.zero_()
    scale.reset_parameters()
    assert torch.equal(scale.gamma, torch.full((4,), 0.1, dtype=torch.bfloat16))


# --- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: torch._scaled_mm is not tested")
@pytest.mark.parametrize("scale, weight_gradient", KINDS)
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_a_gpu_gives_the_cpus_products(scale: Any, weight_gradient: Any, rows: int) -> None:
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        layer = Float8Linear(32, 16, scale=scale, weight_gradient=weight_gradient).to(device)
        x = randn(rows, 32).to(device).requires_grad_()
        y = layer(x)
        y.backward(randn(rows, 16, seed=2).to(device))
        assert x.grad is not None and layer.weight.grad is not None
        results.append([t.detach().cpu() for t in (y, x.grad, layer.weight.grad)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
