"""torch.distributed: what of it is taken over, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import ballast
from ballast.sent_gradient import SentGradient
from models import layered

AdamW = Callable[..., ballast.AdamW]


@pytest.fixture
def process_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def wrapped(process_group: None) -> DDP:
    return DDP(layered(seed=1))


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(torch.ones(2, 8)).sum().backward()
    assert all(isinstance(p.grad, SentGradient) for p in module.parameters() if p.requires_grad)
    optimizer.step()


def applied(optimizer: ballast.AdamW) -> int:
    assert optimizer.last_result is not None and optimizer.last_result.applied
    return optimizer.last_result.step


def reduced_by(module: DDP) -> list[Any]:
    """Gives it a communication hook that leaves gradients as they are. Returns the buckets that it is to see."""
    seen: list[Any] = []

    def keep(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    module.register_comm_hook(None, lambda _, bucket: keep(bucket))
    return seen


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_a_module_in_ddp_does_not_reduce(
    options: dict[str, Any], process_group: None, adamw: AdamW, recwarn: pytest.WarningsRecorder
) -> None:
    module = DDP(layered(seed=1), **options)
    optimizer = adamw(module.named_parameters())
    for _ in range(3):
        step(module, optimizer)
    assert applied(optimizer) == 3
    assert [str(warning.message) for warning in recwarn] == []


def test_a_forward_before_the_optimizer_was_made_does_not_reduce(wrapped: DDP, adamw: AdamW) -> None:
    loss = wrapped(torch.ones(2, 8)).sum()
    optimizer = adamw(wrapped.named_parameters())
    loss.backward()
    assert all(isinstance(p.grad, SentGradient) for p in wrapped.parameters())
    optimizer.step()
    step(wrapped, optimizer)
    assert applied(optimizer) == 2


def test_who_prepares_the_reducer_by_hand_changes_nothing(wrapped: DDP, adamw: AdamW) -> None:
    optimizer = adamw(wrapped.named_parameters())
    loss = wrapped(torch.ones(2, 8)).sum()
    wrapped.reducer.prepare_for_backward([])
    loss.backward()
    assert all(isinstance(p.grad, SentGradient) for p in wrapped.parameters())


@pytest.mark.parametrize("options", [{}, {"static_graph": True}])
def test_a_closed_optimizers_module_reduces_again(options: dict[str, Any], process_group: None, adamw: AdamW) -> None:
    torchs_own = DDP.forward
    module = DDP(layered(seed=1), **options)
    optimizer = adamw(module.named_parameters())
    step(module, optimizer)
    assert DDP.forward is not torchs_own
    optimizer.close()
    assert DDP.forward is torchs_own
    buckets = reduced_by(module)
    module(torch.ones(2, 8)).sum().backward()
    assert buckets
    assert all(type(p.grad) is torch.Tensor for p in module.parameters())


def test_a_module_of_another_optimizer_reduces(wrapped: DDP, adamw: AdamW) -> None:
    other = DDP(layered(seed=2))
    buckets = reduced_by(other)
    optimizer = adamw(wrapped.named_parameters())
    step(wrapped, optimizer)
    other(torch.ones(2, 8)).sum().backward()
    assert buckets


def test_two_optimizers_may_share_a_module(wrapped: DDP, adamw: AdamW) -> None:
    named = list(wrapped.named_parameters())
    one = adamw(named[:2])
    one.connect()
    other = adamw(named[2:], run=f"{one.run}-other")
    for _ in range(2):
        step(wrapped, one)
        other.step()
    assert applied(one) == applied(other) == 2


# --- no_sync --------------------------------------------------------------------------------------------------------


def test_no_sync_without_accumulation_is_refused(wrapped: DDP, adamw: AdamW) -> None:
    optimizer = adamw(wrapped.named_parameters())
    message = "under no_sync.* in step 1.*gradient_accumulation_steps=1.*Give a larger one"
    with wrapped.no_sync(), pytest.raises(ballast.Rejected, match=message):
        wrapped(torch.ones(2, 8)).sum().backward()
    assert optimizer.last_result is None


def test_more_under_no_sync_than_a_step_may_have_are_refused(wrapped: DDP, adamw: AdamW) -> None:
    adamw(wrapped.named_parameters(), gradient_accumulation_steps=2)
    with wrapped.no_sync():
        wrapped(torch.ones(2, 8)).sum().backward()
        with pytest.raises(ballast.Rejected, match="gradient_accumulation_steps=2, and this is number 2"):
            wrapped(torch.ones(2, 8)).sum().backward()


def test_a_backward_after_the_one_outside_of_no_sync_is_refused(wrapped: DDP, adamw: AdamW) -> None:
    adamw(wrapped.named_parameters(), gradient_accumulation_steps=3)
    with wrapped.no_sync():
        wrapped(torch.ones(2, 8)).sum().backward()
    wrapped(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ballast.Rejected, match="second gradient in micro-batch 2 of step 1.*not under no_sync"):
        wrapped(torch.ones(2, 8)).sum().backward()


def test_accumulate_goes_before_no_sync(wrapped: DDP, adamw: AdamW) -> None:
    optimizer = adamw(wrapped.named_parameters(), gradient_accumulation_steps=2)
    with optimizer.accumulate(), wrapped.no_sync():
        wrapped(torch.ones(2, 8)).sum().backward()
    with optimizer.accumulate(final=True), wrapped.no_sync():
        wrapped(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert applied(optimizer) == 1


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(message: str, module: DDP, optimizer: ballast.AdamW) -> None:
    with pytest.raises(ballast.Rejected, match=message):
        module(torch.ones(2, 8))
    assert optimizer.last_result is None


def test_communication_hooks_are_refused(process_group: None, adamw: AdamW) -> None:
    ours, builtin = DDP(layered(seed=1)), DDP(layered(seed=2))
    reduced_by(ours)
    builtin._register_builtin_comm_hook(distributed.BuiltinCommHookType.ALLREDUCE)
    for module in (ours, builtin):
        with adamw(module.named_parameters()) as optimizer:
            refused("a communication hook.*gradient_dtype='bf16'", module, optimizer)


def test_a_communication_hook_that_comes_late_is_refused(wrapped: DDP, adamw: AdamW) -> None:
    optimizer = adamw(wrapped.named_parameters())
    wrapped(torch.ones(2, 8))
    reduced_by(wrapped)
    refused("a communication hook", wrapped, optimizer)


@pytest.mark.parametrize(
    "attribute, value, message",
    [
        ("mixed_precision", object(), "mixed_precision=.*torch.autocast"),
        ("_use_python_reducer", True, "optimize_ddp='python_reducer'"),
    ],
)
def test_options_that_reduce_otherwise_are_refused(
    attribute: str, value: object, message: str, wrapped: DDP, adamw: AdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapped, attribute, value)
    optimizer = adamw(wrapped.named_parameters())
    refused(message, wrapped, optimizer)
    with pytest.raises(ballast.Rejected, match=message):
        optimizer.connect()


@pytest.mark.parametrize("kept", [0, 1])
def test_delayed_reduction_is_refused(kept: int, process_group: None, adamw: AdamW) -> None:
    model = layered(seed=1)
    model[0].weight.requires_grad_(False)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    module = DDP(
        model, bucket_cap_mb=1, delay_all_reduce_named_params=named[kept:], param_to_hook_all_reduce=model[0].bias
    )
    refused("delay_all_reduce_named_params=", module, adamw(module.named_parameters()))


def test_an_optimizer_in_backward_is_refused(wrapped: DDP, adamw: AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next(wrapped.parameters()), "_in_backward_optimizers", [], raising=False)
    refused("apply_optimizer_in_backward", wrapped, adamw(wrapped.named_parameters()))


def test_join_is_refused(wrapped: DDP, adamw: AdamW) -> None:
    optimizer = adamw(wrapped.named_parameters())
    with pytest.raises(ballast.Rejected, match="join.*the same number of batches"), wrapped.join():
        wrapped(torch.ones(2, 8))
    with wrapped.join(enable=False):
        step(wrapped, optimizer)
    assert applied(optimizer) == 1


def test_another_world_than_the_runs_is_refused(wrapped: DDP, adamw: AdamW) -> None:
    optimizer = adamw(wrapped.named_parameters(), rank=0, world=2)
    refused("process group has 1 ranks, and the run has world=2", wrapped, optimizer)


def test_a_parameter_that_nobody_would_reduce_is_refused(wrapped: DDP, adamw: AdamW) -> None:
    named = list(wrapped.named_parameters())
    optimizer = adamw(named[1:])
    refused("'module.0.weight' .* is trained by no ballast optimizer", wrapped, optimizer)
    named[0][1].requires_grad_(False)
    step(wrapped, optimizer)
    assert applied(optimizer) == 1


def test_zero_redundancy_is_told_to_be_left_out(wrapped: DDP, adamw: AdamW) -> None:
    optimizer = adamw(list(wrapped.named_parameters())[1:])  # as one of several ranks is given them
    sharing = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=torch.optim.SGD)
    refused("ZeroRedundancyOptimizer .* leave it out", wrapped, optimizer)
    del sharing
    refused("Give it to a ballast optimizer", wrapped, optimizer)


def test_a_parameter_that_ddp_ignores_is_refused(process_group: None, adamw: AdamW) -> None:
    model = layered(seed=1)
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["1.bias"])
    module = DDP(model)
    refused("'1.bias' is one that a DistributedDataParallel module ignores", module, adamw(module.named_parameters()))


def numbers(optimizer: ballast.AdamW) -> tuple[int, int]:
    rank = optimizer._settings.rank
    return rank.number, rank.world


def test_rank_and_world_are_those_of_torch_distributed(adamw: AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 3)
    optimizer = adamw(layered(seed=1).named_parameters())
    assert numbers(optimizer) == (2, 3)
    given = adamw(layered(seed=1).named_parameters(), rank=0, world_size=1)
    assert numbers(given) == (0, 1)


def test_contradictory_and_strange_places_are_refused(adamw: AdamW) -> None:
    for options, message in (
        ({"world": 2, "world_size": 3}, "world=2 and world_size=3"),
        ({"world": 0}, "world=0: it must be a whole number of at least 1"),
        ({"world": 2}, "world=2 and no rank: give each process its own, from rank=0 to rank=1"),
        ({"rank": -1}, "rank=-1"),
        ({"rank": "0"}, "rank='0'"),
    ):
        with pytest.raises(ballast.Rejected, match=message):
            adamw(layered(seed=1).named_parameters(), **options)


@pytest.mark.parametrize("options", [{"rank": 1, "world": 2}, {"world": 1}, {"world_size": 1}, {"rank": 0}], ids=str)
def test_one_of_several_launched_processes_is_made_after_the_process_group_or_told_its_rank(
    options: dict[str, Any], adamw: AdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ballast.Rejected,
        match=r"2 processes \(WORLD_SIZE\).*init_process_group\(\).*TrainingArguments.*Accelerator\(\).*rank= and world=",
    ):
        adamw(layered(seed=1).named_parameters())
    place = numbers(adamw(layered(seed=1).named_parameters(), **options))
    assert place == (options.get("rank", 0), options.get("world", 1))


def test_a_process_group_of_one_needs_no_rank(
    process_group: None, adamw: AdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert numbers(adamw(layered(seed=1).named_parameters())) == (0, 1)


def test_ddp_of_a_group_that_was_made_after_the_optimizer_names_that(
    wrapped: DDP, adamw: AdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of processes that were launched without torchrun's variables."""
    with monkeypatch.context() as before:
        before.setattr(distributed, "is_initialized", lambda: False)
        optimizer = adamw(wrapped.named_parameters())
    monkeypatch.setattr(type(wrapped.process_group), "size", lambda _: 2)
    message = (
        r"2 ranks, and the run has world=1.*was not initialized when the optimizer was made.*init_process_group\(\)"
    )
    refused(message, wrapped, optimizer)


def test_processes_that_were_launched_and_do_not_know_their_ranks_are_told_so(
    adamw: AdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = adamw(layered(seed=1).named_parameters(), run="launched")
    first.connect()
    monkeypatch.setenv("WORLD_SIZE", "8")
    second = adamw(layered(seed=1).named_parameters(), run="launched", rank=0)
    with pytest.raises(
        ballast.Rejected, match=r"live session holds the rank.*8 processes.*init_process_group\(\) before"
    ):
        second.connect()
    first.close()
