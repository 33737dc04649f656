"""ballast.numerics.step: every compiled triple takes steps, in place, repeatably; mistakes are named."""

from __future__ import annotations

import numpy as np
import pytest

from ballast import numerics

KERNELS = [(kernel.rule, kernel.master, kernel.state) for kernel in numerics.kernels()]
SHAPE = (40, 150)  # a full tile and a ragged one


def normals(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def steps(rule: str, master: str, state: str, count: int = 5, **kwargs) -> numerics.Step:
    """`count` steps from the same weights with the same gradients."""
    done = numerics.step(rule, normals(0), normals(1), t=1, master=master, state_format=state, **kwargs)
    for t in range(2, count + 1):
        done = numerics.step(rule, done.weight, normals(t), done.state, t=t, **kwargs)
    return done


def planes(done: numerics.Step) -> list[np.ndarray]:
    return [plane for one in (done.weight, *done.state.values()) for plane in one.planes.values()]


def test_the_registry_is_whole() -> None:
    assert {kernel.rule for kernel in numerics.kernels()} == set(numerics.rules())
    assert {kernel.master for kernel in numerics.kernels()} <= {form.name for form in numerics.formats()}
    assert numerics.isa() in ("scalar", "avx2", "avx512")
    sizes = {(k.rule, k.master, k.state): k.bytes_per_parameter for k in numerics.kernels()}
    assert sizes["adamw", "split24", "companded8"] == 5.125
    assert sizes["adamw", "fp32", "fp32"] == 12
    assert sizes["lion", "split24", "companded8"] == 4.0625
    assert sizes["collage_plus", "mcf", "mcf"] == 10
    assert [rule.name for rule in numerics.rules().values() if rule.passes == 2] == ["stable_adamw", "muon"]


@pytest.mark.parametrize(("rule", "master", "state"), KERNELS)
def test_every_triple_steps(rule: str, master: str, state: str) -> None:
    done = steps(rule, master, state, hyper={"lr": 0.01}, statistics="full")
    weight = numerics.decode(done.weight)
    assert weight.shape == SHAPE and np.isfinite(weight).all()
    moved = np.abs(weight - normals(0))
    assert 0.001 < moved.mean() < 0.1
    s = done.statistics
    assert s.n == weight.size and s.full and s.nonfinite == s.rejected == 0
    assert s.grad_sq == pytest.approx(float(np.sum(normals(5) ** 2)), rel=0.01)  # Collage rounds gradients to bf16
    assert (s.rms > 0) == numerics.rules()[rule].has_rms


@pytest.mark.parametrize(("rule", "master", "state"), KERNELS)
def test_the_same_inputs_give_the_same_bits(rule: str, master: str, state: str) -> None:
    once, again = (steps(rule, master, state, key=7) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(planes(once), planes(again), strict=True))


def test_the_bits_depend_on_key_and_step_where_rounding_is_stochastic() -> None:
    base = planes(steps("adamw", "split24", "companded8"))

    def same(**kwargs) -> bool:
        return all(
            np.array_equal(a, b) for a, b in zip(base, planes(steps("adamw", "split24", "companded8", **kwargs)))
        )

    assert same(key=0) and not same(key=1) and not same(run_step=100)
    nearest = [planes(steps("adamw", "split24", "companded8", rounding="nearest", key=key)) for key in (0, 1)]
    assert all(np.array_equal(a, b) for a, b in zip(*nearest))


def test_the_level_of_statistics_changes_no_weight() -> None:
    off, core, full = (steps("adamw", "split24", "companded8", statistics=s) for s in ("off", "core", "full"))
    for other in (core, full):
        assert all(np.array_equal(a, b) for a, b in zip(planes(off), planes(other)))
    assert off.statistics.update_sq == 0 and core.statistics.update_sq > 0
    assert core.statistics.weight_sq == 0 and full.statistics.weight_sq > 0
    assert full.statistics.edq == pytest.approx(1, abs=0.01)


def test_an_encoded_weight_and_its_state_are_updated_in_place() -> None:
    weight = numerics.encode(normals(0), "split24")
    state = numerics.new_state("adamw", SHAPE)
    before, kept = weight.copy(), weight.planes["weight.hi"]
    done = numerics.step("adamw", weight, normals(1), state, {"lr": 0.01})
    assert done.weight is weight and weight.planes["weight.hi"] is kept
    assert done.state["variance"] is state["variance"] and state["variance"].planes["variance"].any()
    assert not np.array_equal(numerics.decode(weight), numerics.decode(before))


def test_an_array_is_not_changed() -> None:
    weights, kept = normals(0), normals(0)
    numerics.step("adamw", weights, normals(1), master="fp32", state_format="fp32")
    assert np.array_equal(weights, kept)


def test_the_first_adamw_step_is_the_formula() -> None:
    w, g = normals(0), normals(1)
    hyper = {"lr": 0.01, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    done = numerics.step("adamw", w, g, hyper=hyper, master="fp32", state_format="fp32")
    wanted = w * (1 - 0.01 * 0.1) - 0.01 * g / (np.abs(g) + 1e-8)
    assert np.allclose(numerics.decode(done.weight), wanted, rtol=0, atol=1e-6)
    assert np.allclose(numerics.decode(done.state["momentum"]), 0.1 * g, rtol=1e-6)
    assert np.allclose(numerics.decode(done.state["variance"]), 0.001 * g**2, rtol=1e-6)


@pytest.mark.parametrize("form", ["bf16", "fp16", "fp8-e5m2"])
def test_gradients_come_in_wire_formats(form: str) -> None:
    exact = np.rint(np.clip(normals(1), -3, 3)).astype(np.float32)  # small integers: every format holds them
    half = exact.astype(np.float16)
    payloads = {
        "bf16": (exact.view(np.uint32) >> 16).astype(np.uint16),
        "fp16": half,
        "fp8-e5m2": (half.view(np.uint16) >> 8).astype(np.uint8),
    }
    told = numerics.step("adamw", normals(0), exact)
    done = numerics.step("adamw", normals(0), payloads[form], grad_format=form)
    assert all(np.array_equal(a, b) for a, b in zip(planes(told), planes(done)))
    scaled = numerics.step("adamw", normals(0), exact * 8, grad_scale=0.125)
    assert all(np.array_equal(a, b) for a, b in zip(planes(told), planes(scaled)))


@pytest.mark.parametrize(("rule", "master", "state"), KERNELS)
def test_a_gradient_that_is_not_finite_leaves_its_block_alone(rule: str, master: str, state: str) -> None:
    done = steps(rule, master, state)
    before = [plane.copy() for plane in planes(done)]
    grad = normals(9)
    grad.flat[5], grad.flat[70], grad.flat[71] = np.nan, np.inf, -np.inf
    statistics = numerics.step(rule, done.weight, grad, done.state, t=6).statistics
    assert statistics.nonfinite == 3 and statistics.rejected >= 2
    for old, new in zip(before, planes(done), strict=True):
        if old.size >= 6000:
            assert np.array_equal(old[:32], new[:32]) and np.array_equal(old[64:96], new[64:96])
    assert np.isfinite(numerics.decode(done.weight)).all()


def test_keys_are_those_of_the_daemon() -> None:
    """xxh3_64 with seeds 0 and 1; the daemon mixes the run's step into it."""
    assert numerics.tensor_key("layers.0.weight") == numerics.tensor_key("layers.0.weight", 0)
    assert numerics.tensor_key("layers.0.weight", 1) != numerics.tensor_key("layers.0.weight", 0)
    assert numerics.tensor_key("") == 0x2D06800538D394C2  # xxHash's own test vector


def test_the_documentations_example_runs() -> None:
    lines = [line for line in (numerics.__doc__ or "").splitlines() if line.startswith("    ")]
    exec("\n".join(line[4:] for line in lines), {"moments": normals(0), "weights": normals(1), "gradient": normals(2)})
    assert len(lines) > 5


# --- mistakes -------------------------------------------------------------------------------------------------------


def step(rule: str = "adamw", weight=None, grad=None, **kwargs) -> numerics.Step:
    return numerics.step(rule, normals(0) if weight is None else weight, normals(1) if grad is None else grad, **kwargs)


def hyper(**values: float) -> dict:
    return {"hyper": values}


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"rule": "adamv"}, "no rule is named 'adamv': there are adam, adamw"),
        ({"master": "split25"}, "no master format is named 'split25': there are bf16"),
        ({"state_format": "int4"}, "no state format is named 'int4': there are bf16"),
        ({"rule": "collage_plus"}, r"collage_plus is not compiled for split24 \+ companded8: there are mcf \+ mcf"),
        (hyper(momentum=0.9), "adamw has no hyperparameter 'momentum': it has lr, weight_decay"),
        (hyper(lr=float("nan")), "lr is nan"),
        (hyper(lr=-1), "lr is -1.0"),
        (hyper(lr=float("inf")), "lr is inf"),
        (hyper(eps=0), r"eps is 0.0: wanted a number in \(0"),
        (hyper(eps=-1e-8), "eps is -1e-08"),
        (hyper(beta1=1.0), r"beta1 is 1.0: wanted a number in \[0, 1\)"),
        (hyper(beta2=-0.1), "beta2 is -0.1"),
        ({"t": 0}, "t is 0: wanted an integer from 1"),
        ({"t": 1.5}, "t is 1.5"),
        ({"run_step": -1}, "run_step is -1: wanted an integer from 0"),
        ({"key": -1}, "key is -1"),
        ({"key": 2**64}, "key is 18446744073709551616"),
        ({"rounding": "up"}, "rounding is 'up': wanted 'nearest' or 'stochastic'"),
        ({"statistics": "some"}, "statistics is 'some'"),
        ({"grad_scale": float("nan")}, "grad_scale is nan"),
        ({"grad_format": "int8-row"}, "no format of a gradient is named 'int8-row': there are bf16, fp16"),
        ({"weight": normals(0).astype(np.float64)}, "weight has dtype float64: wanted float32"),
        ({"weight": np.full(SHAPE, np.nan, np.float32)}, "weight: element 0 is nan, not finite"),
        ({"grad": normals(1).astype(np.float16)}, "grad has dtype float16: wanted float32"),
        ({"grad": normals(1, (6000,))}, r"grad has shape \(6000,\): the weight's is \(40, 150\)"),
        ({"state": numerics.new_state("adamw", (3,))}, r"state\['momentum'\] is momentum of shape \(3,\)"),
        ({"state": numerics.new_state("sgd", SHAPE)}, r"state has slots \['momentum'\]: adamw has"),
        ({"state": {}}, r"state is in formats \[\]"),
        ({"weight": numerics.encode(normals(0), "int8-row")}, "no master format is named 'int8-row'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_named(kwargs: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        step(**kwargs)


def test_a_plane_of_another_dtype_or_place_is_refused() -> None:
    weight = numerics.encode(normals(0), "fp32")
    off = np.zeros(6144 + 1, np.float32)[1:]
    for plane in (weight.planes["weight"].astype(np.float64), weight.planes["weight"][:6000]):
        with pytest.raises(ValueError, match=r"plane 'weight' is to be float32\[6144\]"):
            step(weight=numerics.Encoded("fp32", "weight", SHAPE, {"weight": plane}), state_format="fp32")
    if off.ctypes.data % 64:
        with pytest.raises(ValueError, match="not aligned to 64 bytes"):
            step(weight=numerics.Encoded("fp32", "weight", SHAPE, {"weight": off}), state_format="fp32")
