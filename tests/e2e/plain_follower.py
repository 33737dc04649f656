"""A reader that follows a run, made of proto/PROTOCOL.md alone: generated stubs and numpy, no code of Ballast's.

    PYTHONPATH=STUBS plain_follower.py SERVER RUN STEP    follows until it has the version of STEP
    PYTHONPATH=STUBS plain_follower.py SERVER RUN deaf    subscribes, and takes nothing until standard input ends

Prints one JSON line: the versions, each with whether it came whole and its bytes, and a digest of the last one's weights.
"""

import json
import sys

import grpc
import numpy as np
from ballast.v1 import admin_pb2, admin_pb2_grpc, follow_pb2, follow_pb2_grpc
from plain_wire import BYTES, crc32c, decode, digest_of, row_length


def numbers(data: bytes) -> list[int]:
    found, number, shift = [], 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            found.append(number)
            number, shift = 0, 0
    assert shift == 0
    return found


def places(chunk: follow_pb2.ChangedChunk, elements: int) -> np.ndarray:
    if chunk.position_coding == follow_pb2.POSITION_CODING_ALL:
        return np.arange(elements)
    if chunk.position_coding == follow_pb2.POSITION_CODING_BITMAP:
        return np.flatnonzero(np.unpackbits(np.frombuffer(chunk.positions, np.uint8), bitorder="little"))
    counts = numbers(chunk.positions)
    if chunk.position_coding == follow_pb2.POSITION_CODING_GAPS:
        return np.cumsum([count + 1 for count in counts]) - 1 if counts else np.arange(0)
    found, end = [], 0
    for skipped, more in zip(counts[::2], counts[1::2]):
        found.append(np.arange(end + skipped, end + skipped + more + 1))
        end += skipped + more + 1
    return np.concatenate(found)


class PlainFollower:
    def __init__(self, server: str, run: str):
        channel = grpc.insecure_channel(server, [("grpc.max_receive_message_length", -1)])
        status = admin_pb2_grpc.AdminServiceStub(channel).GetRun(admin_pb2.GetRunRequest(run_id=run))
        self.spec, self.chunk_elements = status.spec, status.status.plan.chunk_elements
        groups = [self.spec.groups[tensor.group] for tensor in self.spec.tensors]
        self.formats = [group.serving or tensor.dtype for group, tensor in zip(groups, self.spec.tensors)]
        self.shapes = [tuple(tensor.shape) for tensor in self.spec.tensors]
        self.codes = [
            np.zeros(int(np.prod(shape)), f"<u{BYTES[wire]}") for shape, wire in zip(self.shapes, self.formats)
        ]
        self.scales: dict[tuple[int, int], list[float]] = {}
        self.call = follow_pb2_grpc.FollowServiceStub(channel).Subscribe(follow_pb2.SubscribeRequest(run_id=run))

    def parts(self):
        for message in self.call:
            yield from message.batch or [message]

    def take(self, chunk: follow_pb2.ChangedChunk) -> int:
        assert chunk.format == self.formats[chunk.tensor]
        assert chunk.crc32c == crc32c(chunk.positions + chunk.values)
        first = chunk.chunk * self.chunk_elements
        codes = self.codes[chunk.tensor][first : first + self.chunk_elements]  # a view
        at = places(chunk, len(codes))
        assert len(at) == chunk.count
        if chunk.value_coding == follow_pb2.VALUE_CODING_CODES:
            codes[at] = np.frombuffer(chunk.values, codes.dtype)
        else:
            moves = [number >> 1 if number % 2 == 0 else -(number + 1 >> 1) for number in numbers(chunk.values)]
            codes[at] += np.array(moves, np.int64).astype(codes.dtype)
        if chunk.scales:
            self.scales[chunk.tensor, chunk.chunk] = list(chunk.scales)
        return len(chunk.positions) + len(chunk.values) + 4 * len(chunk.scales)

    def versions(self):
        for part in self.parts():
            if part.HasField("begin"):
                begin, read = part.begin, 0
            elif part.HasField("chunk"):
                read += self.take(part.chunk)
            else:
                assert part.end.id == begin.id and read == begin.bytes
                yield {"step": begin.id.step, "whole": not begin.HasField("base"), "bytes": read}

    def weights(self) -> list[np.ndarray]:
        decoded = []
        for tensor, (codes, wire, shape) in enumerate(zip(self.codes, self.formats, self.shapes)):
            starts = range(0, len(codes), self.chunk_elements)
            pieces = [
                decode(
                    codes[first : first + self.chunk_elements].tobytes(),
                    wire,
                    self.scales.get((tensor, chunk)),
                    first,
                    row_length(shape, wire),
                )
                for chunk, first in enumerate(starts)
            ]
            decoded.append(np.concatenate(pieces).reshape(shape))
        return decoded


def main(server: str, run: str, step: str) -> None:
    follower = PlainFollower(server, run)
    if step == "deaf":
        print("subscribed", flush=True)
        sys.stdin.read()
        return
    seen = []
    for version in follower.versions():
        seen.append(version)
        if version["step"] == int(step):
            break
    follower.call.cancel()
    print(json.dumps({"versions": seen, "digest": digest_of(follower.weights())}))


if __name__ == "__main__":
    main(*sys.argv[1:])
