"""What proto/PROTOCOL.md says of refusals and of the registry, asked of a daemon: generated stubs, no code of Ballast's.

    PYTHONPATH=STUBS plain_probes.py SERVER

Prints one JSON line: by probe the status code, with "+delay" where the daemon says when to ask again; and what it lists.
"""

import itertools
import json
import queue
import sys

import grpc
from ballast.v1 import admin_pb2, admin_pb2_grpc, run_pb2, trainer_pb2, trainer_pb2_grpc
from plain_wire import crc32c

ELEMENTS, CHUNK = 5000, 4096
NAN = b"\0\0\xc0\x7f"
BEGIN = trainer_pb2.TrainRequest(step_begin=trainer_pb2.StepBegin(step=1))
END = trainer_pb2.TrainRequest(step_end=trainer_pb2.StepEnd())
MEASURE = trainer_pb2.TrainRequest(step_measure=trainer_pb2.StepMeasure())
STAGED = {"commit": run_pb2.COMMIT_MODE_STAGED}


def outcome(call) -> str:
    try:
        call()
        return "OK"
    except grpc.RpcError as error:
        delayed = "ballast-retry-after-ms" in dict(error.trailing_metadata() or ())
        return error.code().name + ("+delay" if delayed else "")


def gradient(chunk: int = 0, value: bytes = b"\0\0\0\0", **changed) -> trainer_pb2.TrainRequest:
    data = value * (CHUNK if chunk == 0 else ELEMENTS - CHUNK)
    fields = {"chunk": chunk, "format": "fp32", "data": data, "crc32c": crc32c(data), **changed}
    return trainer_pb2.TrainRequest(gradient=trainer_pb2.Gradient(**fields))


def upload(token: bytes, chunk: int, value: bytes = b"\0\0\0\0", **changed) -> trainer_pb2.LoadStateRequest:
    data = value * (CHUNK if chunk == 0 else ELEMENTS - CHUNK)
    fields = {"format": "fp32", "data": data, "crc32c": crc32c(data), **changed}
    return trainer_pb2.LoadStateRequest(session_token=token, chunk=chunk, **fields)


def end(**fields) -> trainer_pb2.TrainRequest:
    return trainer_pb2.TrainRequest(step_end=trainer_pb2.StepEnd(**fields))


def micro_end(**fields) -> trainer_pb2.TrainRequest:
    return trainer_pb2.TrainRequest(micro_end=trainer_pb2.MicroEnd(**fields))


WHOLE = [BEGIN, gradient(0), gradient(1), micro_end()]


class Stream:
    """A Train call of a session."""

    def __init__(self, trainer, token: bytes, *messages, first=None):
        self.requests = queue.SimpleQueue()
        self.call = trainer.Train(iter(self.requests.get, None))
        self.say(first or trainer_pb2.TrainRequest(open=trainer_pb2.Open(session_token=token)), *messages)

    def say(self, *messages) -> None:
        for message in messages:
            self.requests.put(message)

    def await_message(self, kind: str) -> None:
        while next(self.call).WhichOneof("message") != kind:
            pass

    def end(self) -> str:
        """How the daemon ends it."""
        ended = outcome(lambda: list(self.call))
        self.requests.put(None)
        return ended


class Probe:
    """A run of its own."""

    numbers = itertools.count(1)

    def __init__(self, server: str, **fields):
        channel = grpc.insecure_channel(server)
        self.trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self.run = f"probe-{next(Probe.numbers)}"
        tensor = run_pb2.TensorSpec(name="w", shape=[ELEMENTS], dtype="fp32")
        group = run_pb2.GroupSpec(rule="adamw")
        fields = {"run_id": self.run, "tensors": [tensor], "groups": [group], "ranks": 2, "accumulation": 2, **fields}
        self.spec = run_pb2.RunSpec(**fields)
        self.create(self.spec)

    def create(self, spec) -> None:
        self.trainer.CreateRun(trainer_pb2.CreateRunRequest(spec=spec))

    def attach(self, **changed):
        fields = {"run_id": self.run, "world": 1, "protocol_min": 1, "protocol_max": 1, **changed}
        return self.trainer.Attach(trainer_pb2.AttachRequest(**fields))

    def load(self, token: bytes, value: bytes = b"\0\0\0\0", chunks=(1, 0, 0), **changed) -> None:
        """Chunks in any order, and again."""
        self.trainer.LoadState(iter([upload(token, chunk, value, **changed) for chunk in chunks]))

    def start(self, *messages, **changed) -> Stream:
        """Attached and loaded; the token is kept."""
        self.token = self.attach(**changed).session_token
        self.load(self.token)
        return Stream(self.trainer, self.token, *messages)

    def loaded(self) -> bool:
        return self.admin.GetRun(admin_pb2.GetRunRequest(run_id=self.run)).status.weights_loaded

    def pull(self, **fields) -> None:
        list(self.trainer.Pull(trainer_pb2.PullRequest(run_id=self.run, **fields)))


def of_a_stream(probe: Probe, *messages) -> str:
    return probe.start(*messages).end()


