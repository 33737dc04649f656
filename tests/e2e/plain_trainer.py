"""Trains with PlainClient, that is by generated stubs alone: all ranks of a run, each on a thread.

    PYTHONPATH=STUBS plain_trainer.py SERVER RUN LIKE STEPS [--ranks N] [--micros N] [--cut] [--measure]

It makes a run of the same spec as LIKE, fits least_squares, and prints one JSON line: of each rank what it saw, and a
digest of the weights. --cut: in each step one rank cancels its stream, each time elsewhere in the step. --measure: the
run does not clip; its ranks ask for each step's norm, announce no micro-batch as the last, and clip with the step's end as
LIKE does. At last rank 0 discards a step.
"""

import argparse
import json
import math
import os
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import grpc
from ballast.v1 import admin_pb2, admin_pb2_grpc, run_pb2, trainer_pb2, trainer_pb2_grpc
from least_squares import LeastSquares, has_bias, rate
from plain_client import End, Micro, PlainClient, patiently
from plain_wire import digest_of

MESSAGES = 17  # that a rank sends and receives in a step, credit and the result left aside


def make_run(server: str, run: str, like: str, clips: bool) -> float | None:
    """Returns what LIKE clips to."""
    channel = grpc.insecure_channel(server)
    spec = admin_pb2_grpc.AdminServiceStub(channel).GetRun(admin_pb2.GetRunRequest(run_id=like)).spec
    spec.run_id = run
    most = spec.max_grad_norm if spec.HasField("max_grad_norm") else None
    if not clips:
        spec.ClearField("max_grad_norm")
    request = trainer_pb2.CreateRunRequest(spec=spec)
    assert patiently(lambda: trainer_pb2_grpc.TrainerServiceStub(channel).CreateRun(request)).created
    return most


def begin(client: PlainClient, problem: LeastSquares, loaded: threading.Barrier) -> None:
    """All ranks with the weights that rank 0 uploads."""
    client.attach()
    if client.rank == 0:
        client.load(problem.first)
    loaded.wait()
    if client.rank > 0:
        assert client.pull() == set(range(len(problem.first)))
    client.open()


def check_measured(client: PlainClient) -> None:
    """What was told, on however many streams, is what the result says."""
    assert client.norms and all(told == client.norms[0] for told in client.norms)
    told, result = client.norms[0], client.result
    assert not told.discarded and told.nonfinite_tensors == 0
    assert told.grad_norm == result.grad_norm > 0


def discard(client: PlainClient, problem: LeastSquares, number: int) -> None:
    """By rank 0, as its first chunk is sent; the others ask for the norm, and hear that there is none."""
    before = digest_of(client.weights)
    micros = [Micro(problem.backward(client.weights)[1], 1.0)]
    end = End(discards=True) if client.rank == 0 else End(measures=True, max_grad_norm=0.5)
    result = client.step(number, [], micros, end)
    assert result.outcome == run_pb2.STEP_OUTCOME_SKIPPED and result.reason == "discarded", result
    assert all(told.discarded and math.isnan(told.grad_norm) for told in client.norms)
    assert digest_of(client.weights) == before


def check_after(client: PlainClient, steps: int) -> None:
    """The rank is free at once; the daemon's weights are those that came."""
    digest = digest_of(client.weights)
    client.attach()
    assert client.attached.resume_step == steps + 1 and client.attached.last_result == client.result
    assert client.attached.client_state == str(steps).encode() and client.attached.client_state_step == steps
    assert client.pull(client.attached.digests) == set()
    client.pull()
    assert digest_of(client.weights) == digest


def train_or_end(rank: int, options, loaded: threading.Barrier) -> dict:
    """Where one rank fails, the others would wait for it."""
    try:
        return train(rank, options, loaded)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def train(rank: int, options, loaded: threading.Barrier) -> dict:
    problem, losses = LeastSquares(), []
    client = PlainClient(options.server, options.run, rank, options.ranks)
    begin(client, problem, loaded)
    parts = options.ranks * options.micros
    for step in range(client.attached.resume_step, options.steps + 1):
        micros = []
        for micro in range(options.micros):
            loss, gradients = problem.backward(client.weights, rank * options.micros + micro, parts)
            if not has_bias(rank, micro):
                gradients[1] = None
            micros.append(Micro(gradients, loss))
        losses.append(micros[0].loss)
        client.cut_in = 5 * step % MESSAGES + 1 if options.cut and step % options.ranks == rank else 0
        end = End(options.measure, options.most if options.measure else None)
        result = client.step(step, [trainer_pb2.GroupStep(lr=rate(step))], micros, end)
        assert result.step == step and result.outcome == run_pb2.STEP_OUTCOME_APPLIED, result
        if options.measure:
            check_measured(client)
    clipped = client.result.clip_coefficient < 1
    if options.measure:
        discard(client, problem, options.steps + 1)
    client.close()
    check_after(client, options.steps + options.measure)
    counted = ("chunks_sent", "waits", "out_of_order", "most_under_way", "cuts")
    seen = {name: getattr(client, name) for name in counted}
    credit = client.attached.credit_bytes
    return {"losses": losses, "digest": digest_of(client.weights), "credit": credit, "clipped": clipped, **seen}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("server")
    parser.add_argument("run")
    parser.add_argument("like")
    parser.add_argument("steps", type=int)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--micros", type=int, default=1)
    parser.add_argument("--cut", action="store_true")
    parser.add_argument("--measure", action="store_true")
    options = parser.parse_args()
    options.most = make_run(options.server, options.run, options.like, clips=not options.measure)
    loaded = threading.Barrier(options.ranks)
    with ThreadPoolExecutor(options.ranks) as ranks:
        print(json.dumps(list(ranks.map(lambda rank: train_or_end(rank, options, loaded), range(options.ranks)))))


if __name__ == "__main__":
    main()
