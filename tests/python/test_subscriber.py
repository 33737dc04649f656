"""Readers of a run: the versions that ballast.Subscriber tells of, and what they change."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

import ballast
from fake_follow import CHUNK, FakeFollow
from followed_net import weights_at

LONG_S = 60.0


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeFollow]:
    with FakeFollow(tmp_path, weights_at(0)) as daemon:
        yield daemon


def test_versions_come_one_after_another(fake: FakeFollow) -> None:
    fake.whole(weights_at(1), 1)
    second = weights_at(1) | {"head.weight": weights_at(2)["head.weight"]}
    fake.changed(second, ["head.weight"], 4, base=1)
    with ballast.Subscriber(fake.server, "r", every=3) as reader:
        first = next(reader)
        assert (first.step, first.generation, first.base_step, first.changed_ratio, first.skipped) == (1, 1, None, 1, 0)
        assert first.received_bytes == first.whole_bytes == sum(tensor.nbytes for tensor in weights_at(1).values())
        assert 0 <= first.staleness_s < LONG_S
        kept = dict(first.tensors)
        assert kept.keys() == weights_at(1).keys() == set(first.changed)
        for name, tensor in weights_at(1).items():
            assert torch.equal(kept[name], tensor)
        version = reader.next(LONG_S)
        assert version is not None and version.step == 4 and version.base_step == 1
        assert version.changed == ("head.weight",) and 0 < version.changed_ratio < 1
        assert torch.equal(version.tensors["head.weight"], second["head.weight"])
        assert torch.equal(version.tensors["inner.bias"], kept["inner.bias"])
        with pytest.raises(ballast.Rejected, match="tensor 'head.weight' of a version that is no longer here"):
            first.tensors["head.weight"]
        assert reader.next(0) is None
        with pytest.raises(KeyError):
            version.tensors["other"]
    assert fake.requests[0].every == 3


def test_a_version_that_came_whole_is_not_read_as_the_one_before(fake: FakeFollow) -> None:
    fake.whole(weights_at(1), 1)
    with ballast.Subscriber(fake.server, "r") as reader:
        first = next(reader)
        end = fake.begin_whole(weights_at(2), 2)
        assert reader.await_next(LONG_S)
        assert reader.next(0) is None  # it begins to come
        end()
        assert reader.await_next(LONG_S)  # and is here, which next() has not told
        assert not reader.readable
        with pytest.raises(ballast.Rejected, match="no version of run 'r' is here"):
            first.tensors["head.weight"]
        second = next(reader)
        assert torch.equal(second.tensors["head.weight"], weights_at(2)["head.weight"])


def test_patches_are_what_has_changed(fake: FakeFollow) -> None:
    fake.whole(weights_at(1), 1)
    changed = weights_at(1)["head.weight"].clone()
    changed[1, 2] = changed[0, 3] = -7
    fake.changed(weights_at(1) | {"head.weight": changed}, ["head.weight"], 2, base=1)
    with ballast.Subscriber(fake.server, "r", patches=True) as reader:
        assert list(reader.patches()) == []
        next(reader)
        for patch in reader.patches():
            assert patch.indices is None
            assert torch.equal(patch.values.reshape(patch.shape), weights_at(1)[patch.name]), patch.name
        stale = reader.patches()
        assert next(stale).name in weights_at(1)
        next(reader)
        with pytest.raises(ballast.Rejected, match="of a version that is no longer here"):
            next(stale)
        (patch,) = reader.patches()
        assert (patch.name, patch.shape, patch.dtype) == ("head.weight", (3, CHUNK), torch.float32)
        flat = weights_at(1)["head.weight"].flatten()
        assert patch.indices is not None and patch.indices.dtype == torch.int64
        assert torch.equal(flat.index_copy(0, patch.indices, patch.values), changed.flatten())


def test_patches_are_there_for_who_asked_for_them(fake: FakeFollow) -> None:
    fake.whole(weights_at(1), 1)
    with ballast.Subscriber(fake.server, "r") as reader:
        next(reader)
        with pytest.raises(ballast.Rejected, match="does not mark which elements have changed"):
            list(reader.patches())


def test_formats_of_two_bytes(tmp_path: Path) -> None:
    weights = {"a": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "b": torch.tensor(0.5, dtype=torch.float16)}
    with FakeFollow(tmp_path, weights) as fake:
        fake.whole(weights, 1)
        with ballast.Subscriber(fake.server, "r") as reader:
            tensors = dict(next(reader).tensors)
    assert torch.equal(tensors["a"], weights["a"]) and torch.equal(tensors["b"], weights["b"])


def test_what_is_wrong_is_named(fake: FakeFollow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BALLAST_RUN", raising=False)
    for options, what in (
        ({"run": "r", "every": 0}, "every=0: it must be a whole number"),
        ({"run": "R"}, "run='R'"),
        ({}, "no run is named"),
        ({"run": "other"}, "no run 'other'"),
        ({"run": "r", "reconnect_timeout": -1}, "reconnect_timeout=-1"),
    ):
        with pytest.raises(ballast.Rejected, match=what):
            ballast.Subscriber(**({"server": fake.server} | options))
    with pytest.raises(ballast.Unavailable, match="no ballastd answers at 127.0.0.1:1"):
        ballast.Subscriber("127.0.0.1:1", "r", connect_timeout=0.05)
    with FakeFollow(tmp_path, weights_at(0), follow=False) as without:
        without.end(grpc.StatusCode.FAILED_PRECONDITION, "no follow")
        with pytest.raises(ballast.Rejected, match="nobody may follow it: start its trainer again with follow=True"):
            ballast.Subscriber(without.server, "r")


def test_a_reader_goes_when_nobody_has_it(fake: FakeFollow) -> None:
    fake.whole(weights_at(1), 1)
    reader = ballast.Subscriber(fake.server, "r", patches=True)
    next(reader)
    assert len(list(reader.patches())) == len(weights_at(1))
    there = weakref.ref(reader)
    del reader
    assert there() is None


def test_a_deleted_run_ends_the_reader(fake: FakeFollow) -> None:
    with ballast.Subscriber(fake.server, "r") as reader:
        fake.end(grpc.StatusCode.NOT_FOUND, "run 'r' was deleted")
        with pytest.raises(ballast.Rejected, match="run 'r' was deleted") as error:
            reader.next(LONG_S)
        assert error.value.code == "NOT_FOUND"


def test_close_ends_a_wait_of_another_thread(fake: FakeFollow) -> None:
    reader = ballast.Subscriber(fake.server, "r")
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            next(reader)
        except ballast.BallastError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    reader.close()
    thread.join(LONG_S)
    assert len(ended) == 1
    with pytest.raises(ballast.BallastError, match="closed"):
        reader.next(0)
    reader.close()
    with pytest.raises(ballast.Rejected, match="ballast.Subscriber cannot be copied"):
        copy.copy(reader)
