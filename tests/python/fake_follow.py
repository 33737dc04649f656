"""A daemon with one run, "r", that tells its readers what a test has it tell, in this process."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc
from torch import Tensor

from ballast import _core
from checkpoint_folder import crc32c

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 4096  # elements
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_V1 = "ballast.v1"


def messages(folder: Path) -> Any:
    """The protocol's messages by name, without stubs: those would be a package of the client's name."""
    out = folder / "protocol.pb"
    protos = [str(ROOT / "proto" / "ballast" / "v1" / f"{name}.proto") for name in ("admin", "follow")]
    assert protoc.main(["", f"-I{ROOT / 'proto'}", "--include_imports", f"-o{out}", *protos]) == 0
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file:
        pool.Add(file)
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_V1}.{name}"))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class FakeFollow:
    """Started by the constructor, at `server`. `weights`: of the run, by name; they say what its spec is."""

    def __init__(self, folder: Path, weights: Mapping[str, Tensor], follow: bool = True):
        self._message = messages(folder)
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.requests: list[Any] = []
        self.describe(weights, follow)
        # As the daemon's: a reader pings for as long as no version comes.
        pings = [("grpc.http2.min_ping_interval_without_data_ms", 1000), ("grpc.keepalive_permit_without_calls", 1)]
        self._server = grpc.server(ThreadPoolExecutor(8), options=pings)
        answers = {"GetRun": (self._get_run, "GetRunRequest", False)}, {
            "Subscribe": (self._tell, "SubscribeRequest", True)
        }
        for service, methods in zip(("AdminService", "FollowService"), answers):
            handlers = {name: self._handler(*method) for name, method in methods.items()}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"{_V1}.{service}", handlers),))
        self.server = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def describe(self, weights: Mapping[str, Tensor], follow: bool = True) -> None:
        """The run has these tensors from now on."""
        self._names = list(weights)
        self._run = self._message("GetRunResponse")()
        self._run.spec.run_id = "r"
        self._run.status.plan.chunk_elements = CHUNK
        if follow:
            self._run.spec.follow.SetInParent()
        for name, tensor in weights.items():
            self._run.spec.tensors.add(name=name, shape=list(tensor.shape), dtype=_DTYPES[tensor.dtype])

    def whole(self, weights: Mapping[str, Tensor], step: int, generation: int = 1) -> None:
        """The next version comes whole, with these weights."""
        self._say(self._version(weights, self._names, (step, generation), None))

    def begin_whole(self, weights: Mapping[str, Tensor], step: int) -> Callable[[], None]:
        """Likewise, but for its end, which comes when what is returned is called."""
        *parts, end = self._version(weights, self._names, (step, 1), None)
        self._say(parts)
        return lambda: self._say([end])

    def changed(self, weights: Mapping[str, Tensor], names: list[str], step: int, base: int) -> None:
        """The next version is another one with other weights in the tensors of these names."""
        self._say(self._version(weights, names, (step, 1), base))

    def end(self, code: grpc.StatusCode, text: str) -> None:
        """The call that is open, or the next one, ends so."""
        self._said.put((code, text))

    def close(self) -> None:
        self._said.put((grpc.StatusCode.UNAVAILABLE, "the test is over"))
        self._server.stop(0).wait()

    def __enter__(self) -> FakeFollow:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self, parts: list[Any]) -> None:
        for part in parts:
            self._said.put(part)

    def _version(
        self, weights: Mapping[str, Tensor], names: list[str], id: tuple[int, int], base: int | None
    ) -> list[Any]:
        part = self._message("VersionPart")
        parts = [chunk for name in names for chunk in self._chunks(name, weights[name])]
        begin, end = part(), part()
        for version in (begin.begin.id, end.end.id):
            version.step, version.generation = id
        if base is not None:
            begin.begin.base.step, begin.begin.base.generation = base, 1
        begin.begin.bytes = sum(len(chunk.chunk.values) for chunk in parts)
        begin.begin.closed_unix_s = time.time()
        end.end.changed = sum(weights[name].numel() for name in names)
        end.end.elements = sum(tensor.numel() for tensor in weights.values())
        return [begin, *parts, end]

    def _chunks(self, name: str, tensor: Tensor) -> list[Any]:
        data, width = _bytes(tensor), tensor.element_size()
        chunks = []
        for number, first in enumerate(range(0, len(data), CHUNK * width)):
            part = self._message("VersionPart")()
            part.chunk.tensor, part.chunk.chunk = self._names.index(name), number
            part.chunk.format = _DTYPES[tensor.dtype]
            part.chunk.values = data[first : first + CHUNK * width]
            part.chunk.count = len(part.chunk.values) // width
            part.chunk.crc32c = crc32c(part.chunk.values)
            chunks.append(part)
        chunks[-1].chunk.last = True
        kept = tensor.detach().contiguous()
        chunks[-1].chunk.digest = _core.digest(kept.data_ptr(), kept.nbytes)
        return chunks

    def _handler(self, answer: Any, request: str, stream: bool) -> Any:
        kind = grpc.unary_stream_rpc_method_handler if stream else grpc.unary_unary_rpc_method_handler
        return kind(answer, self._message(request).FromString, lambda response: response.SerializeToString())

    def _get_run(self, request: Any, context: grpc.ServicerContext) -> Any:
        if request.run_id != "r":
            context.abort(grpc.StatusCode.NOT_FOUND, f"no run '{request.run_id}'")
        return self._run

    def _tell(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.requests.append(request)
        while True:
            said = self._said.get()
            if isinstance(said, tuple):
                context.abort(*said)
            yield said
