"""Modules that follow a run."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import nn

import ballast
from ballast.followed_parameters import bare
from fake_follow import CHUNK, FakeFollow
from followed_net import Net, weights_at

LONG_S = 60.0


def assert_weights(module: nn.Module, step: int) -> None:
    for name, weights in weights_at(step, module).items():
        assert torch.equal(module.get_parameter(name), weights), name


def follow(fake: FakeFollow, module: nn.Module, **options: Any) -> ballast.Follower:
    return ballast.follow(module, server=fake.server, run="r", **options)


def test_a_module_gets_each_version_before_its_forward(fake: FakeFollow, net: Net) -> None:
    told: list[int] = []
    with follow(fake, net, on_version=lambda version: told.append(version.step)) as follower:
        assert follower.version is follower.step is follower.generation is follower.staleness_s is None
        assert follower.lag == 0 and follower.unfollowed == [] and follower.run == "r"
        assert not follower.wait(timeout=0)
        fake.whole(weights_at(1), 1)
        assert follower.wait(timeout=LONG_S)
        assert_weights(net, 1)
        assert net.tied.weight is net.inner.weight
        assert (follower.step, follower.generation, told) == (1, 1, [1])
        assert follower.version is not None and len(follower.version.tensors) == 0
        version = net.inner.weight._version
        fake.changed(weights_at(2), list(weights_at(2)), 2, base=1)
        while follower.lag == 0:
            assert follower._feed.wait(follower.version, LONG_S)
        assert_weights(net, 1)
        net(torch.ones(3))
        assert_weights(net, 2)
        assert follower.step == 2 and follower.lag == 0 and told == [1, 2]
        assert net.inner.weight._version > version
        assert not follower.update()
    assert not net._forward_pre_hooks and not net._forward_hooks
    net(torch.ones(3))
    with pytest.raises(ballast.Rejected, match="this follower is closed"):
        follower.update()
    follower.close()


def test_a_rewound_run_takes_the_module_back(fake: FakeFollow, net: Net) -> None:
    with follow(fake, net) as follower:
        fake.whole(weights_at(9), 9)
        assert follower.wait(step=9, timeout=LONG_S)
        fake.whole(weights_at(4), 4, generation=2)
        assert follower._feed.wait(follower.version, LONG_S)
        assert follower.update()
        assert (follower.step, follower.generation) == (4, 2)
        assert_weights(net, 4)
        assert not follower.wait(step=5, timeout=0)


def test_held_weights_stay(fake: FakeFollow, net: Net) -> None:
    with follow(fake, net) as follower:
        fake.whole(weights_at(1), 1)
        follower.wait(timeout=LONG_S)
        with follower.held() as version:
            assert version is not None and version.step == 1
            seen = follower._feed.newest
            fake.whole(weights_at(2), 2)
            assert follower._feed.wait(seen, LONG_S)
            net(torch.ones(3))
            assert_weights(net, 1)
            with pytest.raises(ballast.Rejected, match="within a forward or held"):
                follower.update()
        net(torch.ones(3))
        assert_weights(net, 2)


def test_no_forward_of_any_thread_sees_two_versions(fake: FakeFollow, net: Net) -> None:
    steps, looks, over = 40, [], threading.Event()

    def look(module: nn.Module, inputs: Any) -> None:
        """In the middle of a forward: the value in each tensor, without its place among the module's."""
        values = [(p - index / 8).unique().tolist() for index, p in enumerate(net.parameters())]
        looks.append([value for of_tensor in values for value in of_tensor])

    def call() -> None:
        while not over.is_set():
            with torch.inference_mode():
                net(torch.ones(3))

    with follow(fake, net) as follower:
        fake.whole(weights_at(0), 0)
        follower.wait(timeout=LONG_S)
        net.head.register_forward_pre_hook(look)
        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for step in range(1, steps):
            fake.changed(weights_at(step), list(weights_at(step)), step, base=step - 1)
        arrived = follower.wait(step=steps - 1, timeout=LONG_S)
        over.set()
        for thread in threads:
            thread.join()
    assert arrived and looks
    assert [seen for seen in looks if len(set(seen)) != 1] == []
    assert_weights(net, steps - 1)


def test_an_error_of_the_thread_is_raised_by_the_next_forward(
    fake: FakeFollow, net: Net, capsys: pytest.CaptureFixture[str]
) -> None:
    follower = follow(fake, net)
    fake.whole(weights_at(1), 1)
    follower.wait(timeout=LONG_S)
    fake.end(grpc.StatusCode.NOT_FOUND, "run 'r' was deleted")
    assert follower._feed.wait(follower.version, LONG_S)
    for _ in range(2):
        with pytest.raises(ballast.Rejected, match="run 'r' was deleted"):
            net(torch.ones(3))
    with pytest.raises(ballast.Rejected, match="run 'r' was deleted"):
        follower.wait(step=2)
    follower.close()
    assert "had ended" not in capsys.readouterr().err
    net(torch.ones(3))


def test_an_error_that_nobody_saw_is_said_at_the_end(
    fake: FakeFollow, net: Net, capsys: pytest.CaptureFixture[str]
) -> None:
    follower = follow(fake, net)
    fake.end(grpc.StatusCode.NOT_FOUND, "run 'r' was deleted")
    assert follower._feed.wait(None, LONG_S)
    follower.close()
    assert "following run 'r' had ended: " in capsys.readouterr().err


