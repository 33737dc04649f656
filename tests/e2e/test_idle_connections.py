"""Ten thousand connections that nobody uses, and a trainer beside them."""

import re
import resource

import pytest
from daemon import Daemon, until
from idle_connections import Idle, client_context, flags
from memory import status_bytes
from pki import Pki
from stepping import Trainer


def open_connections(daemon) -> int:
    found = re.search(r"^ballast_connections (\d+)$", daemon.get("/metrics")[1], re.MULTILINE)
    return int(found[1]) if found else 0


# Handshakes are most of a connection's time, so that fewer of them are made. The bytes of each are more than twice those
# that idle_connections.py measured: 18 kB, and 104 kB over TLS.
@pytest.mark.parametrize("over_tls, connections, most_bytes", [(False, 10_000, 48 << 10), (True, 500, 256 << 10)])
def test_idle_connections_take_bounded_memory_and_no_trainers_place(tmp_path, over_tls, connections, most_bytes):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < connections + 500:
        pytest.skip(f"{connections} connections need as many open files (ulimit -Hn)")
    pki = Pki(tmp_path / "pki") if over_tls else None
    secured, variables = (pki.flags, pki.variables) if pki else ([], {})
    with Daemon(tmp_path, *flags(connections), *secured) as daemon:
        with Trainer(daemon.server, "beside", "grpc", variables) as beside:
            assert beside.step() == 1
            before = status_bytes(daemon.process.pid, "VmRSS")
            with Idle(daemon.server, connections, client_context(pki) if pki else None) as idle:
                assert idle.open() == connections
                until("the metric counts them", lambda: open_connections(daemon) >= connections)
                for step in range(2, 22):
                    assert beside.step() == step
                assert (status_bytes(daemon.process.pid, "VmHWM") - before) / connections < most_bytes
                with Trainer(daemon.server, "afterwards", "grpc", variables) as afterwards:
                    assert afterwards.step() == 1
                assert daemon.get("/livez") == (200, "ok\n")
            until("the metric knows that they are gone", lambda: open_connections(daemon) < 100)
            assert beside.step() == 22
