"""The queue that pushes what a GPU has copied, alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ballast
from ballast import _core
from daemon import Daemon
from staged import numbered


@pytest.fixture
def client(daemon: Daemon) -> _core.Client:
    """Of no run, so that its pushes fail."""
    return _core.Client.connect(daemon.server, 10, 10)


def put(queue: _core.PushQueue, count: int) -> Tensor:
    """Returns what keeps their memory."""
    gradient = numbered(0)
    for index in range(count):
        queue.put(index, gradient.data_ptr(), gradient.nbytes)
    return gradient


def until_raised(queue: _core.PushQueue, count: int) -> None:
    while not queue.await_pushed(count, 10):
        pass


def test_what_a_push_failed_with_is_raised_once_and_what_was_put_before_that_is_not_pushed(
    client: _core.Client,
) -> None:
    queue = client.push_queue()
    kept = put(queue, 3)
    for number in (1, 0):
        queue.arrive(number)
    with pytest.raises(ballast.Rejected, match="Attach"):
        until_raised(queue, 2)
    queue.arrive(2)
    assert queue.await_pushed(3, 10)
    assert (queue.count_put(), queue.count_pushed()) == (3, 3)
    del kept


def test_what_is_dropped_is_counted_when_it_has_arrived(client: _core.Client) -> None:
    queue = client.push_queue()
    kept = put(queue, 1)
    queue.drop()
    assert not queue.await_pushed(1, 0)
    queue.arrive(0)
    assert queue.await_pushed(1, 10)
    del kept


def test_what_is_cancelled_is_counted_and_may_arrive_nevertheless(client: _core.Client) -> None:
    queue = client.push_queue()
    kept = put(queue, 1)
    queue.cancel(0)
    assert queue.await_pushed(1, 10)
    queue.arrive(0)
    queue.cancel(7)  # there is none
    assert queue.count_pushed() == 1
    del kept


def test_a_queue_of_a_closed_client_says_so(client: _core.Client) -> None:
    queue = client.push_queue()
    kept = put(queue, 1)
    client.close()
    queue.arrive(0)
    with pytest.raises(ballast.Rejected, match="the connection is closed"):
        until_raised(queue, 1)
    del kept


def test_a_queue_does_not_work_in_a_fork(client: _core.Client) -> None:
    queue = client.push_queue()
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            queue.await_pushed(1, 0)
        except ballast.Rejected as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        assert "does not work in its fork" in said.read()
    os.wait()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA driver")
def test_without_a_driver_nothing_is_announced(client: _core.Client) -> None:
    queue = client.push_queue()
    kept = put(queue, 1)
    with pytest.raises(ballast.BallastError, match="there is no CUDA driver"):
        queue.announce(0, 0)
    queue.cancel(0)
    del kept


@pytest.fixture
def full(run: str) -> Iterator[tuple[Daemon, _core.Client, _core.PushQueue, Tensor]]:
    """A queue whose push waits for a daemon that takes nothing, and what it pushes."""
    weight = torch.nn.Parameter(torch.ones(8 << 20))
    options: dict[str, Any] = {"gradient_buffer_bytes": 0, "gradient_dtype": "fp32", "reconnect_timeout": 60}
    with Daemon() as daemon:
        optimizer = ballast.SGD([("weight", weight)], 0.1, server=daemon.server, run=run, **options)
        weight.sum().backward()
        optimizer.step()
        session = optimizer._membership.session
        assert session is not None
        client, gradient = session._client, torch.ones_like(weight)
        client.begin_step([], 1.0, 1)
        queue = client.push_queue()
        daemon.freeze()
        queue.put(0, gradient.data_ptr(), gradient.nbytes)
        queue.arrive(0)
        assert not queue.await_pushed(1, 0.2)
        yield daemon, client, queue, gradient
        daemon.thaw()


def test_a_push_that_waits_for_the_daemon_ends_when_its_client_is_closed(
    full: tuple[Daemon, _core.Client, _core.PushQueue, Tensor],
) -> None:
    daemon, client, queue, gradient = full
    client.close()
    assert queue.await_pushed(1, 0)


def test_a_push_that_waits_for_the_daemon_ends_when_it_is_dropped(
    full: tuple[Daemon, _core.Client, _core.PushQueue, Tensor],
) -> None:
    daemon, client, queue, gradient = full
    queue.drop()
    until_raised(queue, 1)
