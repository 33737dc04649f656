"""A run on several daemons, one of which is killed under its trainers and started again: they follow, and make the steps that
a run on one daemon makes, to the bit."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ballast.rank_zero import await_change
from torch import nn

import ballast
from daemon import Daemon, Daemons
from durable import ctl
from following import KINDS, SELDOM, SYNC, Training
from models import layered, same_bits, weights_of

RUN = "parts"
COUNT = 3


def training_on(server: str, **options: Any) -> Training:
    torch.manual_seed(7)
    return Training(partial(ballast.AdamW, server=server, run=RUN, reconnect_timeout=60), **options)


def on_one(folder: Path, **options: Any) -> list[str]:
    folder.mkdir()
    with Daemon(storage=folder) as daemon:
        training = training_on(daemon.server, **options)
        made = training.steps(10)
        training.optimizer.close()
    return made


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    with Daemons(COUNT, storage=tmp_path / "storage") as started:
        yield started


@pytest.mark.parametrize("killed", range(COUNT))
@pytest.mark.parametrize("durability, back", [(SYNC, 6), (SELDOM, 4)], ids=["journal", "checkpoint"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_go_back_to_a_step_that_each_has(
    kind: str, durability: dict[str, Any], back: int, killed: int, daemons: Daemons, tmp_path: Path
) -> None:
    # The next step may begin before the client has heard of the kill; what it has released is undone then.
    options = durability | KINDS[kind] | {"on_torn": "rewind"}
    wanted = on_one(tmp_path / "alone", **options)
    training = training_on(daemons.server, **options)
    assert training.steps(4) == wanted[:4]
    assert training.optimizer.checkpoint() == 4
    assert training.steps(2) == wanted[4:6]
    daemons.restart(killed)
    assert training.step() == wanted[back - 1]  # it raised, was caught, and the scheduler was stepped
    assert training.rewound == [back]
    assert training.steps(10 - back) == wanted[back:]
    training.optimizer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_middle_of_a_backward_the_step_before_is_gone_back_to(
    kind: str, daemons: Daemons, tmp_path: Path
) -> None:
    options = SYNC | KINDS[kind] | {"on_torn": "rewind"}
    wanted = on_one(tmp_path / "alone", **options)
    training = training_on(daemons.server, **options)
    training.steps(6)

    def restart(_: torch.Tensor) -> None:
        hook.remove()
        daemons.restart(1)

    hook = next(training.model.parameters()).register_hook(restart)
    assert training.step() == wanted[5]
    assert training.rewound == [6]
    assert training.steps(4) == wanted[6:]
    training.optimizer.close()


def test_checkpoints_by_time_are_of_the_same_steps(daemons: Daemons, tmp_path: Path) -> None:
    model = layered(seed=1)
    with ballast.AdamW(
        model.named_parameters(), server=daemons.server, run=RUN, checkpoint_every_seconds=0.05
    ) as optimizer:
        durable: set[int] = set()  # told are those that all have, though a daemon that is slow may write others, too
        while len(durable - {0}) < 3:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.wait()
            durable.add(optimizer.last_result.durable_step)
    daemons.drain()
    folders = (tmp_path / "storage" / f"part-{part}" / "runs" / RUN for part in range(COUNT))
    kept = [sorted(path.name for path in folder.glob("0*-step-*")) for folder in folders]
    newest = {names[-1].rpartition("-")[2] for names in kept}
    assert len(newest) == 1 and all(len(names) >= 2 for names in kept), kept


def test_what_each_has_of_another_step_is_not_durable(daemons: Daemons) -> None:
    """As where one daemon writes more slowly than the others."""
    training = training_on(daemons.server, **SELDOM)
    training.steps(4)
    assert training.optimizer.checkpoint() == 4
    for later in (daemons.each[:1], daemons.each[1:]):
        training.steps(2)
        for daemon in later:
            assert ctl("checkpoint", RUN, server=daemon.server).returncode == 0
    training.steps(1)
    told = training.optimizer.last_result.durable_step, training.optimizer.run_status()["durability"]["durable_step"]
    assert told == (4, 4)
    for part in range(COUNT):
        daemons.restart(part)
    training.step()
    assert training.rewound == [4]
    training.optimizer.close()


def test_the_checkpoint_that_all_have_stays_whatever_one_of_them_writes(daemons: Daemons) -> None:
    training = training_on(daemons.server, **SELDOM)
    training.steps(4)
    assert training.optimizer.checkpoint() == 4
    for _ in range(4):  # as an operator does, or stops of that daemon: two are kept, and these are newer
        training.steps(1)
        assert ctl("checkpoint", RUN, server=daemons.each[0].server).returncode == 0
    daemons.restart(1)
    training.step()
    assert training.rewound == [4]
    training.optimizer.close()


def test_a_restore_that_one_of_them_cannot_make_is_made_by_none(daemons: Daemons) -> None:
    training = training_on(daemons.server, **SELDOM)
    training.steps(4)
    assert ctl("checkpoint", RUN, server=daemons.each[0].server).returncode == 0
    training.steps(1)
    refused = ctl("restore", RUN, "--step", 4, server=daemons.server)
    assert refused.returncode == 1
    assert f"{daemons.each[1].server} has no checkpoint of step 4" in refused.stderr
    training.steps(1)
    assert training.rewound == []
    training.optimizer.close()


@pytest.mark.parametrize(
    "words", [("rewind", RUN, "--to", 3), ("restore", RUN, "--step", 4)], ids=["rewind", "restore"]
)
def test_a_part_is_not_taken_back_alone(words: tuple[object, ...], daemons: Daemons) -> None:
    training = training_on(daemons.server, **SELDOM)
    training.steps(4)
    assert training.optimizer.checkpoint() == 4
    one = daemons.each[1].server
    refused = ctl(*words, server=one)
    assert refused.returncode == 1
    assert f"the daemon at {one} has part 1 of 3 of run 'parts'" in refused.stderr
    training.steps(1)
    assert training.rewound == []
    assert ctl(*words, server=daemons.server).returncode == 0
    training.optimizer.close()


def test_all_come_back_with_new_trainers(daemons: Daemons, tmp_path: Path) -> None:
    options = SYNC | KINDS["staged"]
    wanted = on_one(tmp_path / "alone", **options)
    training = training_on(daemons.server, **options)
    assert training.steps(5) == wanted[:5]
    training.optimizer.close()
    for part in range(COUNT):
        daemons.restart(part)
    again = training_on(daemons.server, **options, weights="server")
    again.scheduler.step()  # the last step's came after the state that was kept
    assert again.steps(5) == wanted[5:]
    again.optimizer.close()


def test_a_daemon_that_stays_away_is_named(daemons: Daemons) -> None:
    model = layered(seed=1)
    optimizer = ballast.AdamW(model.named_parameters(), server=daemons.server, run=RUN, reconnect_timeout=0.5)
    optimizer.connect()
    daemons.each[2].kill()
    with pytest.raises(ballast.Unavailable, match=daemons.each[2].server):
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.wait()
    optimizer.close()
    assert weights_of(model)


@pytest.mark.parametrize("grows", [False, True], ids=["alone", "with a group more"])
@pytest.mark.parametrize("change", [{"master": "fp32", "state": "bf16"}, {"serving": "fp8-e4m3"}], ids=str)
def test_tensors_are_stored_and_served_otherwise(
    change: dict[str, str], grows: bool, daemons: Daemons, tmp_path: Path
) -> None:
    def train(server: str) -> list[torch.Tensor]:
        model, more = layered(seed=1), layered(seed=2)
        with ballast.AdamW(model.named_parameters(), lr=1e-2, server=server, run=RUN) as optimizer:
            for step in range(4):
                if step == 2:
                    optimizer.param_groups[0].update(change)
                    if grows:
                        optimizer.add_param_group({"params": more.named_parameters("more")})
                more(model(torch.ones(2, 8))).square().mean().backward()
                optimizer.step()
        return weights_of(model) + weights_of(more)

    with Daemon(storage=tmp_path) as one:
        wanted = train(one.server)
    assert same_bits(train(daemons.server), wanted)


def test_a_trainer_with_fewer_tensors_than_its_run_is_told(daemons: Daemons) -> None:
    model = layered(seed=1)
    with ballast.AdamW(model.named_parameters(), lr=1e-2, server=daemons.server, run=RUN) as optimizer:
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
    fewer = ballast.AdamW(list(model.named_parameters())[:-1], lr=1e-2, server=daemons.server, run=RUN)
    with pytest.raises(ballast.Rejected, match="exists with another spec: it has 6 tensors, asked for is 5"):
        fewer.connect()
    fewer.close()


def test_a_rank_waits_while_the_daemons_are_changed_one_after_another() -> None:
    """What it sees meanwhile: parts that do not make up one run, and then one of which has the change alone."""
    halfway = ballast.Rejected("the parts of run 'parts' do not make up one run", "FAILED_PRECONDITION")
    looks: list[Any] = [{"spec_sha256": "a,b"}, halfway, {"spec_sha256": "c,b"}, {"spec_sha256": "c,d"}]
    whole = [False, True]

    def get_run(run: str) -> Any:
        look = looks.pop(0)
        if isinstance(look, Exception):
            raise look
        return look

    client, rank = SimpleNamespace(get_run=get_run), SimpleNamespace(run=RUN, number=1)
    await_change(client, rank, "a,b", whole=lambda: whole.pop(0))  # type: ignore[arg-type]
    assert not looks and not whole


@pytest.mark.parametrize("killed", range(COUNT))
def test_a_run_grows_beside_a_daemon_that_was_just_started_anew(killed: int, daemons: Daemons) -> None:
    """Whose sessions have ended: it refuses, and then none of the others has grown."""
    model = layered(seed=1)
    model[2].requires_grad_(False)
    optimizer = ballast.AdamW(model.named_parameters(), server=daemons.server, run=RUN, reconnect_timeout=60, **SYNC)
    rewound = 0
    while optimizer.last_result is None or optimizer.last_result.step < 5:
        if optimizer.last_result is not None and optimizer.last_result.step == 3 and not model[2].weight.requires_grad:
            daemons.restart(killed)
            model[2].requires_grad_(True)
        try:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        except ballast.RunRewound:
            rewound += 1
    assert rewound <= 1 and optimizer.last_result.step == 5 and optimizer.last_result.applied
    assert not torch.equal(model[2].weight, layered(seed=1)[2].weight)
    optimizer.close()


@pytest.mark.parametrize("small", [0, 1])
def test_a_run_that_one_daemon_has_no_room_for_grows_on_none(small: int) -> None:
    with ExitStack() as ends:
        limits = ["32MiB" if part == small else "200MiB" for part in range(2)]
        each = [ends.enter_context(Daemon(flags=[f"--memory_limit={limit}"])) for limit in limits]
        model = layered(seed=1)
        large = [nn.Parameter(torch.zeros(1500, 1000), requires_grad=False) for _ in range(2)]
        named = [*model.named_parameters(), *((f"large.{i}", one) for i, one in enumerate(large))]
        optimizer = ballast.AdamW(named, server=",".join(one.server for one in each), run=RUN)
        for step in (1, 2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        for one in large:
            one.requires_grad_(True)
        with pytest.raises(ballast.Rejected, match="the run goes on as it was"):
            (model(torch.ones(2, 8)).sum() + sum(one.sum() for one in large)).backward()
        for one in large:
            one.requires_grad_(False)
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert optimizer.last_result is not None and (optimizer.last_result.step, optimizer.last_result.applied) == (
            3,
            True,
        )
        optimizer.close()


def test_a_part_that_is_gone_is_told_once() -> None:
    with Daemons(COUNT) as daemons:
        training = training_on(daemons.server)
        training.steps(1)
        daemons.restart(1)
        with pytest.raises(ballast.Rejected, match=f"does not have its part of run '{RUN}' any more") as told:
            training_on(daemons.server)
        assert "During handling" not in "".join(traceback.format_exception(told.value))
        training.optimizer.close()


def test_a_part_is_not_deleted_alone(daemons: Daemons) -> None:
    training = training_on(daemons.server)
    training.steps(1)
    training.optimizer.close()
    servers = daemons.server.split(",")
    with pytest.raises(ballast.Rejected, match=f"part 1 of {COUNT} of run '{RUN}'.*name all daemons") as told:
        ballast.delete_run(RUN, server=servers[1])
    assert told.value.code == "FAILED_PRECONDITION"
    refused = ctl("delete", RUN, server=servers[1])
    assert refused.returncode == 1 and "delete this part alone with force" in refused.stderr
    assert ballast.delete_run(RUN, server=servers[1], force=True) > 0
    assert ballast.delete_run(RUN, server=daemons.server) > 0


def test_a_part_that_is_on_the_disk_is_not_deleted_alone(tmp_path: Path) -> None:
    with Daemons(COUNT, storage=tmp_path) as daemons:
        training = training_on(daemons.server)
        training.steps(1)
        training.optimizer.close()
        assert ballast.delete_run(RUN, server=daemons.server, keep_checkpoints=True) > 0
        servers = daemons.server.split(",")
        with pytest.raises(ballast.Rejected, match=f"part 1 of {COUNT} of run '{RUN}'.*name all daemons"):
            ballast.delete_run(RUN, server=servers[1])
        assert ballast.delete_run(RUN, server=servers[1], force=True) == 0
        ballast.delete_run(RUN, server=daemons.server, force=True)
        assert not any((folder / "runs" / RUN).exists() for folder in tmp_path.iterdir())
