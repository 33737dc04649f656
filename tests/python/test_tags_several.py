"""Names of versions of a run that is on several daemons, each of which keeps its part's."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ballast
from daemon import BINARY, Daemons
from models import perceptron, same_bits, spirals, weights_of
from test_follow_daemon import train

LONG_S = 60.0
TAGGED = ballast.Follow(tags=4)
BALLASTCTL = BINARY.parents[1] / "client" / "cpp" / "ballastctl"


@pytest.fixture(params=[False, True], ids=["in memory", "on the disk"])
def several(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemons]:
    with Daemons(2, storage=tmp_path / "storage" if request.param else None) as started:
        yield started


def ctl(server: str, *arguments: str) -> str:
    command = [BALLASTCTL, *arguments, "--server", server]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LONG_S).stdout


def optimizer_of(module: nn.Module, server: str, follow: ballast.Follow = TAGGED, **options: object) -> ballast.AdamW:
    parameters = module.named_parameters()
    return ballast.AdamW(parameters, lr=1e-2, server=server, run="r", follow=follow, **options)  # type: ignore[arg-type]


def named(server: str, name: str) -> tuple[int | None, list[torch.Tensor]]:
    module = perceptron(3)
    with ballast.follow(module, server=server, run="r", at=name) as follower:
        assert follower.wait(timeout=LONG_S)
        return follower.step, weights_of(module)


def test_a_name_that_is_given_while_the_run_goes_on_is_of_one_step(several: Daemons) -> None:
    trained = perceptron(1)
    with optimizer_of(trained, several.server) as optimizer, ThreadPoolExecutor() as pool:
        train(trained, optimizer, 1)
        weights = {1: weights_of(trained)}
        for name in ("one", "two", "three"):
            asked = pool.submit(ctl, several.server, "tag", "r", name)
            while not asked.done():
                train(trained, optimizer, 1)
                weights[len(weights) + 1] = weights_of(trained)
            asked.result()
            step, had = named(several.server, name)
            assert step is not None and same_bits(had, weights[step])


def test_who_is_no_rank_takes_one_name_more_for_a_moment(several: Daemons) -> None:
    trained = perceptron(1)
    with optimizer_of(trained, several.server, ballast.Follow(tags=1)) as optimizer:
        train(trained, optimizer, 1)
        optimizer.tag("best")
        train(trained, optimizer, 1)
        with pytest.raises(subprocess.CalledProcessError) as refused:
            ctl(several.server, "tag", "r", "best", "--replace")
        assert "allows 1 (follow.tags)" in refused.value.stderr and "one name more" in refused.value.stderr
        assert optimizer.tags() == {"best": 1}
        assert optimizer.tag("best", replace=True) == 2
        assert optimizer.tags() == {"best": 2}


def test_all_ranks_may_give_the_same_name(several: Daemons) -> None:
    def rank(number: int) -> list[int]:
        module = perceptron(1)
        inputs, labels = spirals(1)
        with optimizer_of(module, several.server, rank=number, world_size=3) as optimizer:
            steps = []
            for _ in range(4):
                nn.functional.cross_entropy(module(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                steps.append(optimizer.tag("newest", replace=True))
            assert optimizer.tags() == {"newest": 4}
            return steps

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(rank, range(3))) == [[1, 2, 3, 4]] * 3
    assert named(several.server, "newest")[0] == 4


def test_what_was_taken_away_by_halves_is_not_read(several: Daemons) -> None:
    trained = perceptron(1)
    with optimizer_of(trained, several.server) as optimizer:
        train(trained, optimizer, 1)
        assert optimizer.tag("good") == 1
        ctl(several.each[1].server, "untag", "r", "good")
        with pytest.raises(
            ballast.Rejected, match=f"{several.each[1].server} none: it is being named, or was named or"
        ):
            named(several.server, "good")
        assert "by halves" in ctl(several.server, "versions", "r")
        train(trained, optimizer, 1)
        with pytest.raises(ballast.Rejected, match="'good' is the name of another version"):
            optimizer.tag("good")
        assert optimizer.tag("good", replace=True) == 2
        assert same_bits(named(several.server, "good")[1], weights_of(trained))
        optimizer.untag("good")
        assert optimizer.tags() == {}


def test_names_on_the_disk_outlive_the_daemons(tmp_path: Path) -> None:
    trained = perceptron(1)
    with Daemons(2, storage=tmp_path / "storage") as daemons:
        with optimizer_of(trained, daemons.server) as optimizer:
            train(trained, optimizer, 2)
            optimizer.tag("good")
            good = weights_of(trained)
            train(trained, optimizer, 1)
            optimizer.checkpoint()
        for number in range(2):
            daemons.restart(number)
        step, had = named(daemons.server, "good")
        assert step == 2 and same_bits(had, good)
        ctl(daemons.server, "follow", "r", "--tag", "good", "--out", str(tmp_path / "fetched"))
        [file] = (tmp_path / "fetched").glob("*.safetensors")
        assert same_bits([load_file(file)[name] for name, _ in trained.named_parameters()], good)
        with optimizer_of(trained, daemons.server) as optimizer:
            train(trained, optimizer, 1)
            assert optimizer.tags() == {"good": 2}
