"""FlashOptim's and bitsandbytes' 8-bit state, in and out, against their formulas written here once more in torch
alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ballast
from ballast.convert import VerifyFailed, convert, dynamic8
from ballast.convert.codes import decoded
from ballast.convert.lazy import LazyTensor, constant
from checkpoints import loaded, saved

LARGE = 3 * 4096 + 77  # elements: not a multiple of any block


def moments(numel: int = LARGE, seed: int = 3) -> tuple[Tensor, Tensor]:
    """A momentum and a variance whose sizes differ from block to block."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(2 * torch.randn(-(-numel // 32), generator=generator)).repeat_interleave(32)[:numel]
    m = sizes * torch.randn(numel, generator=generator)
    return m, (sizes * torch.randn(numel, generator=generator)).square()


def blocks(x: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % size)).reshape(-1, size)


# --- FlashOptim: q = round(127 * 2z / (1 + |z|)) of z = m / max |m|; q = round(255 * sqrt(v) / max sqrt(v)) ----------


def flash_encode(x: Tensor, variance: bool) -> tuple[Tensor, Tensor]:
    groups = blocks(x.sqrt() if variance else x, 32)
    largest = groups.abs().amax(1, keepdim=True).clamp(min=1e-12)
    z = groups / largest
    y = z if variance else 2 * z / (1 + z.abs())
    codes = torch.floor((255 if variance else 127) * y + 0.5).reshape(-1)[: x.numel()]
    return codes.to(torch.uint8 if variance else torch.int8).reshape(x.shape), largest.reshape(-1).half()


def flash_decode(codes: Tensor, scales: Tensor, variance: bool) -> Tensor:
    y = blocks(codes.float(), 32) / (255 if variance else 127)
    z = y if variance else y / (2 - y.abs())
    x = (z * scales.float()[:, None]).reshape(-1)[: codes.numel()].reshape(codes.shape)
    return x.square() if variance else x


def flash_bits(master: Tensor, weight: Tensor, levels: int) -> Tensor:
    """Whole numbers: levels * (x - n) / h, n the bf16 weight, h half of the distance of bf16 numbers there."""
    exponent = ((weight.view(torch.int16).int() >> 7) & 255).clamp(min=1) - 127
    scaled = levels * (master.double() - weight.double()) / 2.0 ** (exponent - 8).double()
    return scaled.sign() * torch.floor(scaled.abs() + 0.5)


def state_dict(states: dict[int, dict[str, Any]], **options: Any) -> dict[str, Any]:
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **options, "params": list(states)}
    return {"state": states, "param_groups": [group]}


def test_flashoptims_moments_become_torchs(tmp_path: Path) -> None:
    (m, v), step = moments(), torch.tensor(7.0)
    (q, a), (r, b) = flash_encode(m.reshape(5, -1), False), flash_encode(v.reshape(5, -1), True)
    names = {"exp_avg::quantized": q, "exp_avg::scales": a, "exp_avg_sq::quantized": r, "exp_avg_sq::scales": b}
    torch.save(state_dict({0: {"step": step, **names}}), tmp_path / "in.pt")
    report = convert(tmp_path / "in.pt", tmp_path / "out.pt", "torch", source_format="flashoptim", verify=True)
    assert (report.source, report.system) == ("torch", "flashoptim")
    state = loaded(tmp_path / "out.pt")["state"][0]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"} and state["step"] == 7
    assert torch.allclose(state["exp_avg"], flash_decode(q, a, False), rtol=3e-7, atol=0)
    assert torch.allclose(state["exp_avg_sq"], flash_decode(r, b, True), rtol=5e-7, atol=0)
    assert state["exp_avg"].shape == q.shape


