"""What the constructor accepts, and how it refuses: naming the parameter or option, and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ballast

AdamW = Callable[..., ballast.AdamW]


def parameter(*shape: int, **kwargs: Any) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, **kwargs))


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse().requires_grad_()


UNFIT = {
    "sparse": (sparse, "layout torch.sparse_coo.*dense"),
    "complex": (lambda: parameter(3, dtype=torch.complex64), "complex64.*convert"),
    "fp64": (lambda: parameter(3, dtype=torch.float64), "float64.*convert"),
    "not contiguous": (lambda: nn.Parameter(torch.zeros(3, 4).t()), "contiguous.*p.data = p.data.contiguous"),
    "no elements": (lambda: parameter(0, 3), "no elements.*leave it out"),
    "not a leaf": (lambda: parameter(3) * 2, "not a leaf.*nn.Parameter"),
    "meta": (lambda: parameter(3, device="meta"), "meta device.*to_empty"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_an_unfit_parameter_is_refused_by_name(kind: str, adamw: AdamW) -> None:
    make, message = UNFIT[kind]
    with pytest.raises(ballast.Rejected, match=f"'encoder.odd'.*{message}"):
        adamw([("encoder.fine", parameter(3)), ("encoder.odd", make())])


@pytest.mark.parametrize("trained", [False, True])
def test_a_parameter_that_is_not_contiguous_any_more_is_refused_until_it_is(trained: bool, adamw: AdamW) -> None:
    model = nn.Conv2d(3, 8, 3)
    optimizer = adamw(model.named_parameters())

    def train() -> None:
        model(torch.ones(1, 3, 8, 8)).sum().backward()
        optimizer.step()

    if trained:
        train()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with pytest.raises(ballast.Rejected, match="'weight' is not contiguous now.*channels_last.*contiguous") as refused:
        train()
    assert "before making" not in str(refused.value)
    model.weight.data = model.weight.data.contiguous()
    train()
    assert optimizer.last_result is not None and optimizer.last_result.applied


def test_an_unnamed_parameter_is_named_by_its_place(adamw: AdamW) -> None:
    with pytest.raises(ballast.Rejected, match=r"'param\.2'.*float64"):
        adamw([parameter(1), parameter(1), parameter(1, dtype=torch.float64)])


def test_duplicate_names_are_refused(adamw: AdamW) -> None:
    with pytest.raises(ballast.Rejected, match="two parameters are named 'w'"):
        adamw([("w", parameter(1)), ("w", parameter(1))])


def test_the_same_tensor_twice_is_refused(adamw: AdamW) -> None:
    w = parameter(1)
    with pytest.raises(ballast.Rejected, match=r"'param\.1' is the same tensor as 'param\.0'"):
        adamw([w, w])
    with pytest.raises(ballast.Rejected, match="'b' is the same tensor as 'a' of another group"):
        adamw([{"params": [("a", w)]}, {"params": [("b", w)]}])


def test_a_tied_parameter_is_sent_once_under_its_first_name(adamw: AdamW, run: str) -> None:
    w = parameter(4)
    optimizer = adamw([("embed", w), ("head", w)])
    w.sum().backward()
    optimizer.step()
    tensors = optimizer._membership.connected().get_run(run)["spec"]["tensors"]
    assert [tensor["name"] for tensor in tensors] == ["embed"]


def test_parameters_that_share_memory_are_refused(adamw: AdamW) -> None:
    memory = torch.zeros(8)
    one, other = nn.Parameter(memory[:5]), nn.Parameter(memory[4:])
    with pytest.raises(ballast.Rejected, match="'one' and 'other' share memory"):
        adamw([("one", one), ("other", other)])


def test_neighbours_in_one_storage_are_fine(adamw: AdamW) -> None:
    memory = torch.zeros(8)
    adamw([nn.Parameter(memory[:4]), nn.Parameter(memory[4:])])


@pytest.mark.parametrize("params", [[], iter(())], ids=["list", "iterator"])
def test_no_parameters_are_refused(params: Any, adamw: AdamW) -> None:
    with pytest.raises((ballast.Rejected, ValueError), match="empty"):
        adamw(params)


def test_what_is_not_a_tensor_is_refused(adamw: AdamW) -> None:
    with pytest.raises(ballast.Rejected, match=r"'param\.0' is a int"):
        adamw([3])


def test_a_dtensor_and_an_fsdp_parameter_are_refused(adamw: AdamW) -> None:
    class DTensor(nn.Parameter):
        pass

    with pytest.raises(ballast.Rejected, match="'w' is sharded by a DTensor of another torch.*fully_shard"):
        adamw([("w", DTensor(torch.zeros(3)))])
    flattened = parameter(3)
    flattened._fsdp_flattened = True
    with pytest.raises(ballast.Rejected, match="'w' is sharded by FullyShardedDataParallel.*shard with fully_shard"):
        adamw([("w", flattened)])


@pytest.mark.parametrize(
    "option",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"lr": "fast"},
        {"lr": "1e-3"},
        {"lr": True},
        {"betas": (0.9,)},
        {"betas": (0.9, 1.0)},
        {"eps": 0.0},
        {"weight_decay": -0.1},
        {"master_weight_bits": 16},
        {"master_weight_bits": None},
        {"state_dtype": "int8"},
        {"rounding": "up"},
        {"weights": "theirs"},
        {"transport": "tcp"},
        {"join_timeout": -1.0},
        {"join_timeout": "long"},
    ],
    ids=str,
)
def test_an_impossible_option_is_refused(option: dict[str, Any], adamw: AdamW) -> None:
    with pytest.raises(ballast.Rejected, match=f"{next(iter(option))}=.*must be"):
        adamw([parameter(1)], **option)


def test_an_option_of_another_name_is_refused_and_told_it(adamw: AdamW) -> None:
    with pytest.raises(TypeError, match=r"AdamW\(\) got an unexpected keyword argument 'lane': write transport="):
        adamw([parameter(1)], lane="grpc")
    with pytest.raises(TypeError, match="unexpected keyword argument 'land'$"):
        adamw([parameter(1)], land="grpc")


def test_an_impossible_option_names_its_group(adamw: AdamW) -> None:
    with pytest.raises(ballast.Rejected, match="lr=-1 of group 'embed'"):
        adamw([{"params": [parameter(1)], "name": "embed", "lr": -1}])
    with pytest.raises(ballast.Rejected, match="amsgrad=True.*leave it out"):
        adamw([{"params": [parameter(1)], "amsgrad": True}])


def test_a_run_must_be_named(adamw: AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BALLAST_RUN")
    with pytest.raises(ballast.Rejected, match="run='my-run'.*BALLAST_RUN"):
        adamw([parameter(1)])
    with pytest.raises(ballast.Rejected, match="run='My Run'"):
        adamw([parameter(1)], run="My Run")
    with pytest.raises(ballast.Rejected, match="run=5: at most 63"):
        adamw([parameter(1)], run=5)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ballast.Unavailable, match=r"127\.0\.0\.1:1 .*ballastd"):
        ballast.AdamW([parameter(1)], server="127.0.0.1:1", run="r", connect_timeout=0.5)


def test_frozen_parameters_are_skipped(adamw: AdamW, run: str) -> None:
    codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    w = parameter(3)
    optimizer = adamw([codes, w])
    w.sum().backward()
    optimizer.step()
    tensors = optimizer._membership.connected().get_run(run)["spec"]["tensors"]
    assert [tensor["name"] for tensor in tensors] == ["param.1"]


def test_all_frozen_is_refused_when_the_run_is_made(adamw: AdamW) -> None:
    optimizer = adamw([nn.Parameter(torch.zeros(3), requires_grad=False)])
    with pytest.raises(ballast.Rejected, match="every parameter is frozen"):
        optimizer.connect()


def test_groups_describe_the_run(adamw: AdamW, run: str) -> None:
    optimizer = adamw(
        [
            {"params": [("w", parameter(2, 3))], "lr_scale": 0.5, "wd_scale": 0, "name": "decay"},
            {"params": [("e", parameter(3, dtype=torch.bfloat16))], "state_dtype": "fp32", "master_weight_bits": 32},
        ],
        eps=1e-6,
        seed=2**63,
    )
    optimizer.connect()
    spec = optimizer._membership.connected().get_run(run)["spec"]
    w, e = spec["tensors"]
    assert (w["name"], w["shape"], w["dtype"], w["lr_scale"], w["wd_scale"]) == ("w", [2, 3], "fp32", 0.5, 0)
    assert (e["name"], e["shape"], e["dtype"], e["group"]) == ("e", [3], "bf16", 1)
    assert [(group["master"], group["state"]) for group in spec["groups"]] == [
        ("split24", "companded8"),
        ("split32", "fp32"),
    ]
    assert spec["groups"][0]["hyper"]["eps"] == 1e-6
    assert spec["seed"] == 2**63
