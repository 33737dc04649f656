"""BallastFollowerBehind, fired by a reader that takes nothing while steps go on, under the shipped rules, whose durations
are shortened; and over when the reader has gone."""

import os
import subprocess
import sys
from pathlib import Path

import ballast
import pytest
import torch
from daemon import Daemon, plain_environment, until
from monitoring import Prometheus, hurried_rules, missing_programs
from plain_stubs import make_stubs

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}")


def test_a_reader_that_takes_nothing_is_told_until_it_goes(tmp_path):
    (tmp_path / "rules").mkdir()
    (tmp_path / "stubs").mkdir()
    path = os.pathsep.join([str(make_stubs(tmp_path / "stubs")), str(HERE)])
    weights = torch.nn.Parameter(torch.zeros(8 << 20))  # more than goes unread into a connection
    with Daemon(tmp_path) as daemon, Prometheus(tmp_path, daemon.ops, None, hurried_rules(tmp_path / "rules")) as watch:
        with ballast.SGD([("w", weights)], lr=0.1, server=daemon.server, run="r", follow=True) as optimizer:

            def step() -> None:
                weights.sum().backward()
                optimizer.step()

            step()
            deaf = subprocess.Popen(
                [sys.executable, HERE / "plain_follower.py", daemon.server, "r", "deaf"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**plain_environment(), "PYTHONPATH": path},
            )
            assert deaf.stdout.readline() == "subscribed\n"
            until("a version is made", lambda: 'ballast_version_step{run_id="r"} 1' in daemon.get("/metrics")[1])
            step()
            [alert] = watch.until('ALERTS{alertname="BallastFollowerBehind", alertstate="firing"}', seconds=240)
            assert alert["metric"]["run_id"] == "r"
            # It makes no step meanwhile, which may be told, too.
            assert watch.fired() - {("BallastRunIdle", "r")} == {("BallastFollowerBehind", "r")}
            step()  # it holds nobody up
            deaf.communicate()
            watch.until_true("the alert is over", lambda: not watch.query('ALERTS{alertname="BallastFollowerBehind"}'))
