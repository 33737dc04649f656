"""Readers that follow a run in another format than it is served in, beside runs that serve it and get the same gradients."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from daemon import BINARY, Daemon, Daemons
from models import perceptron, same_bits, weights_of
from side_by_side import side_by_side

LONG_S = 60.0
BALLASTCTL = BINARY.parents[1] / "client" / "cpp" / "ballastctl"
FORMATS = ("bf16", "fp8-e4m3", "int8-row", "int8-tensor")


@pytest.fixture
def one() -> Iterator[Daemon]:
    """One that has all of a run, whatever --daemons says."""
    with Daemon() as started:
        yield started


@pytest.fixture(params=[1, 3], ids=["one daemon", "three daemons"])
def some(request: pytest.FixtureRequest) -> Iterator[Daemons]:
    with Daemons(request.param) as started:
        yield started


def begun(format: str = "fp32") -> nn.Module:
    """Weights that bf16 has, in that format where torch computes in it."""
    module = perceptron(1).to(torch.bfloat16)
    return module if format == "bf16" else module.to(torch.float32)


def serving(format: str) -> dict[str, str]:
    """The options with which a run of such weights serves them so."""
    return {} if format == "bf16" else {"serving": format}


def optimizer_of(module: nn.Module, one: Daemon | Daemons, run: str, **options: Any) -> ballast.AdamW:
    return ballast.AdamW(module.named_parameters(), lr=1e-3, server=one.server, run=run, **options)


def nudge(module: nn.Module, optimizer: ballast.AdamW, step: int, rank: int = 0) -> None:
    """A step whose gradients are the same whatever weights the module has; bf16 has them."""
    for number, parameter in enumerate(module.parameters()):
        random = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
        parameter.grad = torch.randn(parameter.shape, generator=random).to(torch.bfloat16).to(parameter.dtype)
    optimizer.step()


def reach(reader: ballast.Subscriber, step: int, generation: int = 1) -> ballast.Version:
    while (version := reader.next(LONG_S)) is not None:
        if version.step == step and version.generation == generation:
            return version
    raise AssertionError(f"no version of step {step} in generation {generation}")


def assert_same(version: ballast.Version, twin: nn.Module) -> None:
    for name, weights in twin.named_parameters():
        assert version.tensors[name].dtype == weights.dtype
        assert torch.equal(version.tensors[name], weights), name


class Twins:
    """A run that is followed in formats, and for each format one that serves it, of the same gradients."""

    def __init__(self, stack: ExitStack, one: Daemon | Daemons, run: str, formats: tuple[str, ...], **options: Any):
        follow = ballast.Follow(formats=formats)
        self.where: dict[str, Any] = {"server": one.server, "run": run}
        self.trained = begun()
        self.optimizer = stack.enter_context(optimizer_of(self.trained, one, run, follow=follow, **options))
        self.of_format = {format: begun(format) for format in formats}
        self._optimizers = {
            format: stack.enter_context(optimizer_of(twin, one, f"{run}-{format}", **serving(format), **options))
            for format, twin in self.of_format.items()
        }
        self._stack = stack

    def step(self, number: int) -> None:
        nudge(self.trained, self.optimizer, number)
        for format, twin in self.of_format.items():
            nudge(twin, self._optimizers[format], number)

    def rewind(self, to: int) -> None:
        for optimizer in (self.optimizer, *self._optimizers.values()):
            assert optimizer.rewind(to=to) == to

    def reader(self, format: str | None = None) -> ballast.Subscriber:
        return self._stack.enter_context(ballast.Subscriber(**self.where, format=format))


def test_readers_get_what_runs_serve_that_have_their_formats(some: Daemons) -> None:
    with ExitStack() as stack:
        twins = Twins(stack, some, "formats", FORMATS)
        twins.step(1)
        readers, served = {format: twins.reader(format) for format in FORMATS}, twins.reader()
        for step in range(1, 7):
            if step > 1:
                twins.step(step)
            assert_same(reach(served, step), twins.trained)
            for format, reader in readers.items():
                assert_same(reach(reader, step), twins.of_format[format])


def test_they_go_back_with_the_run_and_may_come_again(some: Daemons) -> None:
    generation = 1 + len(some.each)  # that of each daemon, less one, and one
    with ExitStack() as stack:
        twins = Twins(stack, some, "formats-back", ("bf16", "int8-row"), snapshots=2, snapshot_every=2)
        for step in range(1, 6):
            twins.step(step)
        readers = {format: twins.reader(format) for format in twins.of_format}
        for reader in readers.values():
            reach(reader, 5)
        twins.rewind(to=4)
        for format, reader in readers.items():
            assert_same(reach(reader, 4, generation), twins.of_format[format])
            assert_same(reach(twins.reader(format), 4, generation), twins.of_format[format])
        twins.step(5)
        for format, reader in readers.items():
            assert_same(reach(reader, 5, generation), twins.of_format[format])


def test_a_module_in_bfloat16_follows_a_run_in_float32(one: Daemon) -> None:
    with ExitStack() as stack:
        twins = Twins(stack, one, "formats-module", ("bf16", "fp8-e4m3"))
        twins.step(1)
        half, whole = perceptron(2).to(torch.bfloat16), perceptron(2)
        follower = stack.enter_context(ballast.follow(half, **twins.where, format="bf16"))
        quarter = stack.enter_context(ballast.follow(whole, **twins.where, format="fp8-e4m3"))
        for step in range(2, 6):
            twins.step(step)
            assert follower.wait(step=step, timeout=LONG_S) and quarter.wait(step=step, timeout=LONG_S)
            assert same_bits(weights_of(half), weights_of(twins.of_format["bf16"]))
            assert same_bits(weights_of(whole), weights_of(twins.of_format["fp8-e4m3"]))
        with pytest.raises(ballast.Rejected, match=r"or follow it in that dtype \(format='bf16'\)"):
            ballast.follow(perceptron(2).to(torch.bfloat16), **twins.where)


def test_patches_keep_a_copy_up_to_date(one: Daemon) -> None:
    with ExitStack() as stack:
        twins = Twins(stack, one, "formats-patches", ("bf16",))
        twins.step(1)
        reader = stack.enter_context(ballast.Subscriber(**twins.where, format="bf16", patches=True))
        copy: dict[str, torch.Tensor] = {}
        for step in range(1, 5):
            if step > 1:
                twins.step(step)
            reach(reader, step)
            for name, shape, dtype, values, indices in reader.patches():
                assert dtype == torch.bfloat16
                if indices is None:
                    copy[name] = values.reshape(shape)
                else:
                    copy[name].view(-1).index_copy_(0, indices, values)
            for name, weights in twins.of_format["bf16"].named_parameters():
                assert torch.equal(copy[name], weights), name


def test_two_ranks_are_followed_as_one(one: Daemon) -> None:
    def rank(number: int, run: str, module: nn.Module, **options: Any) -> nn.Module:
        with optimizer_of(module, one, run, rank=number, world=2, **options) as optimizer:
            for step in range(1, 5):
                nudge(module, optimizer, step, rank=number)
        return module

    follow = ballast.Follow(formats=("bf16",))
    side_by_side(2, lambda number: rank(number, "formats-ranks", begun(), follow=follow))
    twin, _ = side_by_side(2, lambda number: rank(number, "formats-ranks-bf16", begun("bf16")))
    with ballast.Subscriber(one.server, "formats-ranks", format="bf16") as reader:
        assert_same(reach(reader, 4), twin)


def test_a_daemon_that_is_started_again_goes_on(tmp_path: Path) -> None:
    follow = ballast.Follow(formats=("bf16",))
    trained = begun()
    with Daemon(storage=tmp_path) as daemon:
        with optimizer_of(trained, daemon, "kept", follow=follow, master="fp32") as optimizer:
            nudge(trained, optimizer, 1)
            optimizer.checkpoint()
    with (
        Daemon(storage=tmp_path) as daemon,
        ballast.Subscriber(daemon.server, "kept", format="bf16") as reader,
    ):
        version = reader.next(LONG_S)
        assert version is not None and version.step == 1
        for name, weights in trained.named_parameters():
            assert torch.equal(version.tensors[name], weights.detach().to(torch.bfloat16)), name


def test_ballastctl_writes_it(one: Daemon, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    with ExitStack() as stack:
        twins = Twins(stack, one, "formats-files", ("bf16",))
        twins.step(1)
        command = [BALLASTCTL, "--server", one.server, "follow", "formats-files", "--out", tmp_path, "--versions", "1"]
        subprocess.run([*command, "--format", "bf16"], check=True, timeout=LONG_S, capture_output=True)
        loaded = safetensors.load_file(tmp_path / "step-1.safetensors")
        for name, weights in twins.of_format["bf16"].named_parameters():
            assert loaded[name].dtype == torch.bfloat16 and torch.equal(loaded[name], weights), name
        wrong = subprocess.run([*command, "--format", "fp16"], capture_output=True, text=True, timeout=LONG_S)
        assert wrong.returncode != 0 and "or in bf16" in wrong.stderr
        told = subprocess.run([*command[:3], "run", "formats-files"], capture_output=True, text=True, timeout=LONG_S)
        assert re.search(r"^in formats +as served, bf16$", told.stdout, re.MULTILINE), told.stdout


def test_what_cannot_be_followed_is_refused_by_name(one: Daemon) -> None:
    with ExitStack() as stack:
        twins = Twins(stack, one, "formats-refused", ("bf16",))
        twins.step(1)
        with pytest.raises(
            ballast.Rejected, match="in format 'fp16': readers may follow it as it is served, or in bf16"
        ):
            twins.reader("fp16")
        with pytest.raises(ballast.Rejected, match="'bf17', which this client does not know"):
            twins.reader("bf17")
        with pytest.raises(ballast.Rejected, match="an average is followed as the weights are served"):
            ballast.Subscriber(**twins.where, format="bf16", average=0.9)
        with pytest.raises(ballast.Rejected, match="names are of versions of the weights as they are served"):
            twins.reader("bf16").rollback("best")
        assert_same(reach(twins.reader("fp32"), 1), twins.trained)  # which it is served in
        optimizer = optimizer_of(perceptron(1), one, "formats-unknown", follow=ballast.Follow(formats="bf17"))
        with optimizer, pytest.raises(ballast.Rejected, match=r"formats\[0\] of ballast.Follow is 'bf17'; valid: fp32"):
            optimizer.connect()
    for given in ("", 1, [1], {"bf16": 1}):
        with pytest.raises(ballast.Rejected, match=r"Follow\(formats="):
            ballast.Follow(formats=given)  # type: ignore[arg-type]
    for given in ("", 1):
        with pytest.raises(ballast.Rejected, match="format="):
            ballast.Subscriber("127.0.0.1:1", "formats", format=given)  # type: ignore[arg-type]
