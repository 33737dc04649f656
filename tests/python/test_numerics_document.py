"""kernels/NUMERICS.md says all: what is written from its text alone (document_*.py) has the library's bits.

Every kernel for some steps, in both roundings, statistics included; every format by itself.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import document_formats as formats
import document_rules as rules
import numpy as np
import pytest

from ballast import numerics

DOCUMENT = Path(__file__).resolve().parents[2] / "kernels" / "NUMERICS.md"
SHAPE = (70, 130)  # two tiles and a ragged third
N = SHAPE[0] * SHAPE[1]
KEY = 0x0123456789ABCDEF
STEPS = {1: 1, 2: 2, 3: 1000, 70_000: 2**40 + 7}  # the run's, by the number of the update
HYPER = {
    "adamw": {"lr": 3e-3, "weight_decay": 0.1, "beta2": 0.99},
    "adam": {"lr": 3e-3, "weight_decay": 0.1},
    "stable_adamw": {"lr": 3e-3, "weight_decay": 0.1, "lr_peak": 0.03},
    "sgd": {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "dampening": 0.25},
    "sgdw": {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "nesterov": 1.0, "lr_peak": 0.3},
    "lion": {"lr": 1e-3, "weight_decay": 0.1},
    "collage_light": {"lr": 3e-3, "weight_decay": 0.1},
    "collage_plus": {"lr": 3e-3, "weight_decay": 0.1},
}
KERNELS = [(kernel.rule, kernel.master, kernel.state) for kernel in numerics.kernels()]
# The bits of others are a library's of matrix products.
EXACT = [kernel for kernel in KERNELS if kernel[0] != "muon"]


def normals(seed: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(SHAPE) * scale).astype(np.float32)


def gradient(step: int) -> np.ndarray:
    """Larger by step, of different sizes by row, some zero; from the second step on some not finite or too large."""
    grad = (
        normals(step, 2.0**-6 * (1 + min(step, 5))) * np.exp2(np.arange(SHAPE[0]) % 17 - 8).astype(np.float32)[:, None]
    )
    grad[np.random.default_rng(step + 50).random(SHAPE) < 0.05] = 0
    grad[5] = 0
    if step > 0:
        grad.flat[[3, 700, 4500]] = np.nan, np.inf, 1e30
    return grad


def padded(x: np.ndarray) -> np.ndarray:
    whole = np.zeros(-(-x.size // 256) * 256, x.dtype)
    whole[: x.size] = x.ravel()
    return whole


def same_bits(ours: np.ndarray, theirs: np.ndarray, what: str) -> None:
    ours = np.ascontiguousarray(ours)
    assert ours.itemsize == theirs.itemsize and ours.size == theirs.size, what
    different = ours.view(f"u{ours.itemsize}") != theirs.view(f"u{theirs.itemsize}")
    assert not different.any(), f"{what}: {different.sum()} words differ, the first is {np.flatnonzero(different)[0]}"


def same_tensor(tensor: rules.Tensor, weight: numerics.Encoded, state: dict[str, numerics.Encoded], what: str) -> None:
    ours = [plane for planes in (tensor.weight, *tensor.slots) for plane in planes]
    theirs = {name: plane for one in (weight, *state.values()) for name, plane in one.planes.items()}
    assert len(ours) == len(theirs)
    for plane, (name, wanted) in zip(ours, theirs.items()):
        same_bits(plane, wanted, f"{what}, {name}")


def shapes_of(state: dict[str, numerics.Encoded], form: str) -> list[list[tuple[int, np.dtype]]]:
    slots = [[(plane.size, plane.dtype) for plane in one.planes.values()] for one in state.values()]
    if form == "mcf":  # the variance's second component is a slot of its own
        slots = [slots[0], slots[1][:1], slots[1][1:]]
    return slots


def table(heading: str) -> list[list[str]]:
    """The cells of the document's first table under the heading, without its head."""
    text = DOCUMENT.read_text(encoding="utf-8").split(f"# {heading}\n", 1)[1]
    rows = text[text.index("|") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_tables_are_the_registrys() -> None:
    defaults = {}
    for rules_of, _, hypers in table("Hyperparameters"):
        pairs = [one.split() for one in hypers.split(", ")]
        defaults |= {rule: [(name, float(value)) for name, value in pairs] for rule in names(rules_of)}
    assert defaults == {
        name: [(hyper.name, hyper.default) for hyper in rule.hypers] for name, rule in numerics.rules().items()
    }
    built = [one for row in table("What is built") for one in itertools.product(*(sorted(names(cell)) for cell in row))]
    assert sorted(built) == sorted(KERNELS)
    for kind, heading in (("master", "Master formats"), ("state", "State formats"), ("wire", "Wire formats")):
        written = [name for row in table(heading) for name in names(row[0])]
        found = [form.name for form in numerics.formats() if form.kind == kind]
        assert sorted(written) == sorted(found)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize(("rule", "master", "state"), EXACT)
def test_every_kernel_does_what_is_written(rule: str, master: str, state: str, rounding: str) -> None:
    hyper = {one.name: one.default for one in numerics.rules()[rule].hypers} | HYPER[rule]
    weight, moments = numerics.encode(normals(9), master), numerics.new_state(rule, SHAPE, master, state)
    tensor = rules.new_tensor(master, state, formats.load(master, padded(normals(9))), shapes_of(moments, state), N)
    same_tensor(tensor, weight, moments, "before")
    for t, run_step in STEPS.items():
        how = {"rounding": rounding, "key": KEY, "run_step": run_step, "grad_scale": 0.7, "statistics": "full"}
        done = numerics.step(rule, weight, gradient(t - 1), moments, hyper, t, **how)
        with np.errstate(over="ignore"):
            g = padded(gradient(t - 1)) * np.float32(0.7)
        wanted = rules.update(rule, hyper, t, g, tensor, KEY, run_step, rounding == "stochastic")
        same_tensor(tensor, weight, moments, f"after {t}")
        assert {name: getattr(done.statistics, name) for name in wanted} == wanted, f"after {t}"
        assert t == 1 or done.statistics.rejected >= 2


@pytest.mark.parametrize("form", ["bf16", "fp16", "fp8-e5m2"])
def test_gradients_are_decoded_as_written(form: str) -> None:
    half = normals(1).astype(np.float16)
    payload, exact = {
        "bf16": (formats.to_bf16(normals(1)), formats.bf16(normals(1))),
        "fp16": (half, half.astype(np.float32)),
        "fp8-e5m2": (
            (half.view(np.uint16) >> 8).astype(np.uint8),
            (half.view(np.uint16) & 0xFF00).view(np.float16).astype(np.float32),
        ),
    }[form]
    one = numerics.step("lion", normals(0), payload, grad_format=form, grad_scale=0.3)
    other = numerics.step("lion", normals(0), exact, grad_scale=0.3)
    for name, plane in one.state["momentum"].planes.items():
        same_bits(plane, other.state["momentum"].planes[name], name)


def adversarial() -> np.ndarray:
    """Blocks of every size, subnormals, zeros of both signs."""
    x = normals(3) * np.exp2(np.arange(N) // 32 % 250 - 140.0).reshape(SHAPE).astype(np.float32)
    x.flat[64:96] = 0
    x.flat[70] = -0.0
    x.flat[96:128] = np.float32(1e-42)
    return x


@pytest.mark.parametrize("master", [form.name for form in numerics.formats() if form.kind == "master"])
def test_masters_are_loaded_and_decoded_as_written(master: str) -> None:
    x = adversarial()
    x.flat[:4] = np.float32(3.4028235e38), np.float32(-3.4028235e38), np.float32(3.39e38), 1.00390625
    ours, theirs = formats.load(master, padded(x)), numerics.encode(x, master)
    for plane, (name, wanted) in zip(ours, theirs.planes.items(), strict=True):
        same_bits(plane, wanted, name)
    decoded = formats.MASTERS[master].decode(ours)[:N]
    same_bits(decoded.astype(np.float32), numerics.decode(theirs).ravel(), "decoded")


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("slot", ["momentum", "variance"])
@pytest.mark.parametrize("state", [form.name for form in numerics.formats() if form.kind == "state"])
def test_moments_are_encoded_and_decoded_as_written(state: str, slot: str, rounding: str) -> None:
    i = ("momentum", "variance").index(slot)
    form, x = formats.slots(state)[i], adversarial()
    if i:
        x = np.abs(x)
    if state == "flash8":
        x = np.clip(x, -60000, 60000)
    theirs = numerics.encode(x, state, slot, rounding, KEY)
    word = formats.random_words(KEY, padded(x).size).x  # a codec's key is the update's, mixed with its step
    random = (word & 0xFFFF, word >> 16)[i] if rounding == "stochastic" and state != "mcf" else None
    with np.errstate(all="ignore"):
        values = np.sqrt(padded(x)) if i and form.root else padded(x)
        ours = form.load(values) if state == "mcf" and i else form.encode(values, random)
        decoded = form.decode(ours)[:N]
    for plane, (name, wanted) in zip(ours, theirs.planes.items(), strict=True):
        same_bits(plane, wanted, name)
    same_bits(decoded.astype(np.float32), numerics.decode(theirs).ravel(), "decoded")


@pytest.mark.parametrize("form", ["int8-row", "int8-tensor"])
def test_int8_is_served_and_decoded_as_written(form: str) -> None:
    x = normals(4)
    x[3] = 0
    x[4, :3] = 127, 0.5, 1.5  # ties
    theirs = numerics.encode(x, form)
    codes, scales = formats.int8(x, SHAPE[1] if form == "int8-row" else N)
    same_bits(codes.ravel(), theirs.planes["codes"].ravel(), "codes")
    same_bits(scales, theirs.planes["scales"].ravel(), "scales")
    decoded = (codes.astype(np.float32) * scales[:, None]) / np.float32(127)
    same_bits(decoded.ravel(), numerics.decode(theirs).ravel(), "decoded")


def test_small_floats_are_served_as_written() -> None:
    x = np.clip(normals(5) * np.exp2(np.arange(N) % 40 - 28.0).reshape(SHAPE).astype(np.float32), -60000, 60000)
    same_bits(formats.e4m3(x).ravel(), numerics.encode(x, "fp8-e4m3").planes["codes"].ravel(), "fp8-e4m3")
    same_bits(x.astype(np.float16).ravel(), numerics.encode(x, "fp16").planes["codes"].ravel(), "fp16")
    largest = numerics.encode(np.full(3, -1e30, np.float32), "fp16").planes["codes"]
    assert (largest == np.float16(-65504)).all()
