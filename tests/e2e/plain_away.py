"""A rank by PlainClient whose stream is cut within a step, and that comes back when the others have closed three.

    PYTHONPATH=STUBS plain_away.py SERVER RUN

Prints one JSON line: what it found then, and what all ranks saw of the next step.
"""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from ballast.v1 import run_pb2, trainer_pb2, trainer_pb2_grpc
from least_squares import NAMES, LeastSquares
from plain_client import Micro, PlainClient
from plain_trainer import begin
from plain_wire import digest_of

RANKS = 3
RATE = 0.01


class Away(PlainClient):
    """Comes back when it may."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.gone, self.may_come_back = threading.Event(), threading.Event()

    def attach(self, token: bytes = b"") -> None:
        if token:
            self.gone.set()
            self.may_come_back.wait()
        super().attach(token)


def make_run(server: str, run: str, problem: LeastSquares) -> None:
    tensors = [
        run_pb2.TensorSpec(name=name, shape=first.shape, dtype="fp32") for name, first in zip(NAMES, problem.first)
    ]
    groups = [run_pb2.GroupSpec(rule="adamw")]
    spec = run_pb2.RunSpec(run_id=run, tensors=tensors, groups=groups, ranks=RANKS, rank_timeout_s=1000)
    trainer = trainer_pb2_grpc.TrainerServiceStub(grpc.insecure_channel(server))
    trainer.CreateRun(trainer_pb2.CreateRunRequest(spec=spec))


def step(client: PlainClient, number: int, lr: float):
    loss, gradients = LeastSquares().backward(client.weights, client.rank, RANKS)
    return client.step(number, [trainer_pb2.GroupStep(lr=lr)], [Micro(gradients, loss)])


def steps(ranks: ThreadPoolExecutor, clients: list[PlainClient], number: int, rates: list[float]):
    """The step's result, the same for all of them."""
    results = list(ranks.map(lambda client, lr: step(client, number, lr), clients, rates))
    assert all(result == results[0] for result in results) and results[0].step == number
    return results[0]


def miss_three(ranks: ThreadPoolExecutor, one: PlainClient, other: PlainClient, away: Away) -> None:
    """Begun with other values by one than by the other, which closes them at once."""
    away.cut_in = 3
    missing = ranks.submit(step, away, 2, RATE)
    away.gone.wait()
    try:
        for number in (2, 3, 4):
            assert steps(ranks, [one, other], number, [RATE, 2 * RATE]).outcome == run_pb2.STEP_OUTCOME_ABORTED
    finally:
        away.may_come_back.set()
    assert missing.result().step == 4


def main() -> None:
    server, run = sys.argv[1:]
    problem, loaded = LeastSquares(), threading.Barrier(RANKS)
    make_run(server, run, problem)
    away = Away(server, run, 2, RANKS)
    clients = [PlainClient(server, run, 0, RANKS), PlainClient(server, run, 1, RANKS), away]
    with ThreadPoolExecutor(RANKS) as ranks:
        list(ranks.map(lambda client: begin(client, problem, loaded), clients))
        steps(ranks, clients, 1, [RATE] * RANKS)
        miss_three(ranks, *clients)
        missed = [[number, result.reason] for number, result in sorted(away.results.items())]
        steps(ranks, clients, away.attached.resume_step, [RATE] * RANKS)
    last = [[client.result.step, run_pb2.StepOutcome.Name(client.result.outcome)] for client in clients]
    for client in clients:
        client.close()
    digests = [digest_of(client.weights) for client in clients]
    print(json.dumps({"resume_step": away.attached.resume_step, "missed": missed, "last": last, "digests": digests}))


if __name__ == "__main__":
    main()
