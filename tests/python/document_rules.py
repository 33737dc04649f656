"""kernels/NUMERICS.md written once more, from its text alone, in numpy: the rules, what is rejected, statistics.

Shares nothing with kernels/. Each rule takes hyperparameters, t, the gradient, the weight and the slots, and gives what
is wanted of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from document_formats import BOUND, MASTERS, Array, F, Planes, bf16, bits, by_block, f32, fma, from_bf16, magnitude
from document_formats import most, random_bits, slots, tile_sums, total, value

Hyper = Mapping[str, float]
LEAST = 2.0**-126


@dataclass
class Wanted:
    weight: Any
    slots: list[Array]
    d: Array
    rms: Array | None = None
    low: Array | None = None  # of a weight of two


@dataclass
class Tensor:
    """A tensor's planes, as stored."""

    master: str
    state: str
    weight: Planes
    slots: list[Planes]
    n: int
    largest_v: int = 0


# --- Hyperparameters ------------------------------------------------------------------------------------------------


def power(b: float, t: int) -> float:
    r = 1.0
    while t > 0:
        if t & 1:
            r *= b
        t >>= 1
        b *= b
    return r


def eps_of(h: Hyper) -> tuple[F, F]:
    return max(F(h["eps"]), F(LEAST)), max(F(h["eps"] * h["eps"]), F(LEAST))


def decay_of(h: Hyper) -> float:
    lr, wd, peak = h["lr"], h["weight_decay"], h.get("lr_peak", 0)
    return wd * lr / peak if peak > 0 else lr * wd


def decoupled(x: Array, u: Array, minus_a: F, e: F) -> tuple[Array, Array]:
    d = fma(minus_a, u, x * e)
    return x + d, d


# --- Rules ----------------------------------------------------------------------------------------------------------


def adam(h: Hyper, t: int, g0: Array, x: Array, old: list[Array], is_decoupled: bool) -> Wanted:
    b1, b2, c1, c2 = F(h["beta1"]), F(h["beta2"]), F(1 - h["beta1"]), F(1 - h["beta2"])
    debias = 1 - power(h["beta2"], t)
    minus_a, q = F(-h["lr"] / (1 - power(h["beta1"], t))), F(1 / math.sqrt(debias))
    g = g0 if is_decoupled else fma(F(h["weight_decay"]), x, g0)
    m = fma(b1, old[0], c1 * g)
    v = fma(b2, old[1], c2 * (g * g))
    r = F(1) / fma(np.sqrt(v), q, eps_of(h)[0])
    u = m * r
    if is_decoupled:
        new, d = decoupled(x, u, minus_a, F(-decay_of(h)))
    else:
        new, d = x + minus_a * u, minus_a * u
    return Wanted(new, [m, v], d, (g0 * r) * (g0 * r))


def stable_adamw(h: Hyper, t: int, g: Array, x: Array, old: list[Array], tensor: Tensor) -> Wanted:
    b1, b2 = (h[b] * (1 - power(h[b], t - 1)) / (1 - power(h[b], t)) for b in ("beta1", "beta2"))
    peak = h["lr_peak"]
    lr, w = float(F(h["lr"])), float(F(h["weight_decay"] / peak if peak > 0 else h["weight_decay"]))
    eps, eps2 = eps_of(h)
    v = fma(F(b2), old[1], F(1 - b2) * (g * g))
    term = (g * g) / most(v, eps2)
    bad = ~np.isfinite(by_block(g)).all(axis=1) | (magnitude(by_block(v)) > tensor.largest_v).any(axis=1)
    counted = np.where(bad[:, None], F(0), by_block(term)).ravel()
    rms = math.sqrt(sum(tile_sums(counted), 0.0) / tensor.n)
    now = lr / (rms if rms > 1 else 1.0)
    m = fma(F(b1), old[0], F(1 - b1) * g)
    u = m / (np.sqrt(v) + eps)
    new, d = decoupled(x, u, F(-now), F(-(now * w)))
    return Wanted(new, [m, v], d, term)


def sgd(h: Hyper, t: int, g: Array, x: Array, old: list[Array], is_decoupled: bool) -> Wanted:
    mu = 0 if t == 1 else h["momentum"]
    c = 1 if mu == 0 else 1 - h["dampening"]
    p, q = (h["momentum"], 1) if h["nesterov"] > 0 else (1, 0)
    if not is_decoupled:
        g = fma(F(h["weight_decay"]), x, g)
    b = fma(F(mu), old[0], F(c) * g)
    u = fma(F(p), b, F(q) * g)
    if is_decoupled:
        new, d = decoupled(x, u, F(-h["lr"]), F(-decay_of(h)))
    else:
        new, d = x + F(-h["lr"]) * u, F(-h["lr"]) * u
    return Wanted(new, [b], d)


