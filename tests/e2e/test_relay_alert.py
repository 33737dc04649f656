"""BallastRelayDisconnected, fired by a relay whose upstream is killed, under the shipped rules, whose durations are shortened; and
over when the upstream is back."""

import ballast
import pytest
import torch
from daemon import Daemon, until
from monitoring import Prometheus, hurried_rules, missing_programs

pytestmark = pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}")
SERIES = 'ballast_relay_connected{run_id="r"}'


def test_a_relay_without_its_upstream_is_told_until_that_is_back(tmp_path):
    for name in ("rules", "upstream", "relay", "disk"):
        (tmp_path / name).mkdir()
    weights = torch.nn.Parameter(torch.zeros(8))
    with Daemon(tmp_path / "upstream", "--storage.dir", str(tmp_path / "disk")) as upstream:
        with ballast.SGD([("w", weights)], lr=0.1, server=upstream.server, run="r", follow=True) as optimizer:
            weights.sum().backward()
            optimizer.step()
            optimizer.checkpoint()
        flags = ["--relay.upstream", upstream.server, "--relay.runs", "r"]
        with Daemon(tmp_path / "relay", *flags) as relay:
            until("it is connected", lambda: f"{SERIES} 1" in relay.get("/metrics")[1])
            with Prometheus(tmp_path, relay.ops, None, hurried_rules(tmp_path / "rules")) as watch:
                upstream.process.kill()
                query = 'ALERTS{alertname="BallastRelayDisconnected", alertstate="firing"}'
                [alert] = watch.until(query, seconds=240)
                assert alert["metric"]["run_id"] == "r"
                upstream.restart()
                watch.until_true(
                    "the alert is over", lambda: not watch.query('ALERTS{alertname="BallastRelayDisconnected"}')
                )
