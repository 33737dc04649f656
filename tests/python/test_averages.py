"""Averages of the weights that the daemon keeps (option `ema`), held against torch's AveragedModel."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ballast
from ballast import checkpoint, numerics
from daemon import BINARY, Daemon
from document_averages import begun, moved
from durable import checkpoints
from models import layered
from torchs_average import TorchsAverage

BALLASTCTL = BINARY.parents[1] / "client" / "cpp" / "ballastctl"
DECAYS = (0.9, 0.999)
# Weights that the trainer has whole, so that torch averages what the daemon does.
EXACT = {"master": "fp32", "state": "fp32"}


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(
        4,
        next(model.parameters()).shape[1],
        generator=torch.Generator().manual_seed(number),
        dtype=next(model.parameters()).dtype,
    )
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_it_is_torchs_average_within_the_stated_error(make: Callable[..., Any]) -> None:
    model = layered(seed=1)
    optimizer = make(ballast.AdamW, model.named_parameters(), lr=0.01, ema=DECAYS, **EXACT)
    theirs = [TorchsAverage(model, decay) for decay in DECAYS]
    for number in range(40):
        step(model, optimizer, number)
        for one in theirs:
            one.update(model)
    for one in theirs:
        averaged = optimizer.averaged(one.decay)
        assert list(averaged) == [name for name, _ in model.named_parameters()]
        one.check(averaged)


def test_the_first_step_makes_it_a_copy_of_the_weights(make: Callable[..., Any]) -> None:
    model = layered(seed=1)
    optimizer = make(ballast.AdamW, model.named_parameters(), lr=0.01, ema=0.5)
    optimizer.connect()
    step(model, optimizer, 0)
    state = optimizer.averaged()
    for name, p in model.named_parameters():
        assert torch.allclose(state[name], p.detach(), rtol=2.0**-15, atol=0)
    step(model, optimizer, 1)
    assert any(not torch.equal(a, p.detach()) for a, p in zip(optimizer.averaged(0.5).values(), model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_parameters_have_it_within_the_block_and_their_weights_after_it(
    make: Callable[..., Any], dtype: torch.dtype
) -> None:
    def trained(evaluates: bool) -> list[Tensor]:
        model = layered(seed=1).to(dtype)
        optimizer = make(ballast.AdamW, model.named_parameters(), lr=0.01, ema=[0.9], start_over=True)
        for number in range(6):
            step(model, optimizer, number)
            if not evaluates:
                continue
            before = [p.detach().clone() for p in model.parameters()]
            averaged = optimizer.averaged(0.9)
            with optimizer.average(0.9):
                for name, p in model.named_parameters():
                    assert torch.equal(p.detach(), averaged[name].to(dtype)), name
            assert all(torch.equal(a, p.detach()) for a, p in zip(before, model.parameters()))
        optimizer.close()
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False)))


def test_weights_come_back_after_an_error(make: Callable[..., Any]) -> None:
    model = layered(seed=1)
    optimizer = make(ballast.AdamW, model.named_parameters(), lr=0.01, ema=[0.9])
    for number in range(3):
        step(model, optimizer, number)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ZeroDivisionError), optimizer.average():
        _ = 1 / 0
    assert all(torch.equal(a, p.detach()) for a, p in zip(before, model.parameters()))


def test_nothing_is_trained_within_the_block(make: Callable[..., Any]) -> None:
    model = layered(seed=1)
    optimizer = make(ballast.AdamW, model.named_parameters(), lr=0.01, ema=[0.9], snapshots=1, snapshot_every=1)
    step(model, optimizer, 0)
    with optimizer.average():
        with pytest.raises(ballast.Rejected, match=r"a gradient was made within average\(0.9\)"):
            step(model, optimizer, 1)
        with pytest.raises(ballast.Rejected, match=r"average\(\) within average\(0.9\)"), optimizer.average():
            pass
    optimizer.zero_grad()
    step(model, optimizer, 1)
    assert optimizer.last_result.step == 2


def test_a_pull_or_a_rewind_ends_the_block(make: Callable[..., Any]) -> None:
    model = layered(seed=1)
    optimizer = make(ballast.AdamW, model.named_parameters(), lr=0.01, ema=[0.9], snapshots=3, snapshot_every=1)
    of_step = []
    for number in range(3):
        step(model, optimizer, number)
        of_step.append([p.detach().clone() for p in model.parameters()])
    for end, wanted in ((optimizer.pull, 2), (lambda: optimizer.rewind(to=2), 1)):
        with optimizer.average():
            end()
            assert all(torch.equal(a, p.detach()) for a, p in zip(of_step[wanted], model.parameters()))
        assert all(torch.equal(a, p.detach()) for a, p in zip(of_step[wanted], model.parameters()))
    step(model, optimizer, 2)
    assert all(torch.equal(a, p.detach()) for a, p in zip(of_step[2], model.parameters()))


def test_weights_that_were_changed_are_seen_all_the_same(make: Callable[..., Any]) -> None:
    model = layered(seed=1)
    optimizer = make(ballast.AdamW, model.named_parameters(), lr=0.01, ema=[0.9])
    step(model, optimizer, 0)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with optimizer.average():
        pass
    with pytest.raises(ballast.Rejected, match="changed"):
        step(model, optimizer, 1)


def test_a_rewind_takes_the_average_back(make: Callable[..., Any]) -> None:
    model = layered(seed=1)
    optimizer = make(ballast.AdamW, model.named_parameters(), lr=0.01, ema=[0.9], snapshots=2, snapshot_every=1)
    of_step = []
    for number in range(4):
        step(model, optimizer, number)
        of_step.append(optimizer.averaged())
    optimizer.rewind(to=3)
    assert all(torch.equal(a, b) for a, b in zip(optimizer.averaged().values(), of_step[2].values()))
    step(model, optimizer, 3)
    assert all(torch.equal(a, b) for a, b in zip(optimizer.averaged().values(), of_step[3].values()))


def test_what_cannot_be_averaged_is_refused_by_name(make: Callable[..., Any]) -> None:
    for given in (1.0, 0.0, -0.5, True, "0.9", [0.9, 0.9], [0.1, 0.2, 0.3, 0.4, 0.5]):
        with pytest.raises(ballast.Rejected, match="ema="):
            make(ballast.AdamW, layered(seed=1).named_parameters(), ema=given)
    model = layered(seed=1)
    none = make(ballast.AdamW, model.named_parameters())
    with pytest.raises(ballast.Rejected, match="which average: name its decay; it keeps none"):
        none.averaged()
    model = layered(seed=1)
    two = make(ballast.AdamW, model.named_parameters(), ema=DECAYS)
    step(model, two, 0)
    with pytest.raises(ballast.Rejected, match=r"name its decay; it keeps \[0.9, 0.999\]"):
        two.averaged()
    with pytest.raises(ballast.Rejected, match="no average with the decay 0.99;"):
        two.averaged(0.99)
    model(torch.randn(4, 8)).sum().backward()
    for read in (lambda: two.averaged(0.9), lambda: two.average(0.9).__enter__()):
        with pytest.raises(ballast.Rejected, match="step 2 is open: call step"):
            read()


def test_its_bits_are_those_of_the_document(make: Callable[..., Any]) -> None:
    model = layered(seed=1, width=40)
    optimizer = make(ballast.AdamW, model.named_parameters(), lr=0.01, ema=DECAYS, **EXACT)
    averages: dict[tuple[str, float], np.ndarray] = {}
    for number in range(1, 6):
        step(model, optimizer, number)
        for decay in DECAYS:
            averaged = optimizer.averaged(decay)
            for name, p in model.named_parameters():
                w, key = p.detach().numpy().ravel(), numerics.tensor_key(name)
                before = averages.get((name, decay))
                wanted = begun(w) if before is None else moved(before, w, decay, key, number)
                averages[name, decay] = wanted
                assert np.array_equal(averaged[name].numpy().ravel(), wanted), (name, decay, number)


@pytest.fixture
def mesh() -> Iterator[Any]:
    gc.collect()  # of the groups before
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_of_a_sharded_parameter_there_is_a_part_and_no_block(mesh: Any, make: Callable[..., Any]) -> None:
    def train(model: torch.nn.Module) -> Any:
        optimizer = make(ballast.AdamW, model.named_parameters(), lr=0.01, ema=[0.9], start_over=True)
        for number in range(4):
            step(model, optimizer, number)
        return optimizer

    sharded = train(fully_shard(layered(seed=1), mesh=mesh))
    of_parts = sharded.averaged()
    with pytest.raises(ballast.Rejected, match=r"average\(\) of parameter '0.weight', which is sharded.*averaged\(\)"):
        with sharded.average():
            pass
    sharded.close()
    whole = train(layered(seed=1)).averaged()
    for name, average in of_parts.items():
        assert isinstance(average, DTensor)
        assert torch.equal(average.full_tensor(), whole[name])


def test_a_checkpoint_has_it(tmp_path: Path) -> None:
    model = layered(seed=1)
    with Daemon(storage=tmp_path) as daemon:
        with ballast.AdamW(
            model.named_parameters(), server=daemon.server, run="kept", lr=0.01, ema=DECAYS
        ) as optimizer:
            for number in range(3):
                step(model, optimizer, number)
            optimizer.checkpoint()
            averaged = {decay: optimizer.averaged(decay) for decay in DECAYS}
    kept = checkpoint.open(checkpoints(tmp_path, "kept")[-1])
    assert kept.verify() == ()
    assert kept.planes("0.weight")[-4:] == ("average0.hi", "average0.lo", "average1.hi", "average1.lo")
    for decay in DECAYS:
        for name, average in averaged[decay].items():
            assert np.array_equal(kept.average(name, decay), average.numpy()), (name, decay)
    with pytest.raises(KeyError, match="no average with the decay 0.99"):
        kept.average("0.weight", 0.99)
    verify = subprocess.run([BALLASTCTL, "verify", kept.folder], capture_output=True, text=True)
    assert verify.returncode == 0, verify.stderr + verify.stdout
    with (
        Daemon(storage=tmp_path) as daemon,
        ballast.AdamW(model.named_parameters(), server=daemon.server, run="kept", lr=0.01, ema=DECAYS) as optimizer,
    ):
        optimizer.connect()
        for decay in DECAYS:
            for name, average in optimizer.averaged(decay).items():
                assert torch.equal(average, averaged[decay][name])


def test_readers_follow_it_as_they_follow_the_weights() -> None:
    model, evaluated = layered(seed=1), layered(seed=2)
    follow = ballast.Follow(averages=True)
    with Daemon() as daemon:
        where = {"server": daemon.server, "run": "averaged"}
        with ballast.AdamW(model.named_parameters(), lr=0.01, ema=[0.9], follow=follow, **where) as optimizer:
            step(model, optimizer, 1)
            with (
                ballast.Subscriber(**where, average=0.9) as reader,
                ballast.Subscriber(**where) as of_weights,
                ballast.follow(evaluated, **where, average=0.9) as follower,
            ):
                for number in range(2, 6):
                    step(model, optimizer, number)
                    averaged = optimizer.averaged()
                    assert follower.wait(step=number, timeout=60)
                    while (average := next(reader)).step < number:
                        pass
                    while (version := next(of_weights)).step < number:
                        pass
                    for name, p in model.named_parameters():
                        assert torch.equal(version.tensors[name], p.detach())
                        assert torch.equal(average.tensors[name], averaged[name])
                        assert torch.equal(evaluated.get_parameter(name).detach(), averaged[name])
            with pytest.raises(
                ballast.Rejected, match="no average with the decay 0.99 that may be followed: it keeps 0.9"
            ):
                ballast.Subscriber(**where, average=0.99)
        with ballast.AdamW(
            layered(seed=1).named_parameters(), server=daemon.server, run="alone", ema=[0.9], follow=True
        ) as optimizer:
            optimizer.connect()
            with pytest.raises(ballast.Rejected, match="its follow is for the weights alone"):
                ballast.Subscriber(daemon.server, "alone", average=0.9)
    for given in (True, "0.9", 1):
        with pytest.raises(ballast.Rejected, match="average="):
            ballast.Subscriber("127.0.0.1:1", "averaged", average=given)  # type: ignore[arg-type]
