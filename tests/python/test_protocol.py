"""Nothing of the protocol is renumbered: every field, enum value and call is what tests/proto/v1.txt says.

A line is added there with what is new (the failure prints it); a line that was released is never changed or removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc_tools
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "tests" / "proto" / "v1.txt"
FIELD = descriptor_pb2.FieldDescriptorProto


def files(folder: Path) -> Iterator[Any]:
    """The schema's file descriptors."""
    out = folder / "v1.pb"
    sources = sorted(str(path) for path in (ROOT / "proto" / "ballast" / "v1").glob("*.proto"))
    include = [f"-I{ROOT / 'proto'}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
    assert protoc.main(["protoc", *include, f"--descriptor_set_out={out}", *sources]) == 0
    yield from descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file


def lines_of_message(message: Any, scope: str) -> Iterator[str]:
    name = f"{scope}.{message.name}"
    for field in message.field:
        kind = field.type_name or FIELD.Type.Name(field.type)[5:].lower()
        yield f"{name}.{field.name} = {field.number} {FIELD.Label.Name(field.label)[6:].lower()} {kind}"
    for enum in message.enum_type:
        yield from lines_of_enum(enum, name)
    for nested in message.nested_type:
        yield from lines_of_message(nested, name)


def lines_of_enum(enum: Any, scope: str) -> Iterator[str]:
    for value in enum.value:
        yield f"{scope}.{enum.name}.{value.name} = {value.number}"


def lines_of_service(service: Any, scope: str) -> Iterator[str]:
    for call in service.method:
        streams = f"{'stream ' * call.client_streaming}{call.input_type} -> {'stream ' * call.server_streaming}"
        yield f"{scope}.{service.name}.{call.name}: {streams}{call.output_type}"


def test_what_is_on_the_wire_is_what_is_kept(tmp_path: Path) -> None:
    found = []
    for file in files(tmp_path):
        for message in file.message_type:
            found += lines_of_message(message, file.package)
        for enum in file.enum_type:
            found += lines_of_enum(enum, file.package)
        for service in file.service:
            found += lines_of_service(service, file.package)
    kept = KEPT.read_text().splitlines()
    assert sorted(set(kept) - set(found)) == [], "these are kept, and no more what the schema says"
    assert sorted(set(found) - set(kept)) == [], f"these are new: add them to {KEPT.relative_to(ROOT)}"
    assert kept == sorted(kept) and len(kept) > 300
