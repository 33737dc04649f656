"""Which files a trainer takes for TLS; tests/e2e/test_tls.py has daemons that speak it."""

from __future__ import annotations

from pathlib import Path

import pytest

import ballast
from ballast.tls import tls_of


def set_variables(monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    for name in ("CA", "CERTIFICATE", "KEY"):
        monkeypatch.delenv(f"BALLAST_TLS_{name}", raising=False)
    for name, file in files.items():
        monkeypatch.setenv(f"BALLAST_TLS_{name}", file)


def test_the_option_wins_over_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch)
    assert tls_of(None, "node7:7700") is None
    set_variables(monkeypatch, CA="/ca", CERTIFICATE="/own", KEY="/key")
    assert tls_of(None, "node7:7700") == ballast.Tls("/ca", "/own", "/key")
    given = ballast.Tls(Path("/other"))
    assert tls_of(given, "node7:7700") is given


def test_variables_are_not_for_unix_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, CA="/ca")
    assert tls_of(None, "unix:/run/ballast/grpc") is None


def test_anything_else_is_refused() -> None:
    with pytest.raises(ballast.Rejected, match="ballast.Tls"):
        tls_of({"ca": "/ca"}, "node7:7700")


@pytest.mark.parametrize(
    ("server", "tls", "says"),
    [
        ("127.0.0.1:1", ballast.Tls("/no/such/ca.crt"), "/no/such/ca.crt: cannot be read"),
        ("127.0.0.1:1", ballast.Tls("/ca.crt", "/own.crt"), "a certificate and no key"),
        ("unix:/run/ballast/grpc", ballast.Tls("/ca.crt"), "which TLS is not for"),
        ("user:hunter2@node7:7700", None, "without a scheme, a user, a password"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(server: str, tls: ballast.Tls | None, says: str) -> None:
    with pytest.raises(ballast.Rejected, match=says) as refused:
        ballast.delete_run("r1", server, tls=tls)
    assert "hunter2" not in str(refused.value)