def create_again(probe: Probe) -> list[str]:
    """The same with a default written out; another."""
    probe.spec.groups[0].hyper["beta1"] = 0.9
    same = outcome(lambda: probe.create(probe.spec))
    probe.spec.groups[0].hyper["beta1"] = 0.8
    return [same, outcome(lambda: probe.create(probe.spec))]


def holder_there(probe: Probe) -> list[str]:
    """While the stream of another session is up; with takeover, and what that one hears; its token afterwards."""
    stream = probe.start()
    stream.await_message("opened")
    refused = outcome(probe.attach)
    taken = outcome(lambda: probe.attach(takeover=True))
    return [refused, taken, stream.end(), outcome(lambda: probe.attach(session_token=probe.token))]


def holder_away(probe: Probe) -> list[str]:
    """Within the lease, without and with the token; of another world."""
    token = probe.attach().session_token
    changed = ({}, {"session_token": token}, {"world": 2})
    return [outcome(lambda: probe.attach(**fields)) for fields in changed]


def half_close(probe: Probe) -> list[str]:
    """Between steps, and the next Attach; within a step, and the next Attach."""
    stream = probe.start()
    stream.await_message("opened")
    stream.say(None)
    between = [stream.end(), outcome(lambda: setattr(probe, "token", probe.attach().session_token))]
    stream = Stream(probe.trainer, probe.token, BEGIN, None)
    return [*between, stream.end(), outcome(probe.attach)]


def second_stream(probe: Probe) -> str:
    first = probe.start()
    first.await_message("opened")
    Stream(probe.trainer, probe.token).await_message("opened")
    return first.end()


def damaged(probe: Probe) -> list[str]:
    """A wrong checksum, and the token afterwards; other bytes under the same key, and the token afterwards."""
    stream = probe.start(BEGIN, gradient(crc32c=1))
    first = [stream.end(), outcome(lambda: probe.attach(session_token=probe.token))]
    stream = Stream(probe.trainer, probe.token, BEGIN, gradient(0), gradient(0), gradient(0, b"\0\0\0\1"))
    return [*first, stream.end(), outcome(lambda: probe.attach(session_token=probe.token))]


def loading(probe: Probe) -> list[str]:
    """Pull and StepBegin before there are weights; a wrong checksum; a slot that the rule lacks; weights that are NaN; after
    the first step, and the Pull of a tensor that the run lacks."""
    token = probe.attach().session_token
    early = [outcome(probe.pull), Stream(probe.trainer, token, BEGIN).end()]
    token = probe.attach(session_token=token).session_token
    changes = ({"crc32c": 1}, {"slot": "nothing"}, {"value": NAN})
    wrong = [outcome(lambda: probe.load(token, **changed)) for changed in changes]
    assert not probe.attach(session_token=token).weights_loaded
    probe.load(token)
    stream = Stream(probe.trainer, token, *WHOLE, END)
    stream.await_message("step_result")
    return [*early, *wrong, outcome(lambda: probe.load(token)), outcome(lambda: probe.pull(tensors=[1]))]


def cut_replacement(probe: Probe) -> list[str]:
    """Of a replacement that is cut when all of a tensor has come: the next one, of the same session, that is not whole; whether
    there are weights then; and one that is."""
    token = probe.attach().session_token
    probe.load(token)
    requests = queue.SimpleQueue()
    call = probe.trainer.LoadState.future(iter(requests.get, None))
    for chunk in (0, 1):
        requests.put(upload(token, chunk, replace=True))
    while probe.loaded():
        pass
    call.cancel()
    requests.put(None)
    in_part = outcome(lambda: probe.load(token, chunks=[0], replace=True))
    return [in_part, str(probe.loaded()), outcome(lambda: probe.load(token, replace=True))]


def rewound(probe: Probe) -> list[str]:
    """The stream; the token; whether the message begins as it should."""
    stream = probe.start(*WHOLE, END)
    stream.await_message("step_result")
    probe.admin.Rewind(admin_pb2.RewindRequest(run_id=probe.run, to_step=1))
    ended = stream.end()
    said = stream.call.details().startswith("rewound to step 1 (")
    return [ended, outcome(lambda: probe.attach(session_token=probe.token)), str(said)]


def after_end(probe: Probe) -> str:
    """In a world of two, so that the step is open."""
    probe.attach(world=2, rank=1)
    return probe.start(*WHOLE, END, MEASURE, world=2).end()


