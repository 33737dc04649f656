"""For whom a step waits: on the lines that are said of long waits, and in the run's status."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from ballast import progress
from ballast.awaited import AwaitedRanks
from daemon import Daemon
from models import layered, until
from proxy import Proxy

Make = Callable[..., Any]


class Lines:
    """What was said on stderr so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self._capsys = capsys
        self.text = ""

    def until(self, *words: str) -> None:
        def said() -> bool:
            self.text += self._capsys.readouterr().err
            return any(all(word in line for word in words) for line in self.text.splitlines())

        until(said)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lines:
    monkeypatch.setattr(progress, "_LINE_AFTER_S", 0.2)
    return Lines(capsys)


def team(make: Make, world: int, **options: Any) -> list[tuple[nn.Module, ballast.SGD]]:
    options = {"lr": 0.1, "world": world, "rank_timeout": 5.0, **options}
    models = [layered(seed=1) for _ in range(world)]
    return [(m, make(ballast.SGD, m.named_parameters(), rank=rank, **options)) for rank, m in enumerate(models)]


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


def train(model: nn.Module, optimizer: ballast.SGD) -> None:
    backward(model)
    optimizer.step()


def clip(model: nn.Module, optimizer: ballast.SGD) -> None:
    backward(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def train_overlapped(model: nn.Module, optimizer: ballast.SGD) -> None:
    """The next forward waits."""
    train(model, optimizer)
    model(torch.ones(2, 8))


@contextmanager
def beside(*work: Callable[[], None], late: ballast.SGD) -> Iterator[None]:
    """Within it this goes on, and waits for what rank `late` does there."""
    with ThreadPoolExecutor(len(work)) as pool:
        done = [pool.submit(one) for one in work]
        try:
            yield
        except BaseException:
            late.close()  # else the others would wait for ever
            raise
        for one in done:
            one.result(timeout=120)


@pytest.mark.parametrize("work", [train, clip, train_overlapped])
def test_a_line_names_the_rank_that_has_not_begun_the_step(
    work: Callable[[nn.Module, ballast.SGD], None], make: Make, run: str, lines: Lines
) -> None:
    options = {"commit": "staged"} if work is clip else {"overlap_forward": work is train_overlapped}
    ours, (model, late) = team(make, 2, **options)
    with beside(lambda: work(*ours), late=late):
        late.connect()  # and evaluates, say
        lines.until(f"step 1 of run '{run}': waiting for rank 1 (has not begun it, for ", "s; connected)")
        lines.until("step_timeout=SECONDS", "optimizer.in_step(loader)")
        (awaited,) = late.run_status().awaited
        assert (awaited.rank, awaited.what, awaited.connected) == (1, "has not begun it", True)
        assert awaited.seconds > 1
        work(model, late)
    assert late.last_result is not None and late.last_result.applied


def test_a_line_names_the_first_tensor_that_is_lacking(make: Make, lines: Lines) -> None:
    ours, (model, late) = team(make, 2)
    with beside(lambda: train(*ours), late=late):
        assert isinstance(model, nn.Sequential)
        backward(model[2])
        lines.until("waiting for rank 1 (lacks 4 of 6 tensors in micro-batch 0, the first tensor 0 '0.weight', for ")
        late.step()
    assert late.last_result is not None and late.last_result.applied


def test_a_rank_that_no_process_has_attached_to_is_named(make: Make, lines: Lines) -> None:
    ours, (model, late) = team(make, 2, rank_timeout=120.0)
    with beside(lambda: train(*ours), late=late):
        lines.until("waiting for rank 1 (has no process yet, for ", "s; not connected)")
        train(model, late)
    assert late.last_result is not None and late.last_result.applied


def test_a_rank_that_is_out_of_reach_is_named(make: Make, daemon: Daemon, lines: Lines) -> None:
    with Proxy(daemon.server) as link:
        far = {"rank_timeout": 120.0, "reconnect_timeout": 120.0, "transport": "grpc"}
        near = layered(seed=1)
        ours = near, make(ballast.SGD, near.named_parameters(), 0.1, rank=0, world=2, **far)
        model = layered(seed=1)
        late = make(ballast.SGD, model.named_parameters(), 0.1, rank=1, world=2, server=link.server, **far)
        with beside(lambda: train(*ours), late=late):
            late.connect()
            link.leave()
            lines.until("waiting for rank 1 (has not begun it, for ", "s; not connected)")
            link.come_back()
            train(model, late)
        assert late.last_result is not None and late.last_result.applied


def test_of_eight_ranks_the_one_that_is_late_is_named(make: Make, lines: Lines) -> None:
    ranks = team(make, 8)
    model, late = ranks.pop(5)
    with beside(*(lambda rank=rank: train(*rank) for rank in ranks), late=late):
        late.connect()
        lines.until("waiting for rank 5 (has not begun it, for ", "s; connected)")
        until(lambda: [rank.rank for rank in late.run_status().awaited] == [5])
        train(model, late)
    assert late.last_result is not None and late.last_result.applied


def test_what_each_rank_gets_after_step_timeout_names_the_rank_and_the_option(make: Make) -> None:
    ours, (model, late) = team(make, 2, step_timeout=1.5, commit="staged")
    with beside(lambda: train(*ours), late=late):
        assert isinstance(model, nn.Sequential)
        backward(model[2])
    says = "step 1 waited for ranks for longer than step_timeout, 1.5 s: rank 1 lacks 4 of 6 tensors in micro-batch 0"
    with pytest.warns(UserWarning, match=says):
        late.step()
    for result in (ours[1].last_result, late.last_result):
        assert result is not None and (result.outcome, result.reason) == ("ABORTED", "timeout")
        assert says in result.detail and result.detail.endswith("create the run with a larger step_timeout")


# --- the words -------------------------------------------------------------------------------------------------------


def ranks(*numbers: int) -> dict[str, Any]:
    late = [{"rank": rank, "what": "has not sent StepEnd", "seconds": 12.4, "connected": True} for rank in numbers]
    return {"step": 40, "awaited": late}


def of_rank_0(status: Any, step_timeout: float | None = None) -> AwaitedRanks:
    return AwaitedRanks("r", 0, step_timeout, status if callable(status) else lambda: status)


def test_four_are_named_and_the_others_counted() -> None:
    told = of_rank_0(ranks(0, 1, 2, 3, 4, 5, 6), 30.0).tell("its end", 41)
    assert told.startswith(
        "step 41 of run 'r': waiting for rank 1 (has not called step(), for 12 s; connected); rank 2 ("
    )
    assert "rank 4 (" in told and "rank 5" not in told and "; and 2 more. " in told
    assert told.endswith("The step ends without them after step_timeout=30 seconds")


def test_what_can_be_done_is_said_once() -> None:
    others = of_rank_0(ranks(1))
    assert "step_timeout=SECONDS" in others.tell("its end", 41)
    assert others.tell("its end", 41).endswith("for 12 s; connected)")


@pytest.mark.parametrize("status", [ranks(), ranks(0), {**ranks(1), "step": 41}], ids=["nobody", "itself", "closed"])
def test_where_the_daemon_waits_for_no_other_nobody_is_named(status: dict[str, Any]) -> None:
    assert of_rank_0(status).tell("its end", 41) == "step 41 of run 'r': waiting for its end"


def test_a_daemon_that_does_not_answer_is_no_error_of_the_wait() -> None:
    def status() -> Any:
        raise ballast.Unavailable("the daemon is gone")

    told = of_rank_0(status).tell("its end", 41)
    assert told == "step 41 of run 'r': waiting for its end; the daemon does not say who is late: the daemon is gone"
