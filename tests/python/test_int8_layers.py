"""SwitchBackLinear by itself: the paper's formulas, exact sums, what torch does with modules, and what is refused."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import ballast
from ballast import numerics
from ballast.nn import SwitchBackLinear, int8
from ballast.served_codes import encode
from models import layered

VARIANTS = ("global", "m", "q")


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_of(variant: str = "global", dtype: torch.dtype = torch.float32, bias: bool = True) -> SwitchBackLinear:
    """Of 24 features to 16."""
    torch.manual_seed(0)
    layer: SwitchBackLinear = SwitchBackLinear(24, 16, bias, dtype=dtype, variant=variant)  # type: ignore[arg-type]
    return layer


# --- products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 8, 1024, 1025, 5000])
def test_products_of_the_largest_codes_are_exact(k: int) -> None:
    a, b = torch.full((3, k), 127, dtype=torch.int8), torch.full((k, 5), -127, dtype=torch.int8)
    a[1], b[:, 1] = -127, 126
    assert torch.equal(int8.by_fp32(a, b).double(), int8.reference(a, b).double().float().double())


@pytest.mark.parametrize("product", [int8.matmul, int8.by_fp32, torch._int_mm])
def test_products_are_the_sums_of_integers(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    random = torch.Generator().manual_seed(1)
    a = torch.randint(-127, 128, (19, 300), dtype=torch.int8, generator=random)
    b = torch.randint(-127, 128, (40, 300), dtype=torch.int8, generator=random).t()
    assert torch.equal(product(a, b).long(), int8.reference(a, b))


def test_onednn_is_taken_only_where_its_sums_are_exact() -> None:
    """Of codes up to 63, of which no sum of two products saturates, they are exact everywhere."""
    random = torch.Generator().manual_seed(1)
    a = torch.randint(-63, 64, (19, 40), dtype=torch.int8, generator=random)
    b = torch.randint(-63, 64, (40, 24), dtype=torch.int8, generator=random)
    assert torch.equal(int8.by_onednn(a, b).long(), int8.reference(a, b))
    assert int8.is_exact(int8._cpu_product())
    assert not int8.is_exact(lambda x, y: int8.by_fp32(x, y) + 1)
    assert not int8.is_exact(lambda x, y: torch.ops.onednn.no_such_product(x, y))


def test_a_product_that_takes_longer_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As oneDNN's on a processor that it has no code for."""
    now = [0.0]
    monkeypatch.setattr(int8, "perf_counter", lambda: now[0])

    def taking(*seconds: float) -> Callable[[Tensor, Tensor], Tensor]:
        left = list(seconds)

        def product(a: Tensor, b: Tensor) -> Tensor:
            now[0] += left.pop(0)
            return int8.by_fp32(a, b)

        return product

    assert int8.is_faster(taking(0.1, 0.01, 0.1, 0.1), than=taking(0.02, 0.02, 0.02, 0.02))  # the first is made ready
    assert not int8.is_faster(taking(0.02, 0.02, 0.02, 0.02), than=taking(0.01, 0.01, 0.01, 0.01))
    assert not int8.is_faster(taking(20), than=taking(0.01, 0.01, 0.01, 0.01))  # which is not asked again


def test_tensors_without_values_have_products_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "_chosen", [int8.by_onednn])  # as where it is exact
    a, b = torch.empty(3, 16, dtype=torch.int8), torch.empty(16, 8, dtype=torch.int8)
    assert int8.matmul(a.to("meta"), b.to("meta")).shape == (3, 8)
    with FakeTensorMode() as fake:
        assert int8.matmul(fake.from_tensor(a), fake.from_tensor(b)).shape == (3, 8)


# --- codes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", ["int8-tensor", "int8-row", "fp8-e4m3"])
@pytest.mark.parametrize("shape", [(7,), (5, 1), (12, 33), (2, 3, 8)], ids=str)
def test_codes_are_the_daemons_to_the_bit(shape: tuple[int, ...], format: str, dtype: torch.dtype) -> None:
    weights = randn(*shape, dtype=dtype) * 3
    weights.view(-1)[0] = 0
    if len(shape) == 2 and shape[1] > 1:
        weights[2] = 0
    ours = encode(weights, format)
    theirs = numerics.encode(weights.float().numpy(), format)
    assert ours.codes.view(torch.uint8).flatten().tolist() == theirs.planes["codes"].view("uint8").flatten().tolist()
    scales = theirs.planes.get("scales")
    assert ours.scales.tolist() == ([] if scales is None else scales.flatten().tolist())
    assert torch.equal(ours.decode(torch.float32), torch.from_numpy(numerics.decode(theirs)).reshape(shape))


# --- the paper's formulas ----------------------------------------------------------------------------------------------


