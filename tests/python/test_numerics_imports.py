"""State of other libraries goes in and out with their own codes: FlashOptim's by its published formulas, written here in
numpy; bitsandbytes' by the library itself, where it is installed.

bitsandbytes is 125 MB, so it is not among the test packages: `pip install --no-deps bitsandbytes==0.50.2`. Its
quantizer and its AdamW8bit run on CPUs.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ballast import numerics


def values(spread: float = 2.0, n: int = 64 * 256) -> np.ndarray:
    """Normal numbers whose size varies from block to block by e^spread."""
    random = np.random.default_rng(3)
    sizes = np.repeat(np.exp(spread * random.standard_normal(n // 32)), 32)
    return (sizes * random.standard_normal(n)).astype(np.float32)


# --- FlashOptim -----------------------------------------------------------------------------------------------------


def flash_momentum(m: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, scales, decoded): z = m/A, y = 2z/(1+|z|), q = floor(127y + .5), and back."""
    blocks = m.reshape(-1, 32)
    absmax = np.maximum(np.abs(blocks).max(1, keepdims=True), np.float32(1e-12))
    z = blocks / absmax
    y = np.float32(2) * z / (np.float32(1) + np.abs(z))
    q = np.floor(np.float32(127) * y + np.float32(0.5))
    scale = absmax.astype(np.float16)
    back = q / np.float32(127)
    decoded = back / (np.float32(2) - np.abs(back)) * scale.astype(np.float32)
    return q.astype(np.int8).ravel(), scale.ravel(), decoded.ravel()


def flash_variance(v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, scales, decoded): r = sqrt(v), q = floor(255 r/A + .5), and back."""
    blocks = np.sqrt(v.reshape(-1, 32))
    absmax = np.maximum(blocks.max(1, keepdims=True), np.float32(1e-12))
    q = np.floor(blocks / absmax * np.float32(255) + np.float32(0.5))
    scale = absmax.astype(np.float16)
    decoded = (q / np.float32(255) * scale.astype(np.float32)) ** 2
    return q.astype(np.uint8).ravel(), scale.ravel(), decoded.ravel()


@pytest.mark.parametrize(("slot", "formula"), [("momentum", flash_momentum), ("variance", flash_variance)])
@pytest.mark.parametrize("size", [1.0, 1e-6, 0.0])
def test_flash8_is_the_published_formulas(slot: str, formula, size: float) -> None:
    x = values() * np.float32(size)
    x = x**2 if slot == "variance" else x
    codes, scales, decoded = formula(x)
    encoded = numerics.encode(x, "flash8", slot)
    different = encoded.planes[slot] != codes  # 255 r/A may be multiplied or divided first: halves fall either way
    assert np.mean(different) <= (1e-3 if slot == "variance" else 0)
    assert np.abs(encoded.planes[slot].astype(int) - codes).max() <= 1
    assert np.array_equal(encoded.planes[f"{slot}.scale"], scales)
    theirs = numerics.from_planes("flash8", slot, x.shape, {slot: codes, f"{slot}.scale": scales})
    assert np.allclose(numerics.decode(theirs), decoded, rtol=3e-7, atol=0)


def flash_weight(x: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bf16 bits, codes, decoded) in double precision: q = N(x - n)/h, halves away from zero, h = 2^(E(n) - 8)."""
    n = torch.from_numpy(x).bfloat16()
    bits = n.view(torch.int16).numpy().view(np.uint16)
    exact = n.double().numpy()
    h = 2.0 ** (np.maximum((bits >> 7) & 255, 1).astype(int) - 127 - 8)
    scaled = levels * (x.astype(np.float64) - exact) / h
    q = np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)
    return bits, q, exact + q / levels * h


@pytest.mark.parametrize(("form", "levels"), [("flash24", 127), ("flash32", 32767)])
def test_flash_weights_are_the_published_formulas(form: str, levels: int) -> None:
    x = values(spread=8.0)
    bits, codes, decoded = flash_weight(x, levels)
    encoded = numerics.encode(x, form)
    assert np.array_equal(encoded.planes["weight.hi"], bits)
    difference = np.abs(encoded.planes["weight.lo"] - codes)  # 32767 times a fraction is rounded in fp32 there
    assert difference.max() <= levels // 32767 and np.mean(difference) < 2e-3
    assert np.allclose(numerics.decode(encoded), decoded, rtol=2.4e-7, atol=0)