def probes(server: str) -> dict:
    def stream(*messages, **fields) -> str:
        return of_a_stream(Probe(server, **fields), *messages)

    def attach(**fields) -> str:
        return outcome(lambda: Probe(server).attach(**fields))

    batch = trainer_pb2.RequestBatch
    nested = trainer_pb2.TrainRequest(batch=batch(requests=[trainer_pb2.TrainRequest(batch=batch())]))
    many = trainer_pb2.TrainRequest(batch=batch(requests=[BEGIN] * 1025))
    last = trainer_pb2.TrainRequest(micro_begin=trainer_pb2.MicroBegin(last=True))
    not_last = trainer_pb2.TrainRequest(micro_begin=trainer_pb2.MicroBegin(last=False))
    lr = [trainer_pb2.GroupStep(lr=1)]
    tensor = run_pb2.TensorSpec(name="w", shape=[ELEMENTS], dtype="fp8-e5m2")
    group = run_pb2.GroupSpec(rule="adamw", serving="bf16")
    kept = {"rewind": run_pb2.RewindSpec(snapshots=1, every=1)}
    probe = Probe(server)
    return {
        "create again": create_again(Probe(server)),
        "dtype fp8-e5m2": [
            outcome(lambda: Probe(server, tensors=[tensor], groups=[group])),
            outcome(lambda: Probe(server, tensors=[tensor])),
        ],
        "attach": [attach(), attach(protocol_min=2, protocol_max=2), attach(world=3), attach(rank=1)],
        "an unknown token": [attach(session_token=b"x" * 16), Stream(probe.trainer, b"x" * 16).end()],
        "an unknown run": attach(run_id="nobody"),
        "the rank is held": holder_there(Probe(server)),
        "the rank is held, its stream gone": holder_away(Probe(server)),
        "half-close": half_close(Probe(server)),
        "a second stream": second_stream(Probe(server)),
        "damaged": damaged(Probe(server)),
        "loading": loading(Probe(server)),
        "a replacement is cut": cut_replacement(Probe(server)),
        "rewound": rewound(Probe(server, **kept)),
        "no Open": Stream(probe.trainer, b"", first=BEGIN).end(),
        "another step": stream(trainer_pb2.TrainRequest(step_begin=trainer_pb2.StepBegin(step=2))),
        "begun with other values": stream(
            BEGIN, trainer_pb2.TrainRequest(step_begin=trainer_pb2.StepBegin(step=1, groups=lr))
        ),
        "values with StepEnd, release": stream(
            *WHOLE, trainer_pb2.TrainRequest(step_end=trainer_pb2.StepEnd(groups=lr))
        ),
        "max_grad_norm with StepEnd, release": stream(*WHOLE, end(max_grad_norm=1)),
        "max_grad_norm 0": stream(*WHOLE, end(max_grad_norm=0), **STAGED),
        "discard, release": stream(BEGIN, end(discard=True)),
        "StepMeasure, release": stream(*WHOLE, MEASURE),
        "StepMeasure before MicroEnd": stream(BEGIN, gradient(0), gradient(1), MEASURE, **STAGED),
        "StepMeasure after StepEnd": after_end(Probe(server, **STAGED)),
        "no last micro-batch, release": stream(BEGIN, not_last, micro_end(absent=b"\1"), END),
        "loss_scale 0": stream(trainer_pb2.TrainRequest(step_begin=trainer_pb2.StepBegin(step=1, loss_scale=0))),
        "scale 2": stream(BEGIN, gradient(scale=2)),
        "scale 1": stream(BEGIN, gradient(scale=1), None),
        "no format": stream(BEGIN, gradient(format="")),
        "a chunk too many": stream(BEGIN, gradient(chunk=2, data=b"")),
        "a byte too many": stream(BEGIN, gradient(data=b"\0")),
        "absent and sent": stream(BEGIN, gradient(0), micro_end(absent=b"\1")),
        "absent past the end": stream(BEGIN, micro_end(absent=b"\2")),
        "not whole": stream(BEGIN, gradient(0), micro_end(), END),
        "StepEnd before MicroEnd": stream(BEGIN, gradient(0), gradient(1), END),
        "a micro-batch after the last": stream(
            BEGIN,
            last,
            micro_end(absent=b"\1"),
            trainer_pb2.TrainRequest(micro_begin=trainer_pb2.MicroBegin(micro=1, last=True)),
        ),
        "a batch in a batch": stream(nested),
        "1,025 in a batch": stream(many),
        "nothing in a message": stream(trainer_pb2.TrainRequest()),
        "3 MiB in a message": stream(BEGIN, gradient(data=bytes(3 << 20))),
    }


def hyperparameters(server: str, rules) -> dict[str, dict[str, float]]:
    """The hyperparameters by rule, with their defaults."""
    by_rule, matrix = {}, run_pb2.TensorSpec(name="w", shape=[2, ELEMENTS // 2], dtype="fp32")  # what every rule takes
    for rule in rules:
        probe = Probe(server, tensors=[matrix], groups=[run_pb2.GroupSpec(rule=rule)])
        spec = probe.admin.GetRun(admin_pb2.GetRunRequest(run_id=probe.run)).spec
        by_rule[rule] = dict(spec.groups[0].hyper)
    return by_rule


def main() -> None:
    server = sys.argv[1]
    told = Probe(server).admin.GetServer(admin_pb2.GetServerRequest())
    formats = {name: [name in told.gradient_formats, name in told.serving_formats] for name in told.wire_formats}
    rules = hyperparameters(server, told.rules)
    print(json.dumps({"probes": probes(server), "formats": formats, "rules": rules}))


if __name__ == "__main__":
    main()
