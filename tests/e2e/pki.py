"""Certificates for a daemon and its clients: those of `ballastctl certs init`, and others that openssl makes of the same
authority, of any dates.

    pki = Pki(folder)
    with Daemon(folder, *pki.flags, clients=pki.variables) as daemon: ...
"""

import shutil
import ssl
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path

from daemon import BALLASTCTL, plain_environment

NAMES = {
    "daemon": "serverAuth\nsubjectAltName = DNS:localhost, IP:127.0.0.1",
    "trainer": "clientAuth\nsubjectAltName = URI:spiffe://test/trainer",
}
CA = """
[ca]
default_ca = here
[here]
new_certs_dir = .
database = index
serial = serial
default_md = sha256
policy = any
certificate = ca.crt
private_key = ca.key
[any]
commonName = supplied
[names]
basicConstraints = CA:FALSE
extendedKeyUsage = {names}
"""


class Pki:
    """folder: of its own. flags: the daemon's; variables: of its clients' environment."""

    def __init__(self, folder: Path):
        self.folder = folder
        command = [BALLASTCTL, "certs", "init", "--out", folder]
        self.said = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60, env=plain_environment()
        ).stdout
        files = {"certificate": "daemon.crt", "key": "daemon.key", "client_ca": "ca.crt"}
        self.flags = [f"--tls.{key}={folder / name}" for key, name in files.items()]
        names = {"CA": "ca.crt", "CERTIFICATE": "trainer.crt", "KEY": "trainer.key"}
        self.variables = {f"BALLAST_TLS_{key}": str(folder / name) for key, name in names.items()}

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self / "ca.crt")

    def take(self, name: str, other: "Pki") -> None:
        """Rotates a pair to the other's."""
        for suffix in ("crt", "key"):
            self.replace(f"{name}.{suffix}", other / f"{name}.{suffix}")

    def replace(self, name: str, source: Path) -> None:
        """Whole, or not at all; with the source's rights."""
        shutil.copy2(source, self / f"{name}.next")
        (self / f"{name}.next").rename(self / name)

    def issue(self, name: str, begin: timedelta, end: timedelta) -> None:
        """A new pair for the daemon or the trainer, valid from and until so long from now."""
        now = datetime.now(timezone.utc)
        dates = [f"{now + offset:%Y%m%d%H%M%SZ}" for offset in (begin, end)]
        (self / "ca.cnf").write_text(CA.format(names=NAMES[name]))
        (self / "index").write_text("")
        (self / "index.attr").write_text("unique_subject = no\n")
        (self / "serial").write_text(f"{int(now.timestamp() * 1e6):032x}\n")
        self._openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
            "-keyout", f"{name}.key", "-out", f"{name}.csr",
        )  # fmt: skip
        self._openssl(
            "ca", "-batch", "-config", "ca.cnf", "-extensions", "names", "-notext", "-in", f"{name}.csr",
            "-out", f"{name}.crt", "-startdate", dates[0], "-enddate", dates[1],
        )  # fmt: skip
        (self / f"{name}.key").chmod(0o600)

    def _openssl(self, *arguments: str) -> None:
        result = subprocess.run(["openssl", *arguments], capture_output=True, text=True, cwd=self.folder, timeout=60)
        assert result.returncode == 0, result.stderr