def lion(h: Hyper, t: int, g: Array, x: Array, old: list[Array]) -> Wanted:
    z = fma(F(h["beta1"]), old[0], F(1 - h["beta1"]) * g)
    u = np.where(np.abs(z) > 0, np.copysign(F(1), z), F(0))
    m = fma(F(h["beta2"]), old[0], F(1 - h["beta2"]) * g)
    new, d = decoupled(x, u, F(-h["lr"]), F(-decay_of(h)))
    return Wanted(new, [m], d)


def narrow(x: float) -> F:
    """A double to bf16 at once, ties to even."""
    if x == 0:
        return F(0)
    spacing = math.ldexp(1.0, max(math.frexp(x)[1] - 1, -126) - 7)
    return F(round(x / spacing) * spacing)


def two(a: Array, b: Array) -> tuple[Array, Array]:
    s = bf16(a + b)
    return s, bf16(b - bf16(s - a))


def grow(a: Array, low: Array, d: Array) -> tuple[Array, Array]:
    s, e = two(a, d)
    return two(s, bf16(low + e))


def product(a: Array, low: Array, b: F, b_low: F) -> tuple[Array, Array]:
    p = bf16(a * b)
    e = bf16(fma(a, b, -p))
    return two(p, bf16(bf16(bf16(low * b) + bf16(a * b_low)) + e))


def collage(h: Hyper, t: int, g: Array, x: Array, old: list[Array], low: Array, plus: bool) -> Wanted:
    b1, c1, b2, c2 = (narrow(y) for y in (h["beta1"], 1 - h["beta1"], h["beta2"], 1 - h["beta2"]))
    b2_low = narrow(h["beta2"] - float(b2))
    k1, k2 = (narrow(1 - power(h[b], t)) for b in ("beta1", "beta2"))
    eps, minus_lr, wd = max(narrow(h["eps"]), F(LEAST)), narrow(-h["lr"]), narrow(h["weight_decay"])
    g_narrow = bf16(g)
    m = bf16(bf16(b1 * old[0]) + bf16(c1 * g_narrow))
    w = bf16(c2 * bf16(g_narrow * g_narrow))
    if plus:
        v, v_low = grow(*product(old[1], old[2], b2, b2_low), w)
        wanted = [m, most(v, F(0)), v_low]
    else:
        wanted = [m, bf16(bf16(b2 * old[1]) + w)]
    hat = bf16(wanted[1] / k2)
    u = bf16(bf16(m / k1) / bf16(bf16(np.sqrt(hat)) + eps))
    d = bf16(minus_lr * bf16(u + bf16(wd * x)))
    new, new_low = grow(x, low, d)
    return Wanted(new, wanted, d, (g * g) / most(hat, eps_of(h)[1]), new_low)


# --- The update -----------------------------------------------------------------------------------------------------


def new_tensor(master: str, state: str, weight: Planes, shapes: list[list[tuple[int, Any]]], n: int) -> Tensor:
    """State of zeros; shapes: (length, dtype) of each plane of each slot."""
    tensor = Tensor(master, state, weight, [[np.zeros(*plane) for plane in slot] for slot in shapes], n)
    if len(shapes) > 1:
        form = slots(state)[1]
        bound = value(np.array([form.last[1]], np.uint32))
        tensor.largest_v = int(bits(bound * bound)[0]) if form.root else form.last[1]
    return tensor


def want(rule: str, h: Hyper, t: int, g: Array, tensor: Tensor) -> Wanted:
    x = MASTERS[tensor.master].decode(tensor.weight)
    old = [form.decode(planes) for form, planes in zip(slots(tensor.state), tensor.slots)]
    if rule.startswith("collage"):
        hi, low = (from_bf16(plane) for plane in tensor.weight)
        return collage(h, t, g, hi, old, low, rule == "collage_plus")
    rules: dict[str, Callable[[], Wanted]] = {
        "adam": lambda: adam(h, t, g, x, old, False),
        "adamw": lambda: adam(h, t, g, x, old, True),
        "stable_adamw": lambda: stable_adamw(h, t, g, x, old, tensor),
        "sgd": lambda: sgd(h, t, g, x, old, False),
        "sgdw": lambda: sgd(h, t, g, x, old, True),
        "lion": lambda: lion(h, t, g, x, old),
    }
    return rules[rule]()


