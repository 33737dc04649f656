"""BallastGrantExpiring and BallastReloadFailed, fired by a real daemon under the shipped rules, whose durations are
shortened."""

from datetime import datetime, timedelta, timezone

import pytest
from daemon import Daemon, until
from monitoring import Prometheus, hurried_rules, missing_programs
from pki import Pki

pytestmark = pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}")


def firing(name: str) -> str:
    return f'ALERTS{{alertname="{name}", alertstate="firing"}}'


def test_a_grant_that_expires_soon_is_told_until_it_is_replaced_and_so_is_a_file_that_is_not_right(tmp_path):
    access = tmp_path / "access.yaml"

    def write(days: int) -> None:
        day = datetime.now(timezone.utc) + timedelta(days=days)
        following = tmp_path / "access.next"
        following.write_text(
            f"grants: [{{name: team-a, identity: x, runs: [a], scope: push, expires: {day:%Y-%m-%d}}}]\n"
        )
        following.rename(access)

    write(3)
    unix = ("--listen", f"unix:{tmp_path}/grpc", "--access", str(access))
    (tmp_path / "rules").mkdir()
    with Daemon(tmp_path, *unix) as daemon:
        until("the log names the grant", lambda: '"grant":"team-a"' in daemon.log.read_text())
        with Prometheus(tmp_path, daemon.ops, None, hurried_rules(tmp_path / "rules")) as prometheus:
            prometheus.until(firing("BallastGrantExpiring"))
            assert prometheus.fired() == {("BallastGrantExpiring", "")}
            access.write_text("grants: [{name: team-a}]\n")
            [alert] = prometheus.until(firing("BallastReloadFailed"))
            assert alert["metric"]["files"] == "access"
            write(30)
            for name in ("BallastGrantExpiring", "BallastReloadFailed"):
                prometheus.until_true(f"{name} is over", lambda name=name: not prometheus.query(firing(name)))


def test_a_pair_that_does_not_fit_together_is_told(tmp_path):
    pki, other = Pki(tmp_path / "pki"), Pki(tmp_path / "other")
    (tmp_path / "rules").mkdir()
    with Daemon(tmp_path, *pki.flags) as daemon:
        pki.replace("daemon.key", other / "daemon.key")
        with Prometheus(tmp_path, daemon.ops, None, hurried_rules(tmp_path / "rules")) as prometheus:
            [alert] = prometheus.until(firing("BallastReloadFailed"))
            assert alert["metric"]["files"] == "tls"
            pki.replace("daemon.crt", other / "daemon.crt")
            prometheus.until_true("the alert is over", lambda: not prometheus.query(firing("BallastReloadFailed")))
