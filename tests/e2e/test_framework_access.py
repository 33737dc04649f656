"""Unmodified loops of HF Trainer and Lightning, over TLS and with a token, by variables of the environment alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon import Daemon
from framework_accounts import compare, told_by
from grants import give_token
from pki import Pki


@pytest.mark.parametrize("loop", ["hf_trainer", "lightning_loop"])
def test_a_loop_trains_over_tls_with_a_token_as_with_torchs_optimizer(tmp_path: Path, loop: str) -> None:
    pki = Pki(tmp_path / "pki")
    run = loop.replace("_", "-")
    token, access = give_token(tmp_path, run, "push", "--most-runs=1", "--most-streams=4")
    variables = {**pki.variables, "BALLAST_TOKEN_FILE": str(token)}
    theirs = told_by("torch", [loop], tmp_path / "torch")
    with Daemon(tmp_path, *pki.flags, "--access", str(access), "--shm_socket", "off") as daemon:
        ours = told_by("ballast", [loop], tmp_path / "ballast", "--server", daemon.server, variables=variables)
        log = daemon.log.read_text()
    compare(loop, ours[loop], theirs[loop])
    assert '"grant":"team-a"' in log and '"identity":"' in log
    assert '"event":"refused"' not in log and '"event":"quota"' not in log
