"""BallastCertificateExpiring, fired by a real daemon under the shipped rules, whose durations are shortened."""

from datetime import timedelta

import pytest
from daemon import Daemon, until
from monitoring import Prometheus, hurried_rules, missing_programs
from pki import Pki

pytestmark = pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}")


def test_a_certificate_that_expires_soon_is_told_until_there_is_another(tmp_path):
    pki = Pki(tmp_path / "pki")
    pki.issue("daemon", -timedelta(hours=10), timedelta(hours=1))
    (tmp_path / "rules").mkdir()
    with Daemon(tmp_path, *pki.flags) as daemon:
        until("the log tells of it", lambda: '"event":"certificate_expiring"' in daemon.log.read_text())
        with Prometheus(tmp_path, daemon.ops, None, hurried_rules(tmp_path / "rules")) as prometheus:
            firing = 'ALERTS{alertname="BallastCertificateExpiring", alertstate="firing"}'
            [alert] = prometheus.until(firing)
            assert alert["metric"]["file"] == "certificate"
            pki.take("daemon", Pki(tmp_path / "other"))
            prometheus.until_true("the alert is over", lambda: not prometheus.query(firing))
