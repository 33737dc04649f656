"""The binding of the C++ client: what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ballast
from ballast import _core
from daemon import Daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[_core.Client]:
    client = _core.Client.connect(daemon.server, 5.0, 5.0)
    yield client
    client.close()


def create(client: _core.Client, run: str, tensors: int = 1) -> None:
    spec = {
        "run_id": run,
        "tensors": [{"name": f"t{i}", "shape": [4], "dtype": "fp32"} for i in range(tensors)],
        "groups": [{"rule": "adamw"}],
    }
    client.create_run(json.dumps(spec))
    client.attach(run, 0, 1, False, 0.0)


def test_a_spec_that_cannot_be_read_is_refused(client: _core.Client) -> None:
    with pytest.raises(ballast.Rejected, match="the run's spec.*colour"):
        client.create_run('{"colour": "red"}')


def test_an_unknown_name_is_refused_with_the_valid_ones(client: _core.Client, run: str) -> None:
    spec = {
        "run_id": run,
        "tensors": [{"name": "w", "shape": [4], "dtype": "fp32"}],
        "groups": [{"rule": "adamwish"}],
    }
    with pytest.raises(ballast.Rejected, match="adamwish.*adamw"):
        client.create_run(json.dumps(spec))


def test_an_unknown_run_is_refused(client: _core.Client) -> None:
    for call in (
        lambda: client.attach("nowhere", 0, 1, False, 0.0),
        lambda: client.get_run("nowhere"),
        lambda: client.delete_run("nowhere"),
    ):
        with pytest.raises(ballast.Rejected, match="nowhere") as refused:
            call()
        assert refused.value.code == "NOT_FOUND"


def test_wrong_bytes_are_refused(client: _core.Client, run: str) -> None:
    create(client, run)
    w = torch.ones(4)
    with pytest.raises(ballast.Rejected, match="'t0'.*got 12 bytes, wanted 16"):
        client.load_weights([(0, "weights", "fp32", w.data_ptr(), 12)])
    with pytest.raises(ballast.Rejected, match="'t0'.*format 'fp8'"):
        client.load_weights([(0, "weights", "fp8", w.data_ptr(), 16)])
    client.load_weights([(0, "weights", "fp32", w.data_ptr(), 16)])
    with pytest.raises(ballast.Rejected, match="'t0'.*got 8 bytes"):
        client.bind_weights(0, w.data_ptr(), 8)
    client.begin_step([{"lr": 0.5}])
    with pytest.raises(ballast.Rejected, match="'t0'.*got 8 bytes"):
        client.push(0, w.data_ptr(), 8)
    with pytest.raises(ballast.Rejected, match="1 tensors"):
        client.push(1, w.data_ptr(), 16)


def test_an_unknown_step_value_is_refused(client: _core.Client, run: str) -> None:
    create(client, run)
    with pytest.raises(ballast.Rejected, match="'rate'"):
        client.begin_step([{"rate": 1.0}])


def test_calls_out_of_order_are_refused(client: _core.Client, run: str) -> None:
    w = torch.ones(4)
    with pytest.raises(ballast.Rejected, match="before Attach"):
        client.begin_step([])
    create(client, run)
    with pytest.raises(ballast.Rejected, match="before BeginStep"):
        client.push(0, w.data_ptr(), 16)
    with pytest.raises(ballast.Rejected, match="before BeginStep"):
        client.end_step(None).wait(1.0)


def test_digests_are_of_the_bytes_served(client: _core.Client, run: str) -> None:
    create(client, run, tensors=2)
    one, other = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(4)
    digests = client.load_weights(
        [(0, "weights", "fp32", one.data_ptr(), 16), (1, "weights", "fp32", other.data_ptr(), 16)]
    )
    assert digests == [_core.digest(one.data_ptr(), 16), _core.digest(other.data_ptr(), 16)]
    landed = torch.empty(4)
    assert client.pull(run, [(0, landed.data_ptr(), 16)]) == {0: 0}
    assert torch.equal(landed, one)
    with pytest.raises(ballast.Rejected, match="destination has 8"):
        client.pull(run, [(0, landed.data_ptr(), 8)])


def test_the_daemon_describes_itself_and_its_runs(client: _core.Client, run: str) -> None:
    create(client, run)
    server = client.get_server()
    assert "adamw" in server["rules"] and isinstance(server["memory_limit_bytes"], int)
    assert run in [status["run_id"] for status in client.list_runs()["runs"]]
    assert client.delete_run(run, force=True)["freed_bytes"] > 0


def test_a_closed_client_says_so(daemon: Daemon) -> None:
    client = _core.Client.connect(daemon.server, 5.0, 5.0)
    client.close()
    client.close()
    with pytest.raises(ballast.Rejected, match="closed"):
        client.get_server()


class Staged:
    """A rank of a staged run of one tensor of 4, by _core alone."""

    def __init__(self, daemon: Daemon, run: str, rank: int, world: int, transport: str) -> None:
        self.client = _core.Client.connect(daemon.server, 5.0, 5.0)
        spec = {
            "run_id": run,
            "tensors": [{"name": "w", "shape": [4], "dtype": "fp32"}],
            "groups": [{"rule": "sgd", "master": "fp32", "state": "fp32", "hyper": {"lr": 1.0}}],
            "commit": "COMMIT_MODE_STAGED",
            "ranks": world,
            "accumulation": 3,
        }
        self.client.create_run(json.dumps(spec))
        self.client.attach(run, rank, world, False, 0.0, transport)
        self.weights = torch.zeros(4)
        if rank == 0:
            self.client.load_weights([(0, "weights", "fp32", self.weights.data_ptr(), 16)])
        self.client.bind_weights(0, self.weights.data_ptr(), 16)

    def push(self, *values: float) -> None:
        gradient = torch.tensor(values)
        self.client.push(0, gradient.data_ptr(), 16)


def heard(pending: _core.PendingMeasure | _core.PendingStep) -> dict[str, Any]:
    answer = pending.wait(60.0)
    assert answer is not None
    return answer


@pytest.mark.parametrize("transport", ["grpc", "auto"])
@pytest.mark.parametrize("world", [1, 2, 8])
def test_a_step_is_measured_clipped_and_discarded(daemon: Daemon, run: str, world: int, transport: str) -> None:
    ranks = [Staged(daemon, run, rank, world, transport) for rank in range(world)]
    for rank in ranks:
        rank.client.begin_step([], 1.0, 0)
        rank.push(1.0, 0.0, 2.0, 0.0)
        rank.client.end_micro(0.5)
        rank.push(2.0, 0.0, 2.0, 0.0)
    measures = [rank.client.measure_step() for rank in ranks]
    assert [heard(measure) for measure in measures] == [
        {"grad_norm": 5.0, "nonfinite_tensors": 0, "measured": True}
    ] * world
    assert heard(measures[0]) == heard(measures[0])
    with pytest.raises(ballast.Rejected, match="after MeasureStep"):
        ranks[0].push(1.0, 1.0, 1.0, 1.0)
    ends = [rank.client.end_step(0.25, max_grad_norm=2.5) for rank in ranks]
    for rank, end in zip(ranks, ends):
        result = heard(end)
        assert result["outcome"] == "APPLIED" and result["grad_norm"] == 5.0
        assert torch.allclose(rank.weights, torch.tensor([-1.5, 0.0, -2.0, 0.0]), atol=1e-5)
        assert torch.equal(rank.weights, ranks[0].weights)

    before = ranks[0].weights.clone()
    for rank in ranks:
        rank.client.begin_step([], 1.0, 0)
        rank.push(9.0, 9.0, 9.0, 9.0)
    others = [rank.client.measure_step(1.0) for rank in ranks[1:]]
    end = ranks[0].client.end_step(None, discard=True)
    for other in others:
        told = heard(other)
        assert not told["measured"] and math.isnan(told["grad_norm"])
    ends = [end] + [rank.client.end_step(None) for rank in ranks[1:]]
    for rank, end in zip(ranks, ends):
        result = heard(end)
        assert (result["outcome"], result["reason"]) == ("SKIPPED", "discarded")
        assert torch.equal(rank.weights, before)
        rank.client.close()


def test_what_a_run_in_release_cannot_do_is_refused_by_name(client: _core.Client, run: str) -> None:
    create(client, run)
    w = torch.ones(4)
    client.load_weights([(0, "weights", "fp32", w.data_ptr(), 16)])
    with pytest.raises(ballast.Rejected, match="commit is staged.*release"):
        client.begin_step([], 1.0, 0)
    client.begin_step([])
    client.push(0, w.data_ptr(), 16)
    for call in (
        lambda: client.measure_step(),
        lambda: client.end_step(None, max_grad_norm=1.0),
        lambda: client.end_step(None, discard=True),
    ):
        with pytest.raises(ballast.Rejected, match="commit.*staged"):
            call()
    with pytest.raises(ballast.Rejected, match="max_grad_norm is -1"):
        client.end_step(None, max_grad_norm=-1.0)
    assert heard(client.end_step(None))["outcome"] == "APPLIED"
