"""ballast.numerics: every format goes out and comes back, within what its table of errors says."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from ballast import numerics

FORMATS = [
    (form.name, slot)
    for form in numerics.formats()
    for slot in form.planes
    if form.kind != "wire" or (form.serving and form.name not in ("fp32", "bf16"))
]
STATES = sorted({form.name for form in numerics.formats() if form.kind == "state"})
MASTERS = sorted({form.name for form in numerics.formats() if form.kind == "master"})
BLOCKS = {"companded8": 32, "flash8": 32, "dynamic8": 256, "int8-row": 1024}


def normals(*shape: int, slot: str = "weight") -> np.ndarray:
    values = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    return values**2 if slot == "variance" else values


def nmse(encoded: numerics.Encoded, values: np.ndarray) -> float:
    difference = numerics.decode(encoded).astype(np.float64) - values
    return float(np.sum(difference**2) / np.sum(values.astype(np.float64) ** 2))


# --- out and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "slot"), FORMATS)
@pytest.mark.parametrize("shape", [(), (1,), (33,), (5, 7), (3, 4, 100), (0,)], ids=str)
def test_round_trip_keeps_the_shape(form: str, slot: str, shape: tuple[int, ...]) -> None:
    values = normals(*shape, slot=slot) if shape else np.float32(0.5)
    encoded = numerics.encode(values, form, slot)
    decoded = numerics.decode(encoded)
    assert encoded.shape == decoded.shape == shape
    assert decoded.dtype == np.float32
    assert np.allclose(decoded, values, atol=0.2, rtol=0.1)


@pytest.mark.parametrize(("form", "slot"), FORMATS)
def test_planes_are_as_the_table_says(form: str, slot: str) -> None:
    encoded = numerics.encode(normals(300, slot=slot), form, slot)
    (table,) = [
        f for f in numerics.formats() if f.name == form and slot in f.planes and (f.kind == "wire") == encoded.served
    ]
    for plane in table.planes[slot]:
        array = encoded.planes[plane.name]
        assert array.dtype == np.dtype(plane.dtype)
        assert array.dtype.itemsize == plane.itemsize
        assert array.size == (300 if encoded.served else 512 // plane.per)
        assert array.ctypes.data % 64 == 0
    if not encoded.served:
        assert encoded.nbytes == 512 * table.bytes_per_parameter[slot]


@pytest.mark.parametrize(("form", "slot"), FORMATS)
def test_errors_are_within_the_table_and_the_table_is_tight(form: str, slot: str) -> None:
    values = normals(512, 1024, slot=slot)
    told = numerics.conversion_error("fp32", form, slot) if form != "fp32" else numerics.CodecError(1, 0, 0, 0)
    encoded = numerics.encode(values, form, slot)
    assert told.nmse / 2 <= nmse(encoded, values) <= told.nmse
    block = BLOCKS.get(form, values.size if form == "int8-tensor" else 1)
    assert told.block in (block, 0)
    difference = np.abs(numerics.decode(encoded).astype(np.float64) - values).reshape(-1, block)
    largest = np.abs(values).reshape(-1, block).max(1, keepdims=True)
    normal = (largest > 0.02) if form.startswith(("fp", "mcf8")) else largest > 0
    assert (difference / largest)[np.broadcast_to(normal, difference.shape)].max() <= told.max_of_block


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("slot", ["momentum", "variance"])
def test_stochastic_rounding_is_within_the_table_and_unbiased(state: str, slot: str) -> None:
    values = normals(512, 1024, slot=slot)
    told = numerics.CODEC_ERRORS[state, slot]
    encoded = numerics.encode(values, state, slot, rounding="stochastic", key=1)
    assert told.stochastic_nmse / 2 <= nmse(encoded, values) <= told.stochastic_nmse
    if told.stochastic_nmse > told.nmse:
        many = [numerics.encode(values[:8], state, slot, "stochastic", key) for key in range(400)]
        mean = np.mean([numerics.decode(one).astype(np.float64) for one in many], axis=0)
        assert abs(mean.sum() - values[:8].sum()) <= 2e-4 * np.abs(values[:8]).sum()
        assert nmse(numerics.encode(mean.astype(np.float32), "fp32", slot), values[:8]) < told.stochastic_nmse / 100


def test_stochastic_codes_are_a_function_of_the_key() -> None:
    values = normals(4096)
    codes = [
        numerics.encode(values, "companded8", "momentum", "stochastic", key).planes["momentum"] for key in (1, 1, 2)
    ]
    assert np.array_equal(codes[0], codes[1])
    assert not np.array_equal(codes[0], codes[2])


@pytest.mark.parametrize("master", ["fp32", "split32"])
def test_lossless_masters_keep_every_bit(master: str) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 100_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 3.38e38)]
    assert np.array_equal(numerics.decode(numerics.encode(values, master)).view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("master", ["split24", "split32"])
def test_the_upper_half_is_the_served_weight(master: str) -> None:
    values = normals(1000)
    encoded = numerics.encode(values, master)
    served = numerics.encode(numerics.decode(encoded), "bf16").planes["weight"]
    upper = encoded.planes["weight.hi"]
    assert np.mean(served[:1000] == upper[:1000]) > 0.99  # halves in the middle are taken up, not to even


def test_codes_mean_what_their_formula_says() -> None:
    m = numerics.encode(normals(320), "companded8", "momentum")
    scale = (m.planes["momentum.scale"][:10].astype(np.uint32) << 16).view(np.float32)
    k = m.planes["momentum"][:320].astype(np.float32)
    assert np.array_equal(numerics.decode(m), k / (254 - np.abs(k)) * np.repeat(scale, 32))
    w = numerics.encode(normals(64), "split24")
    hi, lo = (w.planes[name][:64].astype(np.int64) for name in ("weight.hi", "weight.lo"))
    assert np.array_equal(numerics.decode(w).view(np.uint32), ((((hi << 8) + lo) << 8) & 0xFFFFFFFF).astype(np.uint32))


# --- served formats -------------------------------------------------------------------------------------------------


def test_int8_rows_have_a_scale_each() -> None:
    weights = normals(3, 40) * np.array([[1], [100], [0]], np.float32)
    encoded = numerics.encode(weights, "int8-row")
    codes, scales = encoded.planes["codes"], encoded.planes["scales"]
    assert np.array_equal(scales, np.abs(weights).max(1))
    wanted = np.rint(np.float32(127) * weights[:2] / scales[:2, None])
    assert np.array_equal(codes[:2], wanted)
    assert not codes[2].any() and not numerics.decode(encoded)[2].any()


def test_int8_tensor_has_one_scale() -> None:
    weights = normals(3, 40)
    encoded = numerics.encode(weights, "int8-tensor")
    assert encoded.planes["scales"].tolist() == [np.abs(weights).max()]
    assert np.array_equal(encoded.planes["codes"], np.rint(np.float32(127) * weights / np.abs(weights).max()))


@pytest.mark.parametrize(("form", "dtype"), [("fp8-e4m3", "float8_e4m3fn"), ("fp16", "float16")])
def test_served_floats_are_torchs(form: str, dtype: str) -> None:
    import torch

    values = np.clip(normals(10_000) * np.exp(normals(10_000, slot="variance") - 2), -440, 440).astype(np.float32)
    torchs = torch.from_numpy(values).to(getattr(torch, dtype))
    encoded = numerics.encode(values, form)
    assert np.array_equal(
        encoded.planes["codes"].view(f"uint{8 * torchs.itemsize}"),
        torchs.view(torch.uint8).numpy().view(f"uint{8 * torchs.itemsize}"),
    )
    assert np.array_equal(numerics.decode(encoded), torchs.float().numpy())


def test_a_format_of_gradients_alone_is_not_served() -> None:
    with pytest.raises(ValueError, match="fp8-e5m2 is a format of gradients alone"):
        numerics.encode(normals(4), "fp8-e5m2")


# --- conversion, import ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", ["momentum", "variance"])
@pytest.mark.parametrize("source", STATES)
@pytest.mark.parametrize("to", STATES)
def test_converting_a_state_costs_what_the_table_says(slot: str, source: str, to: str) -> None:
    encoded = numerics.encode(normals(256, 1024, slot=slot), source, slot)
    told = numerics.conversion_error(source, to, slot)
    assert nmse(numerics.convert(encoded, to), numerics.decode(encoded)) <= told.nmse * 1.02


@pytest.mark.parametrize("source", MASTERS)
@pytest.mark.parametrize("to", MASTERS)
def test_converting_weights_costs_what_the_table_says(source: str, to: str) -> None:
    encoded = numerics.encode(normals(256, 1024), source)
    converted = numerics.convert(encoded, to)
    assert nmse(converted, numerics.decode(encoded)) <= numerics.conversion_error(source, to, "weight").nmse
    if source == to:
        assert np.array_equal(numerics.decode(converted), numerics.decode(encoded))


@pytest.mark.parametrize("slot", ["momentum", "variance"])
@pytest.mark.parametrize("state", STATES)
def test_converting_a_state_to_its_own_format_changes_no_code(state: str, slot: str) -> None:
    encoded = numerics.encode(normals(300, slot=slot), state, slot)
    if state in ("companded8", "flash8"):
        encoded.planes[slot][:64:2] = 0  # also of what encoding would make other codes of: one is a quarter of code 1
        encoded.planes[slot][1:64:2] = 100
    converted = numerics.convert(encoded, state)
    for name, plane in encoded.planes.items():
        assert np.array_equal(converted.planes[name], plane) and not np.shares_memory(converted.planes[name], plane)


def test_planes_of_others_are_taken_in() -> None:
    encoded = numerics.encode(normals(300), "flash8", "momentum")
    shorter = {"momentum": encoded.planes["momentum"][:300], "momentum.scale": encoded.planes["momentum.scale"][:10]}
    taken = numerics.from_planes("flash8", "momentum", (3, 100), shorter)
    assert np.array_equal(numerics.decode(taken).ravel(), numerics.decode(encoded))
    assert np.array_equal(numerics.decode(taken.copy()), numerics.decode(taken))


def test_planes_that_are_no_weights_are_refused() -> None:
    hi, lo = np.zeros(4, np.uint16), np.array([0, 0, -1, 0], np.int8)
    with pytest.raises(ValueError, match="not finite"):
        numerics.from_planes("split24", "weight", (4,), {"weight.hi": hi, "weight.lo": lo})
    with pytest.raises(ValueError, match=r"'weight.lo' is missing: wanted weight.hi, weight.lo"):
        numerics.from_planes("split24", "weight", (4,), {"weight.hi": hi})
    with pytest.raises(ValueError, match=r"'weight.hi' is int8\[4\]: wanted uint16"):
        numerics.from_planes("split24", "weight", (4,), {"weight.hi": lo, "weight.lo": lo})


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: numerics.encode(normals(4), "split25"), "'split25'.*there are bf16.*split24"),
        (lambda: numerics.encode(normals(4), "split24", slot="momentum"), "'split24'.*there are bf16, companded8"),
        (lambda: numerics.encode(normals(4), "fp32", slot="velocity"), "'velocity': there are weight, momentum"),
        (lambda: numerics.encode(normals(4), "companded8", "momentum", "up"), "rounding is 'up'"),
        (lambda: numerics.encode(normals(4), "split24", rounding="stochastic"), "loaded to nearest"),
        (lambda: numerics.encode(np.ones(4), "split24"), "float64: wanted float32"),
        (lambda: numerics.encode(np.float32([1, np.nan]), "split24"), "element 1 is nan, not finite"),
        (lambda: numerics.encode(np.float32([1, np.inf]), "flash8", "momentum"), "element 1 is inf"),
        (lambda: numerics.encode(np.float32([1, -2]), "fp32", "variance"), "element 1 is -2.0: a variance is not"),
        (lambda: numerics.encode(np.float32([1, 7e4]), "flash8", "momentum"), "holds up to 65519"),
        (lambda: numerics.encode(normals(4), "bf16", "momentum", "stochastic", key=-1), "key is -1"),
        (lambda: numerics.conversion_error("fp32", "int4", "momentum"), "'int4'"),
    ],
)
def test_mistakes_are_named(call, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_needs_no_torch() -> None:
    """numerics and the extension by themselves: the package's own front door offers the torch optimizer."""
    script = (
        "import importlib.util, sys, types; sys.modules['torch'] = None\n"
        "package = types.ModuleType('ballast')\n"
        "package.__path__ = importlib.util.find_spec('ballast').submodule_search_locations\n"
        "sys.modules['ballast'] = package\n"
        "from ballast import numerics; print(len(numerics.kernels()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(numerics.kernels())
