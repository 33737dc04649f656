"""A trainer that speaks the wire with what any language has: grpcio, and the stubs made of proto/. No code of Ballast's.

    PYTHONPATH=STUBS plain_trainer.py SERVER RUN LIKE STEPS

It makes a run of the same spec as LIKE, fits least_squares, and prints one JSON line: what it saw, and a digest of the
weights.
"""

import hashlib
import json
import queue
import sys

import grpc
import numpy as np
from ballast.v1 import admin_pb2, admin_pb2_grpc, run_pb2, trainer_pb2, trainer_pb2_grpc
from least_squares import LeastSquares, rate


def crc32c_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


TABLE = crc32c_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


class PlainTrainer:
    def __init__(self, server: str, run: str, like: str):
        channel = grpc.insecure_channel(server)
        self.stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        spec = admin_pb2_grpc.AdminServiceStub(channel).GetRun(admin_pb2.GetRunRequest(run_id=like)).spec
        spec.run_id = run
        self.stub.CreateRun(trainer_pb2.CreateRunRequest(spec=spec))
        self.attached = self.stub.Attach(
            trainer_pb2.AttachRequest(run_id=run, world=1, protocol_min=1, protocol_max=1, client_version="plain")
        )
        self.shapes = [tuple(tensor.shape) for tensor in spec.tensors]
        self.weights = [np.zeros(shape, np.float32) for shape in self.shapes]
        self.requests: queue.SimpleQueue = queue.SimpleQueue()
        self.responses = None
        self.unacknowledged = self.most_unacknowledged = self.chunks_sent = self.waits = 0

    def chunks(self, array: np.ndarray):
        """(number, bytes) of each."""
        data, size = array.astype("<f4").tobytes(), 4 * self.attached.chunk_elements
        return [(k, data[k * size : (k + 1) * size]) for k in range((len(data) + size - 1) // size)]

    def load(self, weights: list[np.ndarray]) -> None:
        def requests():
            for tensor, array in enumerate(weights):
                for chunk, data in self.chunks(array):
                    yield trainer_pb2.LoadStateRequest(
                        session_token=self.attached.session_token,
                        tensor=tensor,
                        chunk=chunk,
                        format="fp32",
                        data=data,
                        crc32c=crc32c(data),
                    )

        self.stub.LoadState(requests())
        for tensor, array in enumerate(weights):
            self.weights[tensor][...] = array

    def open(self) -> None:
        self.responses = self.stub.Train(iter(self.requests.get, None))
        self.say(open=trainer_pb2.Open(session_token=self.attached.session_token))
        assert next(self.responses).HasField("opened")

    def say(self, **message) -> None:
        self.requests.put(trainer_pb2.TrainRequest(**message))

    def step(self, number: int, lr: float, gradients: list[np.ndarray], loss: float):
        """The step's result; the new weights are in place."""
        self.say(step_begin=trainer_pb2.StepBegin(step=number, groups=[trainer_pb2.GroupStep(lr=lr)]))
        for tensor in reversed(range(len(gradients))):
            for chunk, data in self.chunks(gradients[tensor]):
                self.send(
                    trainer_pb2.Gradient(tensor=tensor, chunk=chunk, format="fp32", data=data, crc32c=crc32c(data))
                )
        self.say(micro_end=trainer_pb2.MicroEnd(loss=loss))
        self.say(step_end=trainer_pb2.StepEnd())
        result = None
        while result is None:
            result = self.take(next(self.responses))
        return result

    def send(self, gradient) -> None:
        """Once there is credit for it."""
        while self.unacknowledged + len(gradient.data) > self.attached.credit_bytes:
            self.waits += 1
            self.take(next(self.responses))
        self.unacknowledged += len(gradient.data)
        self.most_unacknowledged = max(self.most_unacknowledged, self.unacknowledged)
        self.chunks_sent += 1
        self.say(gradient=gradient)

    def take(self, response):
        """Acts on what the daemon says; returns the result, if that is it."""
        if response.HasField("step_result"):
            return response.step_result
        if response.HasField("credit"):
            self.unacknowledged -= response.credit.bytes
        if response.HasField("weights"):
            weights = response.weights
            assert crc32c(weights.data) == weights.crc32c and weights.format == "fp32"
            piece, first = np.frombuffer(weights.data, "<f4"), weights.chunk * self.attached.chunk_elements
            self.weights[weights.tensor].reshape(-1)[first : first + len(piece)] = piece
        return None

    def close(self) -> None:
        self.requests.put(None)
        assert list(self.responses) == []


def main() -> None:
    server, run, like, steps = sys.argv[1:]
    problem, losses = LeastSquares(), []
    trainer = PlainTrainer(server, run, like)
    trainer.load(problem.first)
    trainer.open()
    for step in range(trainer.attached.resume_step, int(steps) + 1):
        loss, gradients = problem.backward(trainer.weights)
        losses.append(loss)
        result = trainer.step(step, rate(step), gradients, loss)
        assert result.step == step and result.outcome == run_pb2.STEP_OUTCOME_APPLIED, result
    trainer.close()
    digest = hashlib.sha256(b"".join(array.tobytes() for array in trainer.weights)).hexdigest()
    seen = {"chunks": trainer.chunks_sent, "waits": trainer.waits, "most_unacknowledged": trainer.most_unacknowledged}
    print(json.dumps({"losses": losses, "digest": digest, "credit": trainer.attached.credit_bytes, **seen}))


if __name__ == "__main__":
    main()
