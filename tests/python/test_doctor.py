"""What `ballastctl doctor` says of a daemon that a test plays in this process."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from daemon import BINARY
from fake_follow import messages

BALLASTCTL = BINARY.parents[1] / "client" / "cpp" / "ballastctl"
FAILED = 3


def handler(answer: Any, request: Any) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(
        lambda request, context: answer,
        request_deserializer=request.FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )


def test_a_run_that_has_failed_is_not_to_be_deleted_with_its_checkpoints(tmp_path: Path) -> None:
    """A trainer that is started again has it anew from them."""
    message = messages(tmp_path)
    there, runs = message("GetServerResponse")(), message("ListRunsResponse")()
    there.state, there.device, there.max_runs, there.protocol_min, there.protocol_max = "serving", "cuda:0", 16, 1, 1
    runs.runs.add(run_id="r", state=FAILED, failure="the GPU has gone")
    served = {
        "GetServer": handler(there, message("GetServerRequest")),
        "ListRuns": handler(runs, message("ListRunsRequest")),
    }
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ballast.v1.AdminService", served),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    command = [BALLASTCTL, "--server", address, "doctor"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    server.stop(None)
    assert told.returncode == 1 and "FAIL  failed runs" in told.stdout, told.stdout + told.stderr
    said = told.stdout.partition("failed runs")[2].partition("\nWARN")[0]
    assert "start their trainers again" in said and "delete RUN --keep-checkpoints" in said, said
