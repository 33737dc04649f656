"""What is lost, and how the trainer hears of it."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from ballast import _core, runs
from conftest import Program
from daemon import Daemon
from models import layered, same_bits, until, weights_of
from proxy import Proxy

AdamW = Callable[..., ballast.AdamW]


def test_a_daemon_killed_in_a_step_is_named_within_seconds(run: str) -> None:
    model = layered(seed=1)
    with Daemon() as doomed:
        optimizer = ballast.AdamW(model.named_parameters(), server=doomed.server, run=run, reconnect_timeout=1)
        model(torch.ones(2, 8)).sum().backward()
        doomed.kill()
        started = time.monotonic()
        with pytest.raises(ballast.Unavailable, match=f"{doomed.server} in step 1 .*see its log"):
            # What was sent before the kill may have been answered in full; then the next step fails.
            optimizer.step()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        assert time.monotonic() - started < 30  # some 2 s, and what a busy machine adds
        with pytest.raises(ballast.Unavailable, match=doomed.server):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        started = time.monotonic()
        optimizer.close()
        assert time.monotonic() - started < 30


def test_a_daemon_that_was_restarted_says_so(run: str) -> None:
    model = layered(seed=1)
    with Daemon() as first:
        optimizer = ballast.AdamW(model.named_parameters(), server=first.server, run=run, reconnect_timeout=60)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        first.kill()
        with Daemon(first.port):
            with pytest.raises(ballast.Rejected, match="restarted and no longer holds run"):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
        optimizer.close()


def test_ctrl_c_ends_the_wait_and_the_step_can_be_waited_for_again(run: str, program: Callable[..., object]) -> None:
    with Daemon() as daemon:
        trainer = program("interrupted", daemon.server)
        assert trainer.hear() == "backward done"
        daemon.freeze()
        trainer.go_on()
        assert trainer.hear() == "waiting"
        trainer.send(signal.SIGINT)
        while (word := trainer.hear()) == "waiting":
            pass
        assert word == "interrupted"
        daemon.thaw()
        trainer.go_on()
        assert trainer.hear() == "step 1 APPLIED"
        assert trainer.end() == 0


def test_ctrl_c_ends_an_upload_that_waits_for_the_daemon(run: str, program: Callable[..., object]) -> None:
    with Daemon() as daemon:
        trainer = program("uploads", daemon.server)
        assert trainer.hear() == "attached"
        daemon.kill()
        trainer.go_on()
        assert trainer.hear() == "uploads"
        trainer.send(signal.SIGINT)
        assert trainer.hear() == "interrupted"
        assert trainer.end() == 0


def test_a_trainer_killed_in_a_step_leaves_a_run_that_another_goes_on_with(
    run: str, daemon: Daemon, program: Callable[..., object]
) -> None:
    trainer = program("torn")
    assert trainer.hear() == "pushed"
    trainer.send(signal.SIGKILL)
    trainer.end()
    model, initial = layered(seed=2), layered(seed=1)
    with ballast.AdamW(model.named_parameters(), server=daemon.server, run=run, weights="server") as optimizer:
        torn = optimizer.last_result
        assert torn is not None
        assert (torn.step, torn.outcome, torn.reason, torn.applied) == (1, "PARTIAL", "restarted", False)
        assert set(torn.not_applied) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert not torch.equal(model[2].weight, initial[2].weight)
        torch.testing.assert_close(model[0].weight, initial[0].weight, rtol=2**-15, atol=0)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert optimizer.last_result is not None
        assert (optimizer.last_result.step, optimizer.last_result.outcome) == (2, "APPLIED")


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.95])
def test_a_cut_connection_changes_no_bit(share: float, run: str, daemon: Daemon) -> None:
    def train(server: str, name: str, before_step: Callable[[int], None]) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 65536), nn.Linear(65536, 8))  # chunks of several tensors on their way
        with ballast.AdamW(model.named_parameters(), server=server, run=name, transport="grpc") as optimizer:
            for step in range(3):
                before_step(step)
                model(torch.ones(2, 8)).square().mean().backward()
                optimizer.step()
            assert optimizer.last_result is not None and optimizer.last_result.applied
            return weights_of(model), optimizer.last_result.step

    whole = 4 * (2 * 8 * 65536 + 65536 + 8)
    with Proxy(daemon.server) as proxy:
        cut, step = train(proxy.server, run, lambda s: proxy.cut_after(int(share * whole)) if s == 1 else None)
        assert proxy.was_cut.is_set() and proxy.connections > 1
    assert step == 3
    uncut, _ = train(daemon.server, f"{run}-uncut", lambda _: None)
    assert same_bits(cut, uncut)


def test_a_connection_that_died_before_the_first_gradient_is_made_anew(run: str, daemon: Daemon) -> None:
    model = layered(seed=1)
    with Proxy(daemon.server) as proxy:
        with ballast.AdamW(model.named_parameters(), server=proxy.server, run=run) as optimizer:
            proxy.cut()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            assert optimizer.last_result is not None and optimizer.last_result.applied
        assert proxy.connections == 2


def killed_beside_its_fork(program: Callable[..., Program]) -> Program:
    trainer = program("leaves_a_fork")
    assert trainer.hear() == "forked"
    trainer.send(signal.SIGKILL)
    trainer.end()
    return trainer


# To the daemon it is alive until its pings are missed, or the fork ends.
def test_a_killed_trainer_whose_fork_keeps_the_connection_is_followed_by_the_next(
    run: str, adamw: AdamW, program: Callable[..., Program], capfd: pytest.CaptureFixture[str]
) -> None:
    killed = killed_beside_its_fork(program)
    said: list[str] = []

    def told() -> bool:
        said.append(capfd.readouterr().err)
        return f"of run '{run}' is held by" in "".join(said)

    with ThreadPoolExecutor() as pool:
        connected = pool.submit(adamw, layered(seed=1).named_parameters(), weights="server")
        until(told)
        killed.go_on()
        assert connected.result().run_status().step == 1


def test_a_run_is_started_over_whose_killed_trainers_fork_keeps_the_connection(
    adamw: AdamW, program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = killed_beside_its_fork(program)
    looks, connected = [], runs._connected

    def ends_the_fork(*whose: Any) -> bool:
        looks.append(connected(*whose))
        if looks[1:2] == [True] and len(looks) == 2:
            killed.go_on()
        return looks[-1]

    monkeypatch.setattr(runs, "_connected", ends_the_fork)
    optimizer = adamw(layered(seed=1).named_parameters(), start_over=True)
    assert not optimizer.connect()
    assert looks[:2] == [True, True] and optimizer.run_status().step == 0


def test_a_second_trainer_is_refused_and_may_take_over(adamw: AdamW, run: str) -> None:
    model, other = layered(seed=1), layered(seed=1)
    first = adamw(model.named_parameters())
    model(torch.ones(2, 8)).sum().backward()
    first.step()
    with pytest.raises(ballast.Rejected, match=f"rank 0 of run '{run}' is taken.*takeover") as refused:
        adamw(layered(seed=1).named_parameters()).connect()
    assert refused.value.code == "ALREADY_EXISTS"
    second = adamw(other.named_parameters(), weights="server", takeover=True)
    other(torch.ones(2, 8)).sum().backward()
    second.step()
    assert second.last_result is not None and second.last_result.step == 2
    with pytest.raises(ballast.RunFenced):
        model(torch.ones(2, 8)).sum().backward()
        first.step()


def test_a_forgotten_optimizer_gives_its_rank_to_the_next(daemon: Daemon, run: str) -> None:
    def train(weights: str | None = None) -> int:
        model = layered(seed=1)
        optimizer = ballast.AdamW(model.named_parameters(), server=daemon.server, run=run, weights=weights)
        optimizer.itself = optimizer  # type: ignore[attr-defined]  # as a framework's loop leads to it, and it to the loop
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert optimizer.last_result is not None
        return optimizer.last_result.step

    gc.disable()
    try:
        assert [train(), train("server")] == [1, 2]
    finally:
        gc.enable()
        gc.collect()


def test_another_description_of_the_run_is_refused(adamw: AdamW, run: str) -> None:
    adamw([("w", nn.Parameter(torch.zeros(3)))]).connect()
    others = {
        "shape": lambda: adamw([("w", nn.Parameter(torch.zeros(4)))]),
        "dtype": lambda: adamw([("w", nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))]),
        "name": lambda: adamw([("v", nn.Parameter(torch.zeros(3)))]),
        "state": lambda: adamw([("w", nn.Parameter(torch.zeros(3)))], state_dtype="fp32"),
        "seed": lambda: adamw([("w", nn.Parameter(torch.zeros(3)))], seed=1),
    }
    for field, make in others.items():
        with pytest.raises(ballast.Rejected, match=field) as refused:
            make().connect()
        assert refused.value.code == "FAILED_PRECONDITION"
    adamw([("w", nn.Parameter(torch.zeros(3)))], lr=0.5, weight_decay=0, betas=(0.5, 0.5), takeover=True).connect()


def test_a_run_that_does_not_fit_is_refused_with_both_numbers(adamw: AdamW) -> None:
    huge = nn.Parameter(torch.zeros(60_000_000, dtype=torch.bfloat16))
    with pytest.raises(ballast.Rejected, match=r"\d.*\d") as refused:
        adamw([huge]).connect()
    assert refused.value.code == "RESOURCE_EXHAUSTED"


def test_a_run_that_was_deleted_is_not_said_to_be_unknown(
    adamw: AdamW, admin: _core.Client, daemon: Daemon, run: str
) -> None:
    """Though the answer was lost, and a second call would find none."""
    adamw(layered(seed=1).named_parameters()).connect()
    with Proxy(daemon.server) as proxy, ThreadPoolExecutor() as pool:
        client = _core.Client.connect(proxy.server, 60.0, 60.0)
        proxy.hold_answers_of("AdminService/DeleteRun")
        asked = pool.submit(client.delete_run, run, True)
        until(lambda: run not in [status["run_id"] for status in admin.list_runs()["runs"]])
        proxy.cut()
        with pytest.raises(ballast.Unavailable, match="may have been deleted"):
            asked.result()
        client.close()


def test_an_unknown_run_is_refused(adamw: AdamW, run: str) -> None:
    with pytest.raises(ballast.Rejected, match=run) as refused:
        adamw([nn.Parameter(torch.zeros(1))]).run_status()
    assert refused.value.code == "NOT_FOUND"
