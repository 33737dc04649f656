"""What one caller may have of the daemon, as an operator says it: runs that count after a restart, and a stranger whose
calls fail at full rate, beside a trainer that goes on."""

import json
import re

import grpc
import pytest
from daemon import Daemon, until
from failing_calls import Stranger
from grants import give_token
from pki import Pki
from stepping import Trainer


def refusals(daemon, reason: str) -> int:
    metrics = daemon.get("/metrics")[1]
    return int(re.search(rf'ballast_quota_refused_total{{reason="{reason}"}} (\d+)', metrics)[1])


def logged(daemon, event: str) -> list[dict]:
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def test_runs_that_are_read_back_count_as_before(tmp_path):
    token, access = give_token(tmp_path, "team-a-*", "push", "--most-runs=1")
    (tmp_path / "storage").mkdir()
    with_token = {"BALLAST_TOKEN_FILE": str(token)}
    places = ("--listen", f"unix:{tmp_path}/grpc", "--access", str(access), "--storage.dir", f"{tmp_path}/storage")
    with Daemon(tmp_path, *places) as daemon:
        with Trainer(daemon.server, "team-a-1", variables=with_token) as trainer:
            assert trainer.step() == 1
        assert daemon.stop() == 0
    with Daemon(tmp_path, *places) as daemon:
        with pytest.raises(AssertionError, match=r"1 runs that grant team-a may have.*it has 1: team-a-1"):
            with Trainer(daemon.server, "team-a-2", variables=with_token) as refused:
                refused.step()
        assert refusals(daemon, "runs") == 1
        [line] = logged(daemon, "quota")
        assert (line["reason"], line["caller"]) == ("runs", "grant team-a")


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_who_calls_too_often_is_told_when_to_ask_again_and_the_clients_do(tmp_path, transport):
    token, access = give_token(tmp_path, "team-a-*", "push", "--most-requests=2")
    with Daemon(tmp_path, "--listen", f"unix:{tmp_path}/grpc", "--access", str(access)) as daemon:
        with grpc.insecure_channel(daemon.server) as channel:
            list_runs = channel.unary_unary("/ballast.v1.AdminService/ListRuns")
            bearer = [("authorization", f"Bearer {token.read_text().strip()}")]
            with pytest.raises(grpc.RpcError) as refused:
                for _ in range(10_000):
                    list_runs(b"", metadata=bearer)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 calls a second that it may (most_requests of grant team-a)" in refused.value.details()
        [stated] = [value for key, value in refused.value.trailing_metadata() if key == "ballast-retry-after-ms"]
        assert 0 < int(stated) <= 500
        before = refusals(daemon, "requests")
        with Trainer(daemon.server, "team-a-1", transport, {"BALLAST_TOKEN_FILE": str(token)}) as trainer:
            assert trainer.step() == 1
        assert refusals(daemon, "requests") > before + 3, "the trainer itself was refused, more than once"


def test_a_stranger_at_full_rate_is_refused_unread_and_a_trainer_beside_it_loses_no_step(tmp_path):
    token, access = give_token(tmp_path, "team-a-*", "push")
    pki = Pki(tmp_path / "pki")
    open_tls = [flag for flag in pki.flags if "client_ca" not in flag] + ["--tls.client_certificates", "none"]
    variables = {"BALLAST_TLS_CA": str(pki / "ca.crt"), "BALLAST_TOKEN_FILE": str(token)}
    with Daemon(tmp_path, *open_tls, "--access", str(access), "--shm_socket", "off") as daemon:
        with Trainer(daemon.server, "team-a-1", "grpc", variables) as beside:
            assert beside.step() == 1
            step = 1
            with Stranger(daemon.server, pki / "ca.crt", "127.0.0.2") as stranger:
                until("it is refused unread", lambda: refusals(daemon, "failures") > 0)
                while stranger.calls < 5_000 or step < 30:
                    step += 1
                    assert beside.step() == step
                with Trainer(daemon.server, "team-a-2", "grpc", variables) as another:
                    assert another.step() == 1
                calls, unread = stranger.calls, refusals(daemon, "failures")
            # A hundred at once, and a hundred a minute.
            assert calls - unread < 100 + 100 * 10
            assert not logged(daemon, "stream_ended")[1:], "another's end, and no other"
            told = logged(daemon, "quota")
            assert told and {line["caller"] for line in told} == {"address 127.0.0.2"}
            assert len(logged(daemon, "refused")) < 1000 and "nobodys-token" not in daemon.log.read_text()
            assert beside.step() == step + 1
