"""Where the codes of a layer are, and its weights, when a run ends, another begins, or memory changes in the middle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

import ballast
from ballast import nn as bnn
from coded import KINDS, WIDTH, batch, codes_of, is_coded, loss_of, model_of, same, train

AdamW = Callable[..., ballast.AdamW]


@pytest.fixture(params=KINDS)
def format(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_closing_gives_weights_back(format: str, adamw: AdamW) -> None:
    model = model_of(format, dtype=torch.float32)
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, optimizer, range(2))
    state = model.state_dict()
    optimizer.close()
    assert not is_coded(model) and all(torch.equal(p, state[name]) for name, p in model.named_parameters())
    other = torch.optim.AdamW(model.parameters(), fused=True)
    loss_of(model, batch(0, torch.float32)).backward()
    other.step()


def test_a_run_that_serves_no_codes_takes_over_from_one_that_does(format: str, adamw: AdamW, run: str) -> None:
    plain, model = model_of(format, seed=2), model_of(format)
    first = adamw(plain.named_parameters(), lr=1e-2, run=f"{run}-plain")
    train(plain, first, range(1))
    first.close()
    coded = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, coded, range(2))
    coded.close()
    second = adamw(model.named_parameters(), lr=1e-2, run=f"{run}-plain", weights="server")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    train(model, second, range(1, 3))


def test_serving_may_be_left_out_in_the_middle_of_a_run(format: str, adamw: AdamW) -> None:
    model = model_of(format)
    optimizer = adamw(model.parameters(), lr=1e-2, serving=format)
    train(model, optimizer, range(2))
    assert is_coded(model)
    optimizer.param_groups[0]["serving"] = None
    with suppress(ballast.RunRewound):
        train(model, optimizer, range(2, 4))
    train(model, optimizer, range(4, 5))
    assert not is_coded(model) and all(p.isfinite().all() for p in model.parameters())


def test_a_weight_that_another_layer_gets_meanwhile(adamw: AdamW) -> None:
    model, other = model_of(), bnn.SwitchBackLinear(WIDTH, 48, dtype=torch.bfloat16)
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, optimizer, range(2))
    other.weight = model[0].weight
    optimizer.close()
    again = adamw(
        model.named_parameters(), lr=1e-2, formats={"2.weight": {"serving": "int8-tensor"}}, run="test-tied-x"
    )
    train(model, again, range(2))
    assert model[0].weight.isfinite().all() and model[2].weight.stride() == (0, 0)
    ballast.delete_run("test-tied-x", force=True)


@pytest.mark.parametrize("moves", ["load", "to"])
def test_memory_that_changes_within_a_step_is_not_written_to_when_it_is_gone(
    moves: str, format: str, adamw: AdamW
) -> None:
    model = model_of(format)
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "commit": "staged"}
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model), **options)
    for step in range(6):
        for micro in range(2):
            (loss_of(model, batch(2 * step + micro)) / 2).backward()
            if micro == 0 and step % 2 and moves == "load":
                model.load_state_dict(copy.deepcopy(model.state_dict()))
            elif micro == 0 and step % 2:
                model.to("cpu")
        optimizer.step()
        assert optimizer.last_result and optimizer.last_result.applied
    assert is_coded(model)


def test_weights_that_were_refused_leave_the_run_where_it_writes(format: str, adamw: AdamW) -> None:
    model = model_of(format)
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, optimizer, range(2))
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optimizer, range(2, 3))
    weights["0.bias"][0] = torch.nan
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    with pytest.raises(ballast.Rejected, match="hold a NaN"):
        train(model, optimizer, range(2, 3))
    optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
    optimizer.zero_grad()
    optimizer.pull()
    before = codes_of(model)
    train(model, optimizer, range(3, 6))
    here = codes_of(model)
    optimizer.pull()
    assert is_coded(model) and same(here, codes_of(model)) and not same(before, here)


@pytest.mark.parametrize("write", [torch.Tensor.zero_, lambda p: p.fill_(1), lambda p: p.__setitem__((0, 0), 1)])
def test_a_number_that_is_put_in_the_codes_place_is_told(write: Callable[[torch.Tensor], Any], adamw: AdamW) -> None:
    model = model_of()
    optimizer = adamw(model.named_parameters(), lr=1e-2, formats=bnn.served_formats(model))
    train(model, optimizer, range(2))
    with torch.no_grad():
        write(model[0].weight)
    with pytest.raises(ballast.Rejected, match="'0.weight'"):
        train(model, optimizer, range(2, 3))
    optimizer.zero_grad()
    optimizer.pull()
    assert model[0].weight.isnan().all()
    train(model, optimizer, range(2, 3))


@pytest.mark.parametrize("does", ["evaluates", "constructs", "loads", "moves"])
def test_inference_mode_leaves_no_trace(does: str, format: str, adamw: AdamW, run: str) -> None:
    model = model_of(format)
    options: dict[str, Any] = {"lr": 1e-2, "formats": bnn.served_formats(model), "overlap_forward": does == "evaluates"}
    optimizer = adamw(model.named_parameters(), **options)
    train(model, optimizer, range(2))
    state = copy.deepcopy(model.state_dict())
    if does == "constructs":
        optimizer.close()
    with torch.inference_mode():
        if does == "constructs":
            optimizer = adamw(model.named_parameters(), **options, weights="server")
        elif does == "loads":
            model.load_state_dict(state)
        elif does == "moves":
            model.to("cpu")
        assert model(batch(0)).isfinite().all()
    train(model, optimizer, range(2, 4))
    optimizer.wait()
    assert is_coded(model)
