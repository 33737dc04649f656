"""One rank of a run, made of proto/PROTOCOL.md and the stubs of proto/ with what any language has: no code of Ballast's.

    client = PlainClient(server, run, rank=0, world=2)
    client.attach()
    client.load(weights)
    client.open()
    result = client.step(client.attached.resume_step, values, [Micro(gradients, loss), ...])
    client.close()

It comes back from a lost connection in the middle of a step, with the same bits.
"""

import dataclasses
import queue
import threading

import grpc
import numpy as np
from ballast.v1 import admin_pb2, admin_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from plain_wire import BYTES, crc32c, decode, encode, pack, row_length, unpack

LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
MOST_BATCHED, MOST_BATCH = 64 << 10, 256 << 10
OPTIONS = [("grpc.max_receive_message_length", 128 << 20), ("grpc.initial_reconnect_backoff_ms", 50)]


def patiently(call):
    """The call's answer; made again when the daemon says after which delay."""
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            delay_ms = dict(error.trailing_metadata() or ()).get("ballast-retry-after-ms")
            if delay_ms is None:
                raise
            threading.Event().wait(int(delay_ms) / 1000)


def each(response):
    """The responses of one: itself, or those of a batch."""
    if response.WhichOneof("message") != "batch":
        yield response
    for one in response.batch.responses:
        yield from each(one)


class Cut(Exception):
    """This end cancelled the stream."""


@dataclasses.dataclass
class Micro:
    gradients: list[np.ndarray | None]  # by tensor; None: absent
    loss: float


@dataclasses.dataclass
class End:
    """How a step ends. The last three are for staged runs."""

    measures: bool = False  # asks for the norm first; announces no micro-batch as the last
    max_grad_norm: float | None = None
    discards: bool = False  # after the first chunk


