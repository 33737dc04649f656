"""A run goes back to a snapshot, and its trainers with it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ballast
from ballast import _core
from daemon import Daemon
from models import layered, losses_of, perceptron, same_bits, spirals, until, weights_of
from proxy import Proxy
from following import KEPT, AdamW, Training
from side_by_side import side_by_side
from stateful import Place


@pytest.mark.parametrize(
    "options",
    [{}, {"commit": "staged"}, {"gradient_accumulation_steps": 2}, {"overlap_forward": True}],
    ids=["release", "staged", "accumulation", "overlap"],
)
def test_the_one_who_asks_goes_on_to_the_bit(adamw: AdamW, options: dict[str, Any]) -> None:
    torch.manual_seed(7)
    training = Training(adamw, **options)
    first = training.steps(8)
    assert training.optimizer.rewind(to=3) == 3
    training.scheduler.step()
    assert training.digest() == first[2]
    assert training.steps(5) == first[3:]
    assert training.optimizer.rewind(3) == 3  # from step 8 to 5, and the nearest that is kept
    training.scheduler.step()
    assert training.steps(5) == first[3:]
    assert training.rewound == []


@pytest.mark.parametrize("options", [{}, {"commit": "staged"}, {"overlap_forward": True}], ids=str)
def test_another_one_follows_with_schedule_data_and_random_numbers(
    adamw: AdamW, admin: _core.Client, run: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(7)
    training = Training(adamw, **options)
    first = training.steps(8)
    admin.rewind(run, 6, None, "operator")
    assert training.step() == first[5]  # it raised, was caught, and the scheduler was stepped
    assert training.rewound == [6]
    assert training.steps(2) == first[6:]
    admin.rewind(run, 3, None, "operator")
    assert training.step() == first[2]
    assert training.steps(5) == first[3:]
    assert training.rewound == [6, 3]


def test_it_is_raised_from_whatever_is_under_way(adamw: AdamW, admin: _core.Client, run: str) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), snapshots=1, snapshot_every=1)

    def backward() -> None:
        model(torch.ones(2, 8)).sum().backward()

    backward()
    optimizer.step()
    after_one = weights_of(model)
    backward()
    admin.rewind(run, None, None, "operator")
    with pytest.raises(ballast.RunRewound, match="rewound to step 1 ") as told:
        optimizer.step()
    assert (told.value.step, told.value.client_state, told.value.code) == (1, None, "FAILED_PRECONDITION")
    assert same_bits(weights_of(model), after_one)
    admin.rewind(run, None, None, "operator")
    with pytest.raises(ballast.RunRewound):  # in a hook, or in step() when the hooks were quicker than the news
        backward()
        optimizer.step()
    assert same_bits(weights_of(model), after_one)
    assert all(parameter.grad is None for parameter in model.parameters())
    backward()
    optimizer.step()
    assert optimizer.last_result is not None and optimizer.last_result.step == 2
    assert optimizer.run_status()["rewinds"] == 2


def test_one_before_the_first_gradient_is_followed_whatever_was_pulled_since(
    adamw: AdamW, admin: _core.Client, run: str
) -> None:
    model = perceptron(seed=1)
    with adamw(model.named_parameters(), **KEPT) as before:
        losses_of(model, before, 4)
    model = perceptron(seed=2)
    optimizer = adamw(model.named_parameters(), **KEPT)
    optimizer.connect()
    admin.rewind(run, 3, None, "operator")
    optimizer.pull()  # of step 3, by a trainer that was told of step 4
    with pytest.raises(ballast.RunRewound, match="step 3"):
        losses_of(model, optimizer, 1)
    losses_of(model, optimizer, 1)
    assert optimizer.last_result.step == 4


def test_a_rewind_whose_answer_is_lost_is_not_made_twice(
    adamw: AdamW, admin: _core.Client, daemon: Daemon, run: str
) -> None:
    """A second one would go further back, over the snapshot that the first went to."""
    Training(adamw).steps(8)
    with Proxy(daemon.server) as proxy, ThreadPoolExecutor() as pool:
        client = _core.Client.connect(proxy.server, 60.0, 60.0)
        proxy.hold_answers_of("AdminService/Rewind")
        asked = pool.submit(client.rewind, run, None, 1, "operator")
        until(lambda: admin.get_run(run)["status"]["rewinds"] == 1)
        proxy.cut()
        with pytest.raises(ballast.Unavailable, match="may have been rewound"):
            asked.result()
        client.close()
    status = admin.get_run(run)["status"]
    assert (status["rewinds"], status["step"]) == (1, 6)


def test_a_connection_that_died_is_made_anew_for_a_rewind(
    adamw: AdamW, admin: _core.Client, daemon: Daemon, run: str
) -> None:
    Training(adamw).steps(8)
    with Proxy(daemon.server) as proxy:
        client = _core.Client.connect(proxy.server, 60.0, 60.0)
        proxy.cut()
        assert client.rewind(run, None, 1, "operator")["step"] == 6
        proxy.cut()
        client.delete_run(run, force=True)
        client.close()
    assert run not in [status["run_id"] for status in admin.list_runs()["runs"]]


def test_every_rank_follows(daemon: Daemon, run: str) -> None:
    world, models = 2, [perceptron(seed=1) for _ in range(2)]
    places = [Place() for _ in range(world)]

    def train(rank: int) -> tuple[list[str], list[int]]:
        made, rewound = [], []
        with ballast.AdamW(
            models[rank].named_parameters(), lr=1e-2, server=daemon.server, run=run, rank=rank, world=world, **KEPT
        ) as optimizer:
            optimizer.register_client_state("place", places[rank])
            optimizer.connect()
            while places[rank].next < 8:
                points, labels = spirals(seed=2 * places[rank].next + rank)
                places[rank].next += 1
                try:
                    F.cross_entropy(models[rank](points), labels).backward()
                    optimizer.step()
                except ballast.RunRewound as back:
                    rewound.append(back.step)
                    continue
                made.append(hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights_of(models[rank]))).hexdigest())
                if rank == 1 and len(made) == 7:
                    rewound.append(optimizer.rewind(1))
        return made, rewound

    (zero, told), (one, asked) = side_by_side(world, train)
    assert told == asked == [6]
    assert one[:6] + one[7:] == zero[:6] + zero[-2:]
    assert one[6] == one[7]  # step 7, twice
    assert [place.next for place in places] == [8, 8]


def test_what_cannot_be_gone_back_to_is_refused(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters(), **KEPT)
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    with pytest.raises(ballast.Rejected, match="kept are those of steps 3"):
        optimizer.rewind(to=2)
    with pytest.raises(ballast.Rejected, match="give one of them"):
        optimizer.rewind(1, to=3)
    with pytest.raises(ballast.Rejected, match="rewind\\(steps=-1\\): it must be a whole number"):
        optimizer.rewind(-1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()  # nothing happened


@pytest.mark.parametrize(("option", "value"), [("snapshots", -1), ("snapshots", True), ("snapshot_every", 0)])
def test_options_are_checked(adamw: AdamW, option: str, value: Any) -> None:
    with pytest.raises(ballast.Rejected, match=f"{option}={value}: it must be a whole number"):
        adamw(layered(seed=1).named_parameters(), **{option: value})


def test_without_snapshots_the_fix_is_named(adamw: AdamW) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(ballast.Rejected, match="keeps no snapshots; create it with snapshots of 1 or more"):
        optimizer.rewind()
