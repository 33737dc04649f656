"""The state formats under gradients made for the purpose: noise, noise that halves, outliers, tiny values, zeros.

Every function is one cell of study.py: it runs the daemon's AdamW through ballast.numerics and returns figures
that fit into JSON.
"""

from __future__ import annotations

import numpy as np
from ballast import numerics

BLOCK = 32
LR = 1e-3


def start(
    n: int, state: str, variance: np.ndarray | None = None
) -> tuple[numerics.Encoded, dict[str, numerics.Encoded]]:
    """Zero weights in fp32 and zero moments, or this variance."""
    weight = numerics.encode(np.zeros(n, np.float32), "fp32")
    moments = numerics.new_state("adamw", (n,), "fp32", state)
    if variance is not None:
        moments["variance"] = numerics.encode(variance.astype(np.float32), state, slot="variance")
    return weight, moments


def narrow_weights(deviation: float) -> dict:
    """Of formats of 2 and 3 bytes, sum (decoded - x)^2 / sum x^2 for weights from N(0, deviation^2), nearest. "e4m3 +
    e4m3" is the pair that mcf8 is not."""
    x = (deviation * np.random.default_rng(1).standard_normal(1 << 20)).astype(np.float32)

    def kept(values: np.ndarray, form: str) -> np.ndarray:
        return numerics.decode(numerics.encode(values, form))

    hi = kept(x, "fp8-e4m3")
    decoded = {form: kept(x, form) for form in ("split24", "mcf8", "bf16")} | {
        "e4m3 + e4m3": hi + kept(x - hi, "fp8-e4m3")
    }
    total = float(np.sum(x.astype(np.float64) ** 2))
    return {form: float(np.sum((y.astype(np.float64) - x) ** 2)) / total for form, y in decoded.items()}


def steady_variance(random: np.random.Generator, n: int, beta2: float) -> np.ndarray:
    """v after long noise of variance 1: its own noise has this deviation."""
    deviation = np.sqrt(2 * (1 - beta2) / (1 + beta2))
    return np.maximum(0.05, 1 + deviation * random.standard_normal(n)).astype(np.float32)


def drift(state: str, rounding: str, kind: str, beta2: float, steps: int, seed: int) -> dict:
    """Mean v over the exact mean, every 50 steps.

    kind: "from zero" is noise of deviation 1 from zero moments, as training starts. "halved" is noise of deviation 1/2
    from the steady state of deviation 1. "halved from 1" is the same from v = 1 in every element.
    """
    n = 128 * BLOCK
    random = np.random.default_rng(seed)
    deviation = 1.0 if kind == "from zero" else 0.5
    pool = (deviation * random.standard_normal(1 << 20)).astype(np.float32)
    initials = {"from zero": None, "halved": steady_variance(random, n, beta2), "halved from 1": np.ones(n, np.float32)}
    weight, moments = start(n, state, initials[kind])
    exact = np.zeros(n) if initials[kind] is None else initials[kind].astype(np.float64)
    hyper = {"lr": 0.0, "beta2": beta2, "weight_decay": 0.0}
    curve = []
    for t in range(1, steps + 1):
        first = int(random.integers(len(pool) - n))
        grad = pool[first : first + n]
        numerics.step("adamw", weight, grad, moments, hyper, t, rounding=rounding, key=seed, statistics="off")
        exact = beta2 * exact + (1 - beta2) * grad.astype(np.float64) ** 2
        if t % 50 == 0:
            stored = numerics.decode(moments["variance"]).astype(np.float64)
            curve.append([t, float(stored.mean() / exact.mean())])
    return {"curve": curve, "ratio": curve[-1][1], "exact": float(exact.mean())}


def outlier(state: str, rounding: str, at: int) -> dict:
    """One element of each block sees g = 1 at step `at`, all else is 1e-4; from 400 steps later all gradients are 0.

    Sizes of updates, in lr, over the other elements.
    """
    n = 64 * BLOCK
    quiet = np.full(n, 1e-4, np.float32)
    loud = quiet.copy()
    loud[::BLOCK] = 1
    zero = np.zeros(n, np.float32)
    others = np.arange(n) % BLOCK != 0
    weight, moments = start(n, state)
    hyper = {"lr": LR, "weight_decay": 0.0}
    before = numerics.decode(weight).copy()
    rms, largest = [], []
    for t in range(1, at + 900):
        grad = loud if t == at else quiet if t < at + 400 else zero
        numerics.step("adamw", weight, grad, moments, hyper, t, rounding=rounding, key=at, statistics="off")
        after = numerics.decode(weight)
        moved = np.abs(after - before)[others].astype(np.float64) / LR
        rms.append(float(np.sqrt(np.mean(moved**2))))
        largest.append(float(moved.max()))
        before = after
    return {"rms": max(rms), "largest": max(largest), "curve": [float(f"{x:.4g}") for x in rms]}


def scaled(state: str, rounding: str, scale: float, steps: int, seed: int) -> dict:
    """Noise around a fixed direction, all times `scale`, eps far below it; every third gradient is exactly 0.

    `distance`: how far from fp32's weights, over the way that fp32's have gone. `moved`: the farthest that a weight
    without a gradient has gone.
    """
    n = 64 * BLOCK
    random = np.random.default_rng(seed)
    direction = 0.1 * random.standard_normal(n)
    runs = {"studied": start(n, state), "fp32": start(n, "fp32")}
    hyper = {"lr": LR, "weight_decay": 0.0, "eps": 1e-4 * scale}
    exact, largest = np.zeros(n), 0.0
    live = np.arange(n) % 3 != 0
    for t in range(1, steps + 1):
        grad = (scale * live * (direction + random.standard_normal(n))).astype(np.float32)
        before = numerics.decode(runs["studied"][0])
        for weight, moments in runs.values():
            numerics.step("adamw", weight, grad, moments, hyper, t, rounding=rounding, key=seed, statistics="off")
        exact = 0.999 * exact + 0.001 * (grad.astype(np.float64) / scale) ** 2
        largest = max(largest, float(np.abs(numerics.decode(runs["studied"][0]) - before).max()) / LR)
    weights = {name: numerics.decode(weight).astype(np.float64) for name, (weight, _) in runs.items()}
    variance = numerics.decode(runs["studied"][1]["variance"]).astype(np.float64) / scale**2
    return {
        "ratio": float(variance[live].mean() / exact[live].mean()),
        "largest": largest,
        "distance": float(np.linalg.norm(weights["studied"] - weights["fp32"]) / np.linalg.norm(weights["fp32"])),
        "moved": float(np.abs(weights["studied"][~live]).max() / LR),
    }