def rejected_blocks(g: Array, wanted: Wanted, encoded: list[Array], forms: list[Any], master: str) -> Array:
    """By block of 32."""
    largest = min(BOUND, MASTERS[master].largest)
    bad = ~np.isfinite(by_block(g)).all(axis=1) | (magnitude(by_block(wanted.weight)) > largest).any(axis=1)
    for i, (x, form) in enumerate(zip(encoded, forms)):
        bad |= (magnitude(by_block(x)) > form.last[i]).any(axis=1)
    if any(getattr(form, "block", 0) == 256 for form in forms):
        bad = np.repeat(bad.reshape(-1, 8).any(axis=1), 8)
    return bad


def keep(old: Array, new: Array, bad: Array) -> Array:
    """The old words of a plane where blocks are bad."""
    per = bad.size * 32 // old.size  # elements a word
    mask = np.repeat(bad, 32 // per) if per <= 32 else bad.reshape(-1, per // 32).any(axis=1)
    return np.where(mask, old, new)


def update(
    rule: str, h: Hyper, t: int, g: Array, tensor: Tensor, key: int, run_step: int, stochastic: bool
) -> dict[str, float]:
    """In place, on a gradient that is padded with zeros. Returns full statistics."""
    with np.errstate(all="ignore"):
        wanted = want(rule, h, t, g, tensor)
        inside = np.arange(g.size) < tensor.n
        forms = slots(tensor.state)[: len(wanted.slots)]
        encoded = [np.sqrt(x) if form.root and i == 1 else x for i, (x, form) in enumerate(zip(wanted.slots, forms))]
        for array in (wanted.weight, wanted.d, wanted.low, wanted.rms, *encoded):
            if array is not None:
                array[~inside] = 0
        bad = rejected_blocks(g, wanted, encoded, forms, tensor.master)
        random = random_bits(key, run_step, g.size)
        own = [random.x & 0xFFFF, random.x >> 16, None]
        master = MASTERS[tensor.master]
        kept = np.repeat(bad, 32)
        whole = wanted.weight if wanted.low is None else (wanted.weight, wanted.low)
        made = master.encode(whole, random.y if stochastic else None)
        before, tensor.weight = tensor.weight, [keep(a, b, bad) for a, b in zip(tensor.weight, made)]
        exact = tensor.state == "mcf"  # its rule has rounded
        for i, (form, x) in enumerate(zip(forms, encoded)):
            x = np.where(kept, F(0), x)
            made = form.encode(x, own[i] if stochastic and not exact else None)
            tensor.slots[i] = [keep(a, b, bad) for a, b in zip(tensor.slots[i], made)]
        return statistics_of(g, wanted, kept, inside, before, tensor, forms)


def statistics_of(
    g: Array, wanted: Wanted, kept: Array, inside: Array, before: Planes, tensor: Tensor, forms: list[Any]
) -> dict[str, float]:
    live, master = ~kept, MASTERS[tensor.master]
    g2, d = np.where(live, g * g, F(0)), np.where(live, wanted.d, F(0))
    rms = f32([0]) if wanted.rms is None else np.where(live, wanted.rms, F(0))
    old = master.decode(before)
    if len(before) == 2 and tensor.master == "mcf":
        hi, low = (from_bf16(b) - from_bf16(a) for a, b in zip(before, tensor.weight))
        change, hi_change = hi + low, hi
    else:
        change = hi_change = master.decode(tensor.weight) - old
    same = [a == b for a, b in zip(before, tensor.weight)]
    if tensor.master == "mcf8":  # two pairs may stand for one value
        same = [old == master.decode(tensor.weight)]
    counted = live & inside
    hi_same = same[0] if tensor.master == "mcf" else np.logical_and.reduce(same)
    saturated = 0
    for form, planes in zip(forms, tensor.slots):
        codes = planes[0]
        if len(planes) == 2:
            top = np.abs(codes.astype(int)) == (127 if codes.dtype == np.int8 else 255)
        elif codes.dtype == np.uint16:
            top = codes & 0x7FFF == 0x7F7F
        else:
            top = magnitude(codes) == 0x7F7FFFFF
        saturated += int((top & live).sum())
    first_blocks = kept[::32][: -(-tensor.n // 32)]
    return {
        "grad_sq": total(g2),
        "update_sq": total(d * d),
        "rms_sq": total(rms),
        "grad_absmax": float(np.abs(g[np.isfinite(g)]).max()),
        "nonfinite": int((~np.isfinite(g)).sum()),
        "rejected": int(first_blocks.sum()),
        "weight_sq": total(np.where(live, old * old, F(0))),
        "stored_dot": total(np.where(live, d * change, F(0))),
        "hi_dot": total(np.where(live, d * hi_change, F(0))),
        "unchanged": int((np.logical_and.reduce(same) & counted).sum()),
        "hi_unchanged": int((hi_same & counted).sum()),
        "saturated": saturated,
    }