def test_a_forward_that_raises_leaves_the_weights_free(fake: FakeFollow, net: Net) -> None:
    with follow(fake, net) as follower:
        fake.whole(weights_at(1), 1)
        with pytest.raises(RuntimeError):
            net(torch.ones(5))
        follower.wait(timeout=LONG_S)
        assert_weights(net, 1)


def test_a_follower_ends_with_its_module(fake: FakeFollow) -> None:
    module = Net()
    feed = follow(fake, module)._feed
    gc.collect()
    assert feed._thread.is_alive(), "a module that is there is followed"
    del module
    gc.collect()
    feed._thread.join(LONG_S)
    assert not feed._thread.is_alive()


def test_weights_that_do_not_lie_in_a_row(fake: FakeFollow) -> None:
    module = Net()
    module.head.weight.data = torch.empty(CHUNK, 3).t()
    with follow(fake, module) as follower:
        fake.whole(weights_at(3), 3)
        follower.wait(timeout=LONG_S)
        assert not module.head.weight.is_contiguous()
        assert_weights(module, 3)


def test_an_amended_run_is_matched_anew(fake: FakeFollow, net: Net) -> None:
    some = {name: tensor for name, tensor in weights_at(1).items() if name != "head.weight"}
    fake.describe(some)
    with follow(fake, net) as follower:
        assert follower.unfollowed == ["head.weight"]
        fake.whole(some, 1)
        follower.wait(timeout=LONG_S)
        fake.describe(weights_at(2))
        fake.end(grpc.StatusCode.UNAVAILABLE, "run 'r' was amended")
        fake.whole(weights_at(2), 2)
        assert follower.wait(step=2, timeout=LONG_S)
        assert follower.unfollowed == []
        assert_weights(net, 2)


# --- names and forms ---------------------------------------------------------------------------------------------------


def test_names_of_wrapped_modules(tmp_path: Path, net: Net) -> None:
    assert bare("module._orig_mod.a._orig_mod.b") == "a.b"
    for wrapped in (nn.Sequential(), net):
        given = weights_at(1)
        if wrapped is not net:
            given = {f"module.{name}": tensor for name, tensor in given.items()}
        with FakeFollow(tmp_path, given) as fake:
            module = nn.DataParallel(net) if wrapped is net else net
            with follow(fake, module) as follower:
                fake.whole(given, 1)
                follower.wait(timeout=LONG_S)
                assert_weights(net, 1)


def test_names_that_are_given(tmp_path: Path, net: Net) -> None:
    given = {"body.weight": weights_at(1)["inner.weight"], "rest": torch.zeros(7)}
    names = {"body.weight": "tied.weight", "rest": None}
    for way in (names, names.get):
        with FakeFollow(tmp_path, given) as fake, follow(fake, net, names=way) as follower:
            assert follower.unfollowed == ["inner.bias", "head.weight"]
            fake.whole(given, 1)
            follower.wait(timeout=LONG_S)
            assert torch.equal(net.inner.weight, given["body.weight"])


def test_what_does_not_fit_is_named(tmp_path: Path, net: Net) -> None:
    whole = weights_at(1)
    other = {f"w{i}": torch.zeros(1) for i in range(7)}
    for given, names, what in (
        (
            other,
            None,
            "run 'r' has 'w0', 'w1', 'w2', 'w3', 'w4' and 2 more, and the module has no such parameter: it has 'in",
        ),
        ({"param.0": torch.zeros(1)}, None, "parameters without names: give it model.named_parameters"),
        (whole, {"x": "y"}, "names has 'x', and run 'r' has no such tensor"),
        (whole, lambda name: 3, "names says 3 of tensor 'inner.weight'"),
        (whole, {"inner.weight": "head.weight"}, "'inner.weight' and 'head.weight' of run 'r' are one parameter"),
        (whole | {"inner.bias": torch.zeros(2)}, None, r"'inner.bias' has shape \(4096,\) here and \(2,\) in the run"),
        (
            whole | {"inner.bias": torch.zeros(CHUNK).bfloat16()},
            None,
            "'inner.bias' is torch.float32 here and torch.bfloat16",
        ),
    ):
        with FakeFollow(tmp_path, given) as fake, pytest.raises(ballast.Rejected, match=what):
            follow(fake, net, names=names)
    with FakeFollow(tmp_path, whole) as fake:
        with pytest.raises(ballast.Rejected, match="'inner.weight' is on the meta device"):
            follow(fake, net.to("meta"))
        with pytest.raises(ballast.Rejected, match=r"follow\(int\): it must be a torch.nn.Module"):
            follow(fake, 3)  # type: ignore[arg-type]


# --- the optimizers' option --------------------------------------------------------------------------------------------


def test_the_option_of_the_optimizers() -> None:
    from ballast.commit import step_rules

    assert "follow" not in step_rules({}).spec() and "follow" not in step_rules({"follow": False}).spec()
    assert step_rules({"follow": True}).spec()["follow"] == {"every": 1, "readers": 16}
    assert step_rules({"follow": ballast.Follow(every=5, readers=2)}).spec()["follow"] == {"every": 5, "readers": 2}
    assert step_rules({"follow": ballast.Follow(tags=3)}).spec()["follow"] == {"every": 1, "readers": 16, "tags": 3}
    for wrong, what in ((3, "follow=3: it must be True, False or a ballast.Follow"), ("yes", "follow='yes'")):
        with pytest.raises(ballast.Rejected, match=what):
            step_rules({"follow": wrong})
    for name, value in (("every", 0), ("readers", 1025), ("readers", True), ("tags", -1), ("tags", 257)):
        with pytest.raises(ballast.Rejected, match=rf"Follow\({name}={value}\)"):
            ballast.Follow(**{name: value})