def rounded(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """Codes and scales in fp64; dim: of which the scale is, None: of all."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return (127 * x / largest).round(), largest / 127


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_and_gradients_are_the_papers(variant: str) -> None:
    layer, x, g = layer_of(variant), randn(10, 24).requires_grad_(), randn(10, 16, seed=2)
    y = layer(x)
    y.backward(g)
    with torch.no_grad():
        x64, g64, w64 = x.double(), g.double(), layer.weight.double()
        x8, of_x = rounded(x64, 1)
        w8, of_w = rounded(w64, 1 if variant == "q" else None)
        torch.testing.assert_close(y.double(), (x8 * of_x) @ (w8 * of_w).t() + layer.bias, rtol=1e-5, atol=1e-6)
        scaled = g64 * of_w.t() if variant == "q" else g64
        g8, of_g = rounded(scaled, 1)
        of_input = (g8 * of_g) @ (w8 if variant == "q" else w8 * of_w)
        kept = x8 * of_x if variant == "m" else x64
    assert x.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(x.grad.double(), of_input, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.weight.grad.double(), g64.t() @ kept, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.bias.grad, g.sum(0))


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_near_to_an_nn_linear(variant: str) -> None:
    layer, x = layer_of(variant, torch.bfloat16), randn(64, 24, dtype=torch.bfloat16)
    plain = nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float())
    assert (layer(x).float() - plain).norm() < 0.015 * plain.norm()


def test_what_backward_keeps_of_the_input_is_half_in_variant_m() -> None:
    def kept(variant: str) -> int:
        found: list[int] = []
        x = randn(100, 24, dtype=torch.bfloat16)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.nbytes) or t, lambda t: t):
            layer_of(variant, torch.bfloat16)(x)
        return sum(found)

    assert kept("global") - kept("m") == 100 * 24 * (2 - 1) - 100 * 4  # and a scale for each row


@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 3, 24), (0, 24)], ids=str)
def test_inputs_of_any_dimensions(shape: tuple[int, ...]) -> None:
    layer, x = layer_of(), randn(*shape).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 16) and x.grad is not None and x.grad.shape == shape
    assert torch.equal(y.reshape(-1, 16), layer(x.reshape(-1, 24)))


def test_zero_rows_and_a_zero_weight_give_zeros() -> None:
    layer, x = layer_of(bias=False), randn(4, 24)
    x[1] = 0
    y = layer(x)
    assert not y[1].any() and y[0].all()
    with torch.no_grad():
        layer.weight.zero_()
    x.requires_grad_()
    layer(x).sum().backward()
    assert not layer(x).any() and x.grad is not None and not x.grad.any()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_in_an_input_is_not_finite_in_its_row_alone(bad: float) -> None:
    layer, x = layer_of(), randn(3, 24)
    x[1, 5] = bad
    y = layer(x)
    assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()


def test_an_overflow_of_the_output_gradient_reaches_both_gradients() -> None:
    """A GradScaler looks for it there."""
    layer, x = layer_of(), randn(3, 24).requires_grad_()
    gradient = randn(3, 16)
    gradient[1, 5] = torch.inf
    layer(x).backward(gradient)
    assert x.grad is not None and layer.weight.grad is not None
    assert not x.grad[1].isfinite().any() and not layer.weight.grad[5].isfinite().any()


def test_gradients_that_nobody_wants_are_not_made() -> None:
    layer, x = layer_of(), randn(3, 24)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None
    assert not layer_of(bias=False)(x).isnan().any()


# --- beside torch's features -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_gives_its_dtype_and_gradients_of_the_weights(variant: str) -> None:
    layer, x = layer_of(variant), randn(6, 24).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    assert x.grad is not None and x.grad.dtype == torch.float32
    gradient = layer.weight.grad.clone()
    layer.weight.grad = None
    scaled, largest = int8.quantize_rows(x.detach().bfloat16())
    made = layer.weight_codes()
    product = int8.reference(scaled, made.codes.t()).float() * (largest / 127) * (made.scales / 127)
    assert torch.equal(y, (product + layer.bias).bfloat16())  # no 16-bit product in between
    z = layer.bfloat16()(x.detach().bfloat16())
    z.float().square().sum().backward()
    assert (layer.weight.grad.float() - gradient).norm() < 0.02 * gradient.norm()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_bits(variant: str, reentrant: bool) -> None:
    gradients = []
    for recomputes in (False, True):
        layer, x = layer_of(variant), randn(6, 24).requires_grad_()
        y = checkpoint(layer, x, use_reentrant=reentrant) if recomputes else layer(x)
        y.square().sum().backward()
        gradients.append((x.grad, layer.weight.grad, layer.bias.grad))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_compile_takes_it_whole(variant: str) -> None:
    torch.compiler.reset()  # what other tests have compiled counts
    layer, x = layer_of(variant), randn(6, 24).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    expected = x.grad, layer.weight.grad
    x.grad = layer.weight.grad = None
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    made = compiled(x)
    made.square().sum().backward()
    torch.testing.assert_close(made, y)
    torch.testing.assert_close((x.grad, layer.weight.grad), expected)


def test_a_copy_and_a_saved_layer_are_the_same() -> None:
    layer, x = layer_of("q"), randn(6, 24)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    for one in (copy.deepcopy(layer), torch.load(saved, weights_only=False)):
        assert torch.equal(one(x), layer(x)) and one.variant == "q" and ballast.nn.served_formats(one)
    state = io.BytesIO()
    torch.save(layer.state_dict(), state)
    state.seek(0)
    other = SwitchBackLinear(24, 16, variant="q")
    other.load_state_dict(torch.load(state, weights_only=True))
    assert torch.equal(other(x), layer(x))


# --- in the place of nn.Linear -----------------------------------------------------------------------------------------


def test_switch_keeps_parameters_names_hooks_and_modes() -> None:
    model = layered(seed=1)
    names, parameters = [name for name, _ in model.named_parameters()], list(model.parameters())
    seen: list[str] = []
    model[1].register_forward_hook(lambda *_: seen.append("hook"))
    model.eval()
    assert ballast.nn.switch(model, ["0", "1*"], variant="q") == ["0", "1"]
    assert [type(layer) for layer in model] == [SwitchBackLinear, SwitchBackLinear, nn.Linear]
    assert [name for name, _ in model.named_parameters()] == names
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert not model[0].training and model[0].variant == "q"
    model(torch.ones(2, 8))
    assert seen == ["hook"]
    assert ballast.nn.served_formats(model) == {
        "0.weight": {"serving": "int8-row"},
        "1.weight": {"serving": "int8-row"},
    }
    assert "variant='q'" in repr(model[0])


def test_a_model_of_several_blocks_is_switched_by_name() -> None:
    model = nn.ModuleDict({"head": nn.Linear(8, 8), "blocks": nn.ModuleList([layered(1), layered(2)])})
    assert ballast.nn.switch(model, "blocks.*.[02]") == [
        f"blocks.{i}.{j}" for i, j in itertools.product((0, 1), (0, 2))
    ]


def test_a_weight_that_an_embedding_has_too_is_not_served_in_codes() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 8), "body": nn.Linear(8, 8), "head": nn.Linear(8, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    ballast.nn.switch(model)
    assert model["head"].weight is model["embed"].weight
    assert ballast.nn.served_formats(model) == {"body.weight": {"serving": "int8-tensor"}}


def test_names_with_brackets_are_names() -> None:
    model = nn.ModuleDict({"a[0]": nn.Linear(8, 8)})
    ballast.nn.switch(model)
    assert ballast.nn.served_formats(model) == {"a[[]0].weight": {"serving": "int8-tensor"}}


# --- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what, said",
    [
        (
            lambda: ballast.nn.switch(layered(1), "blocks.*"),
            r"the pattern 'blocks.\*' matches no nn.Linear; there are 0, 1",
        ),
        (lambda: ballast.nn.switch(layered(1), ["*", "x"]), "the pattern 'x' matches"),
        (lambda: ballast.nn.switch(nn.ReLU()), "there are none"),
        (lambda: ballast.nn.switch(nn.Linear(8, 8)), "an nn.Linear itself"),
        (lambda: ballast.nn.switch(layered(1), variant="x"), "variant='x' .* one of 'global', 'm', 'q'"),
        (lambda: ballast.nn.served_formats(layered(1)), "switch"),
        (lambda: SwitchBackLinear(200_000, 8, device="meta"), "more than 133144 products"),
        (lambda: layer_of()(randn(3, 25)), "last dimension is to be 24"),
        (lambda: layer_of()(randn(3, 24).double()), "torch.float64"),
        (lambda: layer_of(dtype=torch.float64)(randn(3, 24).double()), "float32, bfloat16 or float16"),
        (lambda: layer_of()(randn(3, 24, dtype=torch.bfloat16)), "autocast"),
        (lambda: layer_of()(torch.ones(3, 24, dtype=torch.int8)), "torch.int8"),
        (lambda: layer_of()._check_shapes("cuda") or SwitchBackLinear(10, 16)._check_shapes("cuda"), "multiples of 8"),
    ],
)
def test_what_cannot_be_is_refused_by_name(what: Callable[[], object], said: str) -> None:
    with pytest.raises(ballast.Rejected, match=said):
        what()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    layer = layer_of()
    with torch.no_grad():
        layer.weight[3, 3] = bad
    with pytest.raises(ballast.Rejected, match="holds a NaN or an infinity"):
        layer(randn(3, 24))


def test_switch_that_is_refused_has_changed_nothing() -> None:
    model = layered(1)
    with pytest.raises(ballast.Rejected):
        ballast.nn.switch(model, ["0", "nothing"])
    assert all(type(layer) is nn.Linear for layer in model)


# --- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: torch._int_mm on CUDA is not tested")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_a_gpu_gives_the_cpus_products(variant: str, rows: int) -> None:
    results = []
    for device in ("cpu", "cuda"):
        layer, x = layer_of(variant).to(device), randn(rows, 24).to(device).requires_grad_()
        y = layer(x)
        y.backward(randn(rows, 16, seed=2).to(device))
        assert x.grad is not None and layer.weight.grad is not None
        results.append([t.detach().cpu() for t in (y, x.grad, layer.weight.grad)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