def test_torchs_moments_become_flashoptims(tmp_path: Path) -> None:
    m, v = moments()
    torch.save(state_dict({0: {"step": torch.tensor(2.0), "exp_avg": m, "exp_avg_sq": v}}), tmp_path / "in.pt")
    report = convert(tmp_path / "in.pt", tmp_path / "out.pt", "flashoptim", verify=True)
    assert report.errors is not None
    assert {e.slot: e.bound for e in report.errors} == {"step": 0, "exp_avg": 8.5e-3, "exp_avg_sq": 5e-3}
    assert all(0 < error.error <= error.bound for error in report.errors if error.slot != "step")
    state = loaded(tmp_path / "out.pt")["state"][0]
    for slot, x, variance in (("exp_avg", m, False), ("exp_avg_sq", v, True)):
        codes, scales = flash_encode(x, variance)
        assert torch.equal(state[f"{slot}::scales"], scales)
        different = (state[f"{slot}::quantized"].int() - codes.int()).abs()  # 255 s/A may multiply or divide first
        assert state[f"{slot}::quantized"].dtype == codes.dtype and different.max() <= 1
        assert different.float().mean() <= 1e-3


@pytest.mark.parametrize(("width", "levels"), [(3, 127), (4, 32767)])
def test_flashoptims_low_bits_and_the_models_weights_are_master_weights(
    width: int, levels: int, tmp_path: Path
) -> None:
    master = moments()[0]
    weight = master.bfloat16()
    bits = flash_bits(master, weight, levels)
    kept = bits.bfloat16() if width == 3 else bits.to(torch.int16).view(torch.bfloat16)
    torch.save(state_dict({0: {"error_bits": kept}}, master_bytewidth=width), tmp_path / "in.pt")
    with pytest.raises(ballast.Rejected, match="error_bits, the low bits.*--names MODEL_STATE.*--drop error_bits"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", "torch")
    torch.save({"w": weight}, tmp_path / "model.bin")
    convert(tmp_path / "in.pt", tmp_path / "out.pt", "torch", names=[tmp_path / "model.bin"], verify=True)
    got = loaded(tmp_path / "out.pt")["state"][0]["master"]
    exponent = ((weight.view(torch.int16).int() >> 7) & 255).clamp(min=1) - 135
    wanted = weight.double() + bits / levels * 2.0 ** exponent.double()
    assert got.dtype == torch.float32 and torch.allclose(got.double(), wanted, rtol=2.4e-7, atol=0)
    # And back, always in 24 bits. Those that were are what they were, at ties of bf16 too.
    given = [tmp_path / "model.bin"]
    convert(tmp_path / "out.pt", tmp_path / "back.pt", "flashoptim", names=given, verify=True)
    back = loaded(tmp_path / "back.pt")
    assert back["param_groups"][0]["master_bytewidth"] == 3
    again = back["state"][0]["error_bits"]
    assert torch.equal(again.double(), bits if width == 3 else flash_bits(got, weight, 127))
    torch.save({"w": weight + 1}, tmp_path / "other.bin")
    with pytest.raises(ballast.Rejected, match="bf16 weights are not its master weights rounded.*--drop master"):
        convert(tmp_path / "out.pt", tmp_path / "no.pt", "flashoptim", names=[tmp_path / "other.bin"])
    convert(tmp_path / "in.pt", tmp_path / "dropped.pt", "torch", drop=["error_bits"])
    assert loaded(tmp_path / "dropped.pt")["state"] == {}


def test_moments_too_small_for_fp16_scales_fail_the_comparison(tmp_path: Path) -> None:
    """FlashOptim itself makes zeros of them: that is told, and nothing is kept."""
    m, v = moments()
    m[:32] = 1e-9
    torch.save(state_dict({0: {"step": torch.tensor(2.0), "exp_avg": m, "exp_avg_sq": v}}), tmp_path / "in.pt")
    with pytest.raises(
        VerifyFailed, match="exp_avg: 1 tensors, .*up to 0.0085.*largest difference 1, parameter 0.*coarse"
    ) as caught:
        convert(tmp_path / "in.pt", tmp_path / "out.pt", "flashoptim", verify=True)
    assert {error.slot: error.ok for error in caught.value.errors} == {
        "step": True,
        "exp_avg": False,
        "exp_avg_sq": True,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


@pytest.mark.parametrize("slot", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e12])
def test_what_8_bits_do_not_hold_is_refused(slot: str, value: float, tmp_path: Path) -> None:
    m, v = moments()
    (m if slot == "exp_avg" else v)[40] = value
    torch.save(state_dict({0: {"exp_avg": m, "exp_avg_sq": v}}), tmp_path / "in.pt")
    with pytest.raises(ballast.Rejected, match=f"parameter 0: {slot}, elements from 0: .*element 40"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", "flashoptim")
    assert not (tmp_path / "out.pt").exists()


# --- bitsandbytes: the value that a code stands for, times the largest of the block -----------------------------------


def dynamic_map(signed: bool) -> Tensor:
    """Means of neighbours of evenly spaced numbers in [0.1, 1], times 10^-6 to 1; arXiv 2110.02861."""
    values = [0.0, 1.0]
    for i in range(7):
        ends = torch.linspace(0.1, 1, 2**i * (1 if signed else 2) + 1, dtype=torch.float32)
        means = 10.0 ** (i - 6) * ((ends[:-1] + ends[1:]) / 2)
        values += means.tolist() + ((-means).tolist() if signed else [])
    return torch.tensor(sorted(values))


def dynamic_encode(x: Tensor, table: Tensor, block: int) -> tuple[Tensor, Tensor]:
    groups = blocks(x, block)
    largest = groups.abs().amax(1)
    z = groups / torch.where(largest == 0, 1.0, largest)[:, None]
    codes = (z.reshape(-1, 1)[: x.numel()] - table[None]).abs().argmin(1)
    return codes.to(torch.uint8).reshape(x.shape), largest


def dynamic_decode(codes: Tensor, table: Tensor, largest: Tensor, block: int) -> Tensor:
    return (table[codes.long()].reshape(-1) * largest.repeat_interleave(block)[: codes.numel()]).reshape(codes.shape)


def bnb_state(m: Tensor, v: Tensor, block: int) -> dict[str, Any]:
    state: dict[str, Any] = {"step": 9}
    for number, x, signed in ((1, m, True), (2, v, False)):
        table = dynamic_map(signed)
        codes, largest = dynamic_encode(x, table, block)
        state |= {f"state{number}": codes, f"qmap{number}": table, f"absmax{number}": largest}
    return state


@pytest.mark.parametrize("block", [256, 2048])
@pytest.mark.parametrize("wrapped", [False, True])
def test_bitsandbytes_moments_become_torchs(block: int, wrapped: bool, tmp_path: Path) -> None:
    m, v = moments()
    state = bnb_state(m.reshape(5, -1), v.reshape(5, -1), block)
    wanted = {
        "exp_avg": dynamic_decode(state["state1"], state["qmap1"], state["absmax1"], block),
        "exp_avg_sq": dynamic_decode(state["state2"], state["qmap2"], state["absmax2"], block),
    }
    small = {"step": 9, "state1": m[:8].clone(), "state2": v[:8].clone()}
    if wrapped:  # as of 0.50
        key = "__bnb_optimizer_quant_state__"
        state, small = ({"step": s.pop("step"), key: s} for s in (state, small))
    torch.save(state_dict({0: state, 1: small}), tmp_path / "in.pt")
    report = convert(tmp_path / "in.pt", tmp_path / "out.pt", "torch", source_format="bitsandbytes", verify=True)
    assert report.system == "bitsandbytes"
    got = loaded(tmp_path / "out.pt")["state"]
    assert all(torch.equal(got[0][slot], values) for slot, values in wanted.items())
    assert torch.equal(got[1]["exp_avg"], m[:8]) and torch.equal(got[1]["exp_avg_sq"], v[:8])
    assert got[0]["step"] == 9 and got[0]["step"].dtype == torch.float32
    parameters = [torch.nn.Parameter(torch.zeros(state.shape)) for state in (wanted["exp_avg"], m[:8])]
    torch.optim.AdamW(parameters).load_state_dict(loaded(tmp_path / "out.pt"))


def test_torchs_moments_become_bitsandbytes(tmp_path: Path) -> None:
    m, v = moments()
    states = {
        0: {"step": torch.tensor(9.0), "exp_avg": m, "exp_avg_sq": v},
        1: {"step": torch.tensor(9.0), "exp_avg": m[:8], "exp_avg_sq": v[:8]},
        2: {"step": torch.tensor(9.0), "exp_avg": m + 1, "exp_avg_sq": v + 1},
    }
    torch.save(state_dict(states), tmp_path / "in.pt")
    report = convert(tmp_path / "in.pt", tmp_path / "out.pt", "bitsandbytes", verify=True)
    assert report.errors is not None and all(error.ok and error.tensors == 3 for error in report.errors)
    got = loaded(tmp_path / "out.pt")["state"]
    assert (got[0]["step"], type(got[0]["step"])) == (9, int)
    for number, x, signed in ((1, m, True), (2, v, False)):
        table = dynamic_map(signed)
        codes, largest = dynamic_encode(x, table, 256)
        assert torch.allclose(got[0][f"qmap{number}"], table, rtol=3e-7, atol=0)
        assert torch.equal(got[0][f"absmax{number}"], largest)
        assert (got[0][f"state{number}"] != codes).float().mean() <= 1e-3  # ties of roundings of the map
        assert got[0][f"qmap{number}"].data_ptr() == got[2][f"qmap{number}"].data_ptr()  # one for all, as there
    assert got[1].keys() == {"step", "state1", "state2"} and torch.equal(got[1]["state1"], m[:8])


def test_one_state_of_bitsandbytes_is_what_the_user_says(tmp_path: Path) -> None:
    m, v = moments()
    state = bnb_state(m, v, 256)
    lion = {key: value for key, value in state.items() if not key.endswith("2")}
    torch.save(state_dict({0: lion}), tmp_path / "in.pt")
    with pytest.raises(ballast.Rejected, match="does not say which: give --state1 exp_avg, momentum_buffer"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", "torch")
    convert(tmp_path / "in.pt", tmp_path / "out.pt", "torch", state1="exp_avg")
    assert loaded(tmp_path / "out.pt")["state"][0].keys() == {"step", "exp_avg"}
    convert(tmp_path / "out.pt", tmp_path / "back.pt", "bitsandbytes", verify=True)
    back = loaded(tmp_path / "back.pt")["state"][0]
    assert torch.equal(back["state1"], lion["state1"]) and back.keys() == lion.keys()


def test_torchs_sgd_becomes_bitsandbytes(tmp_path: Path) -> None:
    _, optimizer, source = saved(tmp_path / "in", torch.optim.SGD, momentum=0.8)
    convert(source, tmp_path / "out.pt", "bitsandbytes", verify=True)
    got = loaded(tmp_path / "out.pt")
    assert got["param_groups"][0]["betas"] == (0.8, 0) and got["param_groups"][0]["eps"] == 0
    assert got["state"][0]["step"] == 1
    first = optimizer.param_groups[0]["params"][0]
    assert torch.equal(got["state"][0]["state1"], optimizer.state[first]["momentum_buffer"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max1": torch.ones(1)}, "block_wise=False"),
        ({"state1": torch.zeros(2, LARGE, dtype=torch.uint8)}, "AdEMAMix"),
        ({"absmax1": torch.ones(3)}, "3 scales: wanted uint8, 256 values, and a scale for each 256 or 2048"),
        ({"qmap2": torch.ones(16)}, "16 values"),
        ({"qmap1": None}, "without qmap1 and absmax1: the file is damaged"),
    ],
)
def test_other_layouts_of_bitsandbytes_are_refused_by_name(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    m, v = moments()
    torch.save(state_dict({0: {**bnb_state(m, v, 256), **change}}), tmp_path / "in.pt")
    with pytest.raises(ballast.Rejected, match=said):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", "torch")


@pytest.mark.parametrize("to", ["flashoptim", "bitsandbytes"])
def test_a_slot_that_a_system_has_no_place_for_is_refused(to: str, tmp_path: Path) -> None:
    _, _, source = saved(tmp_path / "in", torch.optim.Adam, amsgrad=True)
    with pytest.raises(ballast.Rejected, match="no place for max_exp_avg_sq: leave it out with --drop max_exp_avg_sq"):
        convert(source, tmp_path / "out.pt", to)
    convert(source, tmp_path / "out.pt", to, drop=["max_exp_avg_sq"], verify=True)


def test_what_in_is_said_to_be_is_checked(tmp_path: Path) -> None:
    _, _, source = saved(tmp_path / "in")
    with pytest.raises(ballast.Rejected, match="--from bitsandbytes: .* holds torch's state"):
        convert(source, tmp_path / "out.pt", "torch", source_format="bitsandbytes")
    with pytest.raises(ballast.Rejected, match="--from dcp: .* is torch"):
        convert(source, tmp_path / "out.pt", "torch", source_format="dcp")


def test_codes_of_one_system_become_the_others(tmp_path: Path) -> None:
    """By way of fp32: each slot within its bound of what the first codes say."""
    m, v = moments()
    torch.save(state_dict({0: bnb_state(m, v, 256)}), tmp_path / "in.pt")
    report = convert(tmp_path / "in.pt", tmp_path / "out.pt", "flashoptim", verify=True)
    assert report.errors is not None and {error.slot for error in report.errors} == {"step", "exp_avg", "exp_avg_sq"}
    state = loaded(tmp_path / "out.pt")["state"][0]
    codes = bnb_state(m, v, 256)
    ours = flash_decode(state["exp_avg::quantized"], state["exp_avg::scales"], False)
    theirs = dynamic_decode(codes["state1"], codes["qmap1"], codes["absmax1"], 256)
    assert (blocks(ours - theirs, 32).abs().amax(1) <= 8.5e-3 * blocks(theirs, 32).abs().amax(1)).all()


def test_codes_in_another_order_of_memory_are_refused(tmp_path: Path) -> None:
    """Blocks are counted in memory: of channels_last they are others."""
    m, v = (x[:12288].reshape(2, 6, 32, 32).to(memory_format=torch.channels_last) for x in moments())
    torch.save(state_dict({0: {"exp_avg": m, "exp_avg_sq": v}}), tmp_path / "in.pt")
    with pytest.raises(ballast.Rejected, match="parameter 0: exp_avg was saved in another order of memory.*contiguous"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", "flashoptim")
    convert(tmp_path / "in.pt", tmp_path / "plain.pt", "torch", verify=True)
    assert torch.equal(loaded(tmp_path / "plain.pt")["state"][0]["exp_avg"], m)
    codes = bnb_state(m.contiguous(), v.contiguous(), 256)
    codes["state1"] = codes["state1"].to(memory_format=torch.channels_last)
    torch.save(state_dict({0: codes}), tmp_path / "codes.pt")
    with pytest.raises(ballast.Rejected, match="parameter 0: exp_avg was saved in another order of memory"):
        convert(tmp_path / "codes.pt", tmp_path / "out.pt", "torch")


@pytest.mark.parametrize("format", ["flash8", "dynamic8"])
def test_codes_saved_in_shards_are_refused(format: str) -> None:
    """Two shards of 31 elements have two scales, and so would the whole of 62."""
    codes = LazyTensor((62,), torch.int8 if format == "flash8" else torch.uint8, lambda: torch.zeros(62), sharded=True)
    scales = constant(torch.ones(2, dtype=torch.float16) if format == "flash8" else torch.ones(1))
    with pytest.raises(ballast.Rejected, match="parameter 3: its 8-bit codes were saved in shards"):
        if format == "flash8":
            decoded(codes, scales, format, "exp_avg", "parameter 3")
        else:
            table = constant(dynamic_map(True))
            state = {"state1": codes, "qmap1": table, "absmax1": scales}
            dynamic8.decode(state, "exp_avg", "parameter 3")
