"""Parameters of fully_shard in one process: what `.grad` is, and what is refused, by name and with what to write."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.torch_version import TorchVersion

import ballast
from ballast import sharding_watch
from models import layered, losses_of, perceptron, spirals

AdamW = Callable[..., ballast.AdamW]
EXACT = {"master": "fp32", "state": "fp32"}


@pytest.fixture
def mesh() -> Iterator[Any]:
    gc.collect()  # of the groups before, here: in a fork gloo's destructor joins threads that are not there, and crashes
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def model(mesh: Any) -> nn.Module:
    return fully_shard(layered(seed=1), mesh=mesh)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 8)).square().mean().backward()


def refused(message: str, act: Callable[[], Any]) -> None:
    with pytest.raises(ballast.Rejected, match=message):
        act()


def test_it_trains_as_torchs(mesh: Any, adamw: AdamW) -> None:
    ours, theirs = fully_shard(perceptron(seed=1), mesh=mesh), perceptron(seed=1)
    optimizer = adamw(ours.named_parameters(), lr=1e-2, **EXACT)
    losses = losses_of(ours, optimizer, 20)
    peer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for loss in losses:
        peer.zero_grad()
        assert loss == pytest.approx(one_step(theirs, peer), rel=1e-5)


def one_step(model: nn.Module, peer: torch.optim.Optimizer) -> float:
    points, labels = spirals(seed=1)
    loss = nn.functional.cross_entropy(model(points), labels)
    loss.backward()
    peer.step()
    return loss.item()


@pytest.mark.parametrize(("version", "taken"), [("2.12.1+cu130", False), ("2.13.0+cu130", True), ("2.14.0", True)])
def test_gradients_that_may_not_be_in_host_memory_yet_are_refused(
    version: str, taken: bool, model: nn.Module, adamw: AdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    if taken:
        adamw(model.named_parameters())
    else:
        refused(
            r"parameter '0.weight' is kept in pinned .*2\.12.*CPUOffloadPolicy\(pin_memory=False\)",
            lambda: adamw(model.named_parameters()),
        )


class Scaled(torch.utils.data.Dataset[torch.Tensor]):
    """Its items pass through a module, in the workers, and make a graph there."""

    def __init__(self) -> None:
        self.scale = nn.Linear(8, 8)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        scaled: torch.Tensor = self.scale(torch.ones(8)).detach()
        return scaled


def test_workers_that_run_modules_do_not_ask_the_run(model: nn.Module, adamw: AdamW) -> None:
    optimizer = adamw(model.named_parameters(), **EXACT)
    loader = torch.utils.data.DataLoader(Scaled(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    for _ in range(2):  # the second time, forked between two steps
        for batch in loader:
            model(batch).square().mean().backward()
            optimizer.step()
    assert optimizer.last_result is not None and (optimizer.last_result.step, optimizer.last_result.applied) == (
        4,
        True,
    )


def test_grad_shows_that_there_is_one_and_no_values(model: nn.Module, adamw: AdamW) -> None:
    parameters = list(model.parameters())
    optimizer = adamw(model.named_parameters(), commit="staged")
    backward(model)
    for parameter in parameters:
        grad = parameter.grad
        assert isinstance(grad, DTensor) and grad.shape == parameter.shape and grad.dtype == parameter.dtype
        refused("the gradient of '.*' has left for the daemon", grad.isfinite)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    assert isinstance(norm, DTensor) and norm.full_tensor() > 0
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)) == float(norm)
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.clip_coefficient < 1
    assert all(parameter.grad is None for parameter in parameters)


def test_a_staged_step_is_dropped_by_zero_grad(model: nn.Module, adamw: AdamW) -> None:
    optimizer = adamw(model.named_parameters(), commit="staged", **EXACT)
    before = [parameter.detach().full_tensor().clone() for parameter in model.parameters()]
    backward(model)
    optimizer.zero_grad()
    assert optimizer.step_was_skipped
    assert all(torch.equal(p.full_tensor(), then) for p, then in zip(model.parameters(), before))
    backward(model)
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.applied and optimizer.last_result.step == 2


def test_its_state_is_sharded_as_the_parameters_are(model: nn.Module, adamw: AdamW) -> None:
    optimizer = adamw(model.named_parameters())
    backward(model)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert len(state) == 6
    for parameter, one in zip(model.parameters(), state.values()):
        assert one["exp_avg"].placements == parameter.placements  # type: ignore[attr-defined]
        assert one["exp_avg"].shape == parameter.shape and one["step"] == 1


def test_a_whole_state_dict_of_torchs_is_taken(model: nn.Module, mesh: Any, adamw: AdamW) -> None:
    plain = layered(seed=1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    backward(plain)
    theirs.step()
    optimizer = adamw(model.named_parameters(), lr=1e-2, **EXACT)
    optimizer.load_state_dict(deepcopy(theirs.state_dict()))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), plain.parameters()):
            parameter.copy_(distribute_tensor(value.detach(), mesh, [Shard(0)]))
    theirs.zero_grad()
    backward(plain)
    theirs.step()
    backward(model)
    optimizer.step()
    for parameter, value in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(parameter.detach().full_tensor(), value.detach())


def test_a_layer_that_is_used_twice_has_one_gradient(mesh: Any, adamw: AdamW) -> None:
    ours, theirs = fully_shard(layered(seed=1)[0], mesh=mesh), layered(seed=1)[0]
    optimizer, peer = adamw(ours.named_parameters(), lr=1e-2, **EXACT), torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for layer, one in ((ours, optimizer), (theirs, peer)):
        for _ in range(3):
            layer(layer(torch.ones(2, 8))).square().sum().backward()
            one.step()
            one.zero_grad()
    for parameter, value in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(parameter.detach().full_tensor(), value.detach())


# --- what is refused ---------------------------------------------------------------------------------------------------


def test_other_placements_are_refused(mesh: Any, adamw: AdamW) -> None:
    columns = fully_shard(layered(seed=1), mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    refused("'0.weight' is a DTensor with placements .*fully_shard", lambda: adamw(columns.named_parameters()))
    copy = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    refused(r"'w' is a DTensor with placements .*\(Shard\(0\),\)", lambda: adamw([("w", copy)]))


def test_a_parameter_that_fsdp_ignores_is_refused(mesh: Any, adamw: AdamW) -> None:
    model = layered(seed=1)
    fully_shard(model, mesh=mesh, ignored_params={model[1].weight})
    adamw(model.named_parameters())
    refused("'1.weight' is not sharded, and '0.weight' is", lambda: model(torch.ones(2, 8)))


def test_options_that_cannot_be_kept_are_refused(model: nn.Module, adamw: AdamW, run: str) -> None:
    for number, (options, message) in enumerate(
        (
            ({"overlap_forward": True}, "overlap_forward=True with"),
            ({"changed_weights": "upload"}, "changed_weights='upload'"),
        )
    ):
        optimizer = adamw(model.named_parameters(), run=f"{run}-{number}", **options)
        refused(message, lambda: model(torch.ones(2, 8)))
        optimizer.close()


def test_a_place_that_is_not_torchs_is_refused(model: nn.Module, adamw: AdamW) -> None:
    adamw(model.named_parameters(), rank=0, world=2)
    refused("rank=0 and world=2 .* rank 0 of 1 there", lambda: model(torch.ones(2, 8)))


@pytest.mark.parametrize("late", ["connect", "load_state_dict"])
def test_sharding_too_late_is_refused(late: str, mesh: Any, adamw: AdamW) -> None:
    model, other = layered(seed=1), layered(seed=1)
    optimizer = adamw(model.named_parameters())
    theirs = torch.optim.AdamW(other.parameters())
    backward(other)
    theirs.step()
    if late == "connect":
        optimizer.connect()
    else:
        optimizer.load_state_dict(theirs.state_dict())
    refused("replaces parameter '0.weight' after", lambda: fully_shard(model, mesh=mesh))


def test_sharding_that_nobody_saw_is_refused(mesh: Any, adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    sharding_watch.release(optimizer._steps)
    fully_shard(model, mesh=mesh)
    backward(model)
    refused("no module has any of this optimizer's parameters.*after fully_shard", optimizer.step)


def test_a_run_of_sharded_parameters_does_not_grow(model: nn.Module, adamw: AdamW) -> None:
    model[0].requires_grad_(False)  # type: ignore[index]
    optimizer = adamw(model.named_parameters())
    backward(model)
    optimizer.step()
    why = "in the middle of run '.*', whose parameters are sharded: .*Take it back on every rank; or make the change"
    refused(f"add_param_group.. {why}", lambda: optimizer.add_param_group({"params": nn.Parameter(torch.ones(3))}))
    model[0].requires_grad_(True)  # type: ignore[index]
    refused(f"parameter '0.weight' was added or unfrozen {why}", lambda: backward(model))
    model[0].requires_grad_(False)  # type: ignore[index]
    optimizer.param_groups[0]["eps"] = 1e-3
    refused(rf"eps of param_groups\[0\] changed from 1e-08 to 0.001 {why}", lambda: backward(model))
    optimizer.param_groups[0]["eps"] = 1e-8
    backward(model)
    optimizer.step()
    assert optimizer.run_status().steps_applied == 2 and optimizer.run_status().generation == 1


def test_a_forward_that_the_optimizer_has_not_seen_is_refused(model: nn.Module, adamw: AdamW) -> None:
    loss = model(torch.ones(2, 8)).sum()
    model.reshard()  # type: ignore[operator]
    adamw(model.named_parameters())
    refused("a forward that the optimizer has not seen", loss.backward)


def test_a_parameter_that_fsdp_has_gathered_is_refused(model: nn.Module, adamw: AdamW) -> None:
    loss = model(torch.ones(2, 8)).sum()
    adamw(model.named_parameters())
    refused("'.*' is what FSDP has gathered for a forward.*reshard", loss.backward)


def test_a_gradient_that_is_sharded_otherwise_is_refused(model: nn.Module, mesh: Any, adamw: AdamW) -> None:
    optimizer = adamw(model.named_parameters())
    parameter = next(model.parameters())
    parameter.grad = distribute_tensor(torch.zeros(parameter.shape), mesh, [Replicate()])
    refused("the gradient of '0.weight' is a DTensor with placements", optimizer.step)


def test_torch_is_as_it_was_afterwards(mesh: Any, none_open: None, adamw: AdamW) -> None:
    original = _fsdp_param.FSDPParam._init_sharded_param
    optimizer = adamw(layered(seed=1).named_parameters())
    assert _fsdp_param.FSDPParam._init_sharded_param is not original
    optimizer.close()
    assert _fsdp_param.FSDPParam._init_sharded_param is original
