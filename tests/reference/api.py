"""docs/reference/api.md, from the comments of the protos."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import grpc_tools
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)
from grpc_tools import protoc

from neuronpipe.api.protos import PUBLIC
from tests.reference.markdown import NOTE, code, table, text

# Of ours, and of protobuf's own.
_PATHS = (Path(__file__).parents[2] / "protos", Path(grpc_tools.__file__).parent / "_proto")
_PACKAGE = ".neuronpipe.api.v1."
# Where a part of a file is in its descriptor → its comment. The numbers are those of the fields in descriptor.proto.
_Comments: TypeAlias = dict[tuple[int, ...], str]
_MESSAGE, _ENUM, _SERVICE, _FIELD, _ONEOF, _VALUE, _METHOD = 4, 5, 6, 2, 8, 2, 2

_HEAD = f"""# API reference

{NOTE.format("the comments of `protos/neuronpipe/api/v1`")}

The public API is the protobuf package `neuronpipe.api.v1`. `python -m neuronpipe.api.protos --out DIR` writes its files
for clients in other languages. The services that the gateway calls (TokenizerService, NeuronExecutorService,
PostprocessorService) are internal and not listed. [Error reference](errors.md) has the statuses,
[Tasks](../tasks.md) an input of each task as JSON.

A field that is not set has its default: an empty text, 0, false, or the first value of an enum."""


def page() -> str:
    """The page."""
    files = _read([name for name in PUBLIC if name.startswith("neuronpipe/")])
    in_order = sorted(files, key=lambda file: PUBLIC.index(file.name))
    return "\n".join([_HEAD, *(line for file in in_order for line in _file(file))]) + "\n"


def _read(names: Sequence[str]) -> Sequence[FileDescriptorProto]:
    """The descriptors of the files, with their comments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "protos.binpb")
        options = [*(f"--proto_path={path}" for path in _PATHS), "--include_source_info", f"--descriptor_set_out={out}"]
        assert protoc.main(["protoc", *options, *names]) == 0, "protoc has failed"
        return FileDescriptorSet.FromString(out.read_bytes()).file


def _file(file: FileDescriptorProto) -> Iterator[str]:
    comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
    yield from ("", f"## {file.name}", "", text(comments[(12,)]))  # the comment before `syntax`
    for number, service in enumerate(file.service):
        path = (_SERVICE, number)
        yield from ("", f"### {service.name}", "", text(comments[path]))
        for place, method in enumerate(service.method):
            yield from _method(service.name, method, comments[(*path, _METHOD, place)])
    for number, message in enumerate(file.message_type):
        yield from _message(message, (_MESSAGE, number), comments)
    for number, enum in enumerate(file.enum_type):
        yield from _enum(enum, (_ENUM, number), comments)


def _method(service: str, method: MethodDescriptorProto, comment: str) -> Iterator[str]:
    sent, got = _kind(method.input_type), _kind(method.output_type)
    stream = [" a stream of" if is_stream else "" for is_stream in (method.client_streaming, method.server_streaming)]
    yield from ("", f"#### {service}.{method.name}", "", f"Takes{stream[0]} {sent}, returns{stream[1]} {got}.")
    for paragraph in comment.split("\n\n"):
        first, *items = re.split(r"^ - ", paragraph, flags=re.MULTILINE)
        yield from ("", *([text(first)] if first else []), *(f"- {text(item)}" for item in items))


def _message(message: DescriptorProto, path: tuple[int, ...], comments: _Comments) -> Iterator[str]:
    assert not message.nested_type, f"{message.name}: nested types have no place on the page yet"
    yield from ("", f"### {message.name}", "", text(comments[path]))
    optional = {field.oneof_index for field in message.field if field.proto3_optional}  # each is a oneof of its own
    for number, oneof in enumerate(message.oneof_decl):
        if number in optional:
            continue
        yield from ("", f"One of the fields of `{oneof.name}` is set. {text(comments[(*path, _ONEOF, number)])}")
    rows = []
    for number, field in enumerate(message.field):
        rows.append([code(field.name), str(field.number), _type(field), text(comments[(*path, _FIELD, number)])])
    yield from table(["Field", "Number", "Type", "Meaning"], rows) if rows else ("", "It has no fields.")


def _enum(enum: EnumDescriptorProto, path: tuple[int, ...], comments: _Comments) -> Iterator[str]:
    yield from ("", f"### {enum.name}", "", text(comments[path]))
    rows = []
    for number, value in enumerate(enum.value):
        rows.append([code(value.name), str(value.number), text(comments[(*path, _VALUE, number)])])
    yield from table(["Value", "Number", "Meaning"], rows)


def _type(field: FieldDescriptorProto) -> str:
    scalar = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    kind = _kind(field.type_name) if field.type_name else scalar
    if field.proto3_optional:
        return f"optional {kind}"
    return f"repeated {kind}" if field.label == FieldDescriptorProto.LABEL_REPEATED else kind


def _kind(full_name: str) -> str:
    """A message or an enum, with a link where it is on the page."""
    name = full_name.removeprefix(_PACKAGE)
    return code(full_name.strip(".")) if name == full_name else f"[{name}](#{name.lower()})"