class PlainClient:
    def __init__(self, server: str, run: str, rank: int = 0, world: int = 1):
        channel = grpc.insecure_channel(server, OPTIONS)
        self.trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        self.run, self.rank, self.world = run, rank, world
        self.spec = admin.GetRun(admin_pb2.GetRunRequest(run_id=run)).spec
        self.shapes = [tuple(tensor.shape) for tensor in self.spec.tensors]
        groups = [self.spec.groups[tensor.group] for tensor in self.spec.tensors]
        dtypes = [tensor.dtype for tensor in self.spec.tensors]
        self.gradient_formats = [group.gradient or dtype for group, dtype in zip(groups, dtypes)]
        self.serving_formats = [group.serving or dtype for group, dtype in zip(groups, dtypes)]
        self.weights = [np.zeros(shape, np.float32) for shape in self.shapes]
        self.attached = self.responses = self.requests = None
        self.number, self.outbox, self.result = 0, {}, None
        self.chunks_sent = self.waits = self.out_of_order = self.most_under_way = self.cuts = 0
        self.cut_in = 0  # so many messages, gradients and others sent and weights received; 0: never

    # --- the session ---

    def attach(self, token: bytes = b"") -> None:
        request = trainer_pb2.AttachRequest(
            run_id=self.run,
            rank=self.rank,
            world=self.world,
            protocol_min=1,
            protocol_max=1,
            client_version="plain",
            features=["held_whole"] if self.rank == 0 else [],  # either way is to do
            session_token=token,
            want_digests=not token,
        )
        self.attached = patiently(lambda: self.trainer.Attach(request, wait_for_ready=True))
        assert self.attached.protocol == 1

    def chunks(self, tensor: int, array: np.ndarray, wire: str):
        """(number, bytes) of each."""
        data, size = encode(array, wire), BYTES[wire] * self.attached.chunk_elements
        return [(k, data[k * size : (k + 1) * size]) for k in range((len(data) + size - 1) // size)]

    def chunk_count(self, tensor: int) -> int:
        return -(-self.weights[tensor].size // self.attached.chunk_elements)

    def load(self, weights: list[np.ndarray]) -> None:
        def messages():
            for tensor, array in enumerate(weights):
                for chunk, data in self.chunks(tensor, array, "fp32"):
                    fields = {"chunk": chunk, "format": "fp32", "data": data, "crc32c": crc32c(data)}
                    yield trainer_pb2.LoadStateRequest(tensor=tensor, **fields)

        def requests():
            first = trainer_pb2.LoadStateRequest(session_token=self.attached.session_token)
            batch = first
            for message in messages():
                if batch.ByteSize() + message.ByteSize() > MOST_BATCH:
                    yield batch
                    batch = trainer_pb2.LoadStateRequest()
                batch.batch.append(message)
            yield batch

        assert self.attached.takes_load_batches
        self.trainer.LoadState(requests())
        for tensor, array in enumerate(weights):
            self.weights[tensor][...] = array

    def pull(self, digests=()) -> set[int]:
        """The latest weights; which tensors came, of those that are not like these digests."""
        tensors = range(len(self.shapes)) if digests else ()
        request = trainer_pb2.PullRequest(run_id=self.run, tensors=tensors, digests=digests)

        def read():
            whole = set()
            for weights in self.trainer.Pull(request):
                self.store(weights)
                if weights.last:
                    whole.add(weights.tensor)
            return whole

        return patiently(read)

    def store(self, weights) -> None:
        tensor, first = weights.tensor, weights.chunk * self.attached.chunk_elements
        assert crc32c(weights.data) == weights.crc32c and weights.format == self.serving_formats[tensor]
        of_a_row = row_length(self.shapes[tensor], weights.format)
        piece = decode(weights.data, weights.format, weights.scales, first, of_a_row)
        self.weights[tensor].reshape(-1)[first : first + len(piece)] = piece

    # --- the stream ---

    def open(self, weights_step: int = 0, received: bytes = b"") -> None:
        requests = self.requests = queue.SimpleQueue()
        self.responses = self.trainer.Train(iter(requests.get, None))
        self.under_way, self.sent, self.freed, self.wanted = self.attached.credit_held, [], 0, None
        fields = {"weights_step": weights_step, "weights_received": received, "takes_batches": self.rank == 0}
        self.say(open=trainer_pb2.Open(session_token=self.attached.session_token, **fields))
        self.batches = None
        self.take(self.hear())
        assert self.batches is not None  # Opened is the first of all, alone or in a batch

    def say(self, **message) -> None:
        self.requests.put(trainer_pb2.TrainRequest(**message))
        self.pass_message()

    def hear(self):
        for response in self.responses:
            return response
        raise AssertionError("the daemon ended the stream with OK")

    def pass_message(self) -> None:
        self.cut_in -= 1
        if self.cut_in != 0:
            return
        self.cuts += 1
        self.responses.cancel()
        raise Cut

    def close(self) -> None:
        """Gives the rank back."""
        self.requests.put(None)
        for response in self.responses:
            assert all(one.WhichOneof("message") != "weights" for one in each(response))
        assert self.responses.code() == grpc.StatusCode.OK

    # --- a step ---

    def step(self, number: int, values, micros: list[Micro], end: End = End()):
        """values: of the groups. The step's result, or the last one's of those that have closed meanwhile without this rank;
        all are in `results`. The new weights are in place."""
        self.number, self.micros, self.result, self.arrived = number, micros, None, set()
        self.end, self.norms = end, []
        self.last, self.results = number, {}
        self.begin = trainer_pb2.StepBegin(step=number, groups=values)
        self.outbox = {}
        for m, micro in enumerate(micros):
            for tensor, array in enumerate(micro.gradients):
                if array is None:
                    continue
                for chunk, data in self.chunks(tensor, array, self.gradient_formats[tensor]):
                    self.outbox[number, m, tensor, chunk] = data
        self.to_send = list(self.outbox)
        if self.rank % 2 == 1:
            self.to_send.reverse()  # the order is each rank's own
        lost = False
        while self.result is None:
            try:
                if not lost or self.resume():
                    self.say_step()
                while self.result is None:
                    self.take(self.hear())
            except (grpc.RpcError, Cut) as error:
                if isinstance(error, grpc.RpcError) and error.code() not in LOST:
                    raise
                self.requests.put(None)
                lost = True
        return self.result

    def resume(self) -> bool:
        """On a new stream; whether the step is to be said again."""
        self.attach(self.attached.session_token)
        assert self.attached.resume_step >= self.number
        self.last = max(self.number, self.attached.resume_step - 1)
        whole_micros, whole, held = 0, set(), set()
        for entry in self.attached.held:
            whole_micros = max(whole_micros, entry.whole_micros)
            whole |= {(entry.micro, tensor) for tensor, bit in enumerate(unpack(entry.whole_tensors)) if bit}
            bits = unpack(entry.chunks)
            held |= {(entry.micro, entry.tensor, chunk) for chunk, bit in enumerate(bits) if bit}
        applied = unpack(self.attached.tensors_applied) or [False] * len(self.shapes)

        def lacks(key) -> bool:
            _, micro, tensor, chunk = key
            has = micro < whole_micros or (micro, tensor) in whole or (micro, tensor, chunk) in held
            return not has and not applied[tensor]

        self.to_send = [key for key in self.to_send if lacks(key)]
        complete = [
            all((tensor, chunk) in self.arrived for chunk in range(self.chunk_count(tensor)))
            for tensor in range(len(self.shapes))
        ]
        self.open(self.number, pack(complete))
        return self.attached.resume_step == self.number

    def say_step(self) -> None:
        for m, micro in enumerate(self.micros):
            begin = trainer_pb2.MicroBegin(micro=m, last=m + 1 == len(self.micros) and not self.end.measures)
            if m > 0:
                self.say(micro_begin=begin)
            elif self.batches:
                both = [trainer_pb2.TrainRequest(step_begin=self.begin), trainer_pb2.TrainRequest(micro_begin=begin)]
                self.say(batch=trainer_pb2.RequestBatch(requests=both))
            else:
                self.say(step_begin=self.begin)
                self.say(micro_begin=begin)
            if self.end.discards:
                if self.to_send:
                    self.send(self.to_send, self.to_send[0])
                break
            if not self.say_micro(m, micro):
                return
        if self.end.measures and not self.measure():
            return
        fields = {"max_grad_norm": self.end.max_grad_norm, "discard": self.end.discards}
        self.say(step_end=trainer_pb2.StepEnd(client_state=str(self.number).encode(), **fields))

    def measure(self) -> bool:
        """False: the step is over."""
        heard = len(self.norms)
        self.say(step_measure=trainer_pb2.StepMeasure())
        while len(self.norms) == heard and self.result is None:
            self.take(self.hear())
        return self.result is None

    def say_micro(self, number: int, micro: Micro) -> bool:
        """False: the step is over."""
        rest, ended = [key for key in self.to_send if key[1] == number], False
        while rest or not ended:
            if self.result is not None:
                return False
            if self.wanted in rest:
                self.out_of_order += self.wanted != rest[0]
                self.send(rest, self.wanted)
            elif rest and self.has_credit(rest[0]):
                self.send(rest, rest[0])
            elif not ended:
                absent = pack([array is None for array in micro.gradients])
                self.say(micro_end=trainer_pb2.MicroEnd(micro=number, absent=absent, loss=micro.loss))
                ended = True
            else:
                self.waits += 1
                self.take(self.hear())
        return True

    def has_credit(self, key) -> bool:
        return self.under_way == 0 or self.under_way + len(self.outbox[key]) <= self.attached.credit_bytes

    def send(self, rest: list, key) -> None:
        rest.remove(key)
        _, micro, tensor, chunk = key
        data = self.outbox[key]
        self.under_way += len(data)
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.chunks_sent += 1
        self.sent.append(key)
        fields = {"format": self.gradient_formats[tensor], "data": data, "crc32c": crc32c(data)}
        self.say(gradient=trainer_pb2.Gradient(micro=micro, tensor=tensor, chunk=chunk, **fields))

    def take(self, response) -> None:
        """Acts on what the daemon says."""
        for one in each(response):
            kind = one.WhichOneof("message")
            if kind == "opened":
                self.batches = one.opened.takes_batches
            elif kind == "credit":
                self.take_credit(one.credit)
            elif kind == "step_measured" and one.step_measured.step == self.number:
                self.norms.append(one.step_measured)
            elif kind == "weights" and one.weights.step >= self.number:
                self.take_weights(one.weights)
            elif kind == "step_result" and one.step_result.step >= self.number:
                self.results[one.step_result.step] = one.step_result
                self.result = self.results.get(self.last)

    def take_weights(self, weights) -> None:
        self.store(weights)
        if weights.step == self.number:
            self.arrived.add((weights.tensor, weights.chunk))
        self.pass_message()

    def take_credit(self, credit) -> None:
        self.under_way -= credit.bytes
        if credit.HasField("wanted"):
            self.wanted = (self.number, credit.wanted.micro, credit.wanted.tensor, credit.wanted.chunk)
        for key in self.sent[self.freed : credit.acknowledged]:
            self.outbox.pop(key, None)  # another one would have to be made anew, and cannot
        self.freed = max(self.freed, credit.acknowledged)
