"""TLS to a daemon: which files a trainer shows and trusts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ballast import _core
from ballast.errors import Rejected


@dataclass(frozen=True)
class Tls:
    """Files in PEM. They may be replaced while an optimizer lives: those that are there then hold for its next connection.

    ca: the authority that signed the daemon's certificate, which must be for the host that `server` names. certificate,
    key: the trainer's own, where the daemon wants one; nobody but its owner may read the key.
    """

    ca: str | os.PathLike[str]
    certificate: str | os.PathLike[str] = ""
    key: str | os.PathLike[str] = ""


def tls_of(given: Any, server: str) -> Tls | None:
    """The option `tls` as it is meant: itself, else what $BALLAST_TLS_CA, $BALLAST_TLS_CERTIFICATE and $BALLAST_TLS_KEY
    name, which are for daemons at a port: a Unix socket knows no TLS. Rejected if it is no Tls."""
    if given is not None and not isinstance(given, Tls):
        raise Rejected(f"tls={given!r}: it must be a ballast.Tls(ca, certificate, key)")
    if given is not None or server.startswith(("unix:", "unix-abstract:")):
        return given
    ca, certificate, key = (os.environ.get(f"BALLAST_TLS_{name}", "") for name in ("CA", "CERTIFICATE", "KEY"))
    return Tls(ca, certificate, key) if ca or certificate or key else None


def files_of(tls: Any, server: str, token_file: Any = None) -> tuple[str, str, str, str]:
    """Of a connection to this daemon: ca, certificate, key and token_file, "" for none. tls: as tls_of() takes it;
    token_file: as the option."""
    files = tls_of(tls, server) or Tls("")
    ca, certificate, key = (os.fspath(file) for file in (files.ca, files.certificate, files.key))
    return (
        ca,
        certificate,
        key,
        os.environ.get("BALLAST_TOKEN_FILE", "") if token_file is None else os.fspath(token_file),
    )


def connect(server: str, connect_s: float, reconnect_s: float, tls: Any, token_file: Any = None) -> _core.Client:
    """A connection to this daemon, which tls_of() decides on; token_file: as the option. Unavailable if no daemon answers,
    or TLS is why there is none; Rejected if a file is not right."""
    return _core.Client.connect(server, connect_s, reconnect_s, *files_of(tls, server, token_file))