def test_flash_state_becomes_ours_and_goes_back() -> None:
    """By way of companded8, codes come back but for a few that move by one."""
    m = values()
    codes, scales, decoded = flash_momentum(m)
    theirs = numerics.from_planes("flash8", "momentum", m.shape, {"momentum": codes, "momentum.scale": scales})
    ours = numerics.convert(theirs, "companded8")
    moved = np.abs(numerics.decode(ours) - decoded).reshape(-1, 32).max(1)
    told = numerics.conversion_error("flash8", "companded8", "momentum")
    assert (moved <= told.max_of_block * np.abs(decoded).reshape(-1, 32).max(1)).all()
    back = numerics.convert(ours, "flash8")
    assert np.abs(back.planes["momentum"].astype(int) - codes).max() <= 1


# --- bitsandbytes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bnb():
    reason = (
        "bitsandbytes is not installed (125 MB; pip install --no-deps bitsandbytes): dynamic8 has no live peer here"
    )
    pytest.importorskip("bitsandbytes", reason=reason)
    import bitsandbytes.functional

    return bitsandbytes


@pytest.mark.parametrize("slot", ["momentum", "variance"])
def test_dynamic8s_map_is_bitsandbytes(bnb, slot: str) -> None:
    planes = {slot: np.arange(256, dtype=np.uint8), f"{slot}.scale": np.ones(1, np.float32)}
    ours = numerics.decode(numerics.from_planes("dynamic8", slot, (256,), planes))
    theirs = bnb.functional.create_dynamic_map(signed=slot == "momentum").numpy()
    assert np.abs(ours.view(np.int32) - theirs.view(np.int32)).max() <= 2  # units in the last place; most are equal


@pytest.mark.parametrize("slot", ["momentum", "variance"])
def test_dynamic8s_codes_are_bitsandbytes(bnb, slot: str) -> None:
    """Against its general quantizer, which is taken for doubles: nearest. The one that it has for fp32 on CPUs is not: it
    looks values up in a coarse table, so that those below 1e-5 of a block's largest become 1.6e-5 (0.50.2)."""
    x = values()
    x = x**2 if slot == "variance" else x
    code = bnb.functional.create_dynamic_map(signed=slot == "momentum")
    quantized, absmax = torch.ops.bitsandbytes.quantize_blockwise(torch.from_numpy(x).double(), code, 256)
    encoded = numerics.encode(x, "dynamic8", slot)
    assert np.array_equal(encoded.planes[f"{slot}.scale"], absmax.numpy())
    different = encoded.planes[slot] != quantized.numpy()  # 1/absmax multiplies there, absmax divides here
    assert np.mean(different) <= 1e-3
    planes = {slot: quantized.numpy(), f"{slot}.scale": absmax.numpy()}
    theirs = numerics.decode(numerics.from_planes("dynamic8", slot, x.shape, planes))
    wanted = code[quantized.long()].reshape(-1, 256) * absmax[:, None]
    assert np.allclose(theirs, wanted.ravel().numpy(), rtol=3e-7, atol=0)


def test_dynamic8_trains_as_bitsandbytes_adamw8bit_does(bnb) -> None:
    """Open loop: the same 50 gradients into both."""
    random, n = np.random.default_rng(5), 8192
    initial = random.standard_normal(n).astype(np.float32)
    parameter = torch.nn.Parameter(torch.tensor(initial))
    peer = bnb.optim.AdamW8bit([parameter], lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01)
    weight, state = numerics.encode(initial, "fp32"), numerics.new_state("adamw", (n,), "fp32", "dynamic8")
    hyper = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01}
    for t in range(1, 51):
        grad = random.standard_normal(n).astype(np.float32)
        parameter.grad = torch.from_numpy(grad)
        peer.step()
        numerics.step("adamw", weight, grad, state, hyper, t)
    ours, theirs = numerics.decode(weight), parameter.detach().numpy()
    assert np.linalg.norm(ours - theirs) <= 0.02 * np.linalg.norm(theirs - initial)
