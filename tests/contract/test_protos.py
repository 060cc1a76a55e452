"""The protos: what callers rely on cannot change without being noticed, and every rpc has a method."""

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.message import Message

import neuronpipe
from neuronpipe.api.tei.v1.tei_pb2 import EmbedResponse, TokenEmbedding
from neuronpipe.api.v1.tasks_pb2 import ImageEmbeddingResult, SentenceEmbeddingResult
from neuronpipe.core.items import Stages
from neuronpipe.doors.inference import Inference
from neuronpipe.doors.native import INFERENCE_SERVICE, MODEL_SERVICE
from neuronpipe.doors.tei import SERVICES, tei_handlers
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.rpc.rpcs import RpcHandlers
from tests.servers.door import door_of

_PROTOS = Path(neuronpipe.__file__).parents[2] / "protos"
_BUF = Path(sys.executable).parent / "buf"

# what is done to the protos → (file, text, instead)
_BREAKING = {
    "a field is gone": ("tasks.proto", "  string text_pair = 2;\n", ""),
    "a field has another number": ("tasks.proto", "uint32 top_k = 3;", "uint32 top_k = 13;"),
    "a field has another type": ("tasks.proto", "uint32 top_k = 3;", "uint64 top_k = 3;"),
    "a field has another name": ("inference.proto", "string request_id = 3;", "string id = 3;"),
    "a field has left its oneof": (
        "inference.proto",
        "    google.rpc.Status error = 2;\n  }\n",
        "  }\n  google.rpc.Status error = 2;\n",
    ),
    "a value is gone": ("tasks.proto", "  TRUNCATION_LEFT = 3;\n", ""),
    "an rpc is gone": ("models.proto", "  rpc GetModel(GetModelRequest) returns (GetModelResponse);\n", ""),
    "an rpc does not stream": (
        "inference.proto",
        "rpc InferStream(stream InferStreamRequest)",
        "rpc InferStream(InferStreamRequest)",
    ),
}
_COMPATIBLE = {
    "nothing": ("tasks.proto", "", ""),
    "a field is new": ("tasks.proto", "uint32 top_k = 3;", "uint32 top_k = 3;\n  // New.\n  string colour = 99;"),
    "a comment is new": ("tasks.proto", "// The text. Required.", "// The text."),
}


def _breaking(folder: Path, change: tuple[str, str, str]) -> "subprocess.CompletedProcess[str]":
    """Makes one change to a copy of the protos and compares it with the original."""
    copy = folder / "protos"
    shutil.copytree(_PROTOS, copy)
    path = copy / "neuronpipe/api/v1" / change[0]
    original = path.read_text(encoding="utf-8")
    assert change[1] in original
    path.write_text(original.replace(change[1], change[2], 1) if change[1] else original, encoding="utf-8")
    return subprocess.run([_BUF, "breaking", copy, "--against", _PROTOS], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("change", _BREAKING.values(), ids=_BREAKING)
def test_a_change_that_breaks_callers_is_noticed(tmp_path: Path, change: tuple[str, str, str]) -> None:
    process = _breaking(tmp_path, change)
    assert process.returncode == 100, process.stderr  # buf's exit code for breaking changes, and for nothing else
    assert change[0] in process.stdout


@pytest.mark.parametrize("change", _COMPATIBLE.values(), ids=_COMPATIBLE)
def test_a_change_that_callers_do_not_see_is_allowed(tmp_path: Path, change: tuple[str, str, str]) -> None:
    process = _breaking(tmp_path, change)
    assert process.returncode == 0, process.stdout + process.stderr


def _paths(handlers: RpcHandlers) -> list[str]:
    return sorted(rpc.path for rpc, _ in handlers)


def _described(*services: ServiceDescriptor) -> list[str]:
    return sorted(f"/{service.full_name}/{method.name}" for service in services for method in service.methods)


def test_every_rpc_of_the_public_api_has_a_handler_and_the_reverse() -> None:
    async def never(item: object) -> object:
        raise AssertionError("called")

    stage: Callable[..., object] = never
    door = door_of([], Stages(stage, stage, stage))  # type: ignore[arg-type]
    assert _paths(door.native.handlers()) == _described(INFERENCE_SERVICE, MODEL_SERVICE)


def test_every_rpc_of_tei_has_a_handler_and_the_reverse() -> None:
    unused: Any = None
    handlers = tei_handlers(Inference(unused, unused, PipelineSettings()))
    assert _paths(handlers) == _described(*SERVICES.values())


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (SentenceEmbeddingResult, "embedding"),
        (ImageEmbeddingResult, "embedding"),
        (EmbedResponse, "embeddings"),
        (TokenEmbedding, "embeddings"),
    ],
)
def test_vectors_whose_bytes_are_read_and_written_are_the_first_field(message: type[Message], field: str) -> None:
    found = message.DESCRIPTOR.fields_by_name[field]
    assert (found.number, found.type, found.is_packed) == (1, FieldDescriptor.TYPE_FLOAT, True)


@pytest.mark.parametrize("name", ["inference", "models", "tasks"])
def test_the_code_for_go_is_made_from_the_protos_as_they_are(name: str) -> None:
    code = (_PROTOS.parent / f"examples/go/api/v1/{name}.pb.go").read_text()
    literal = code.partition("_rawDesc = []byte{")[2].partition("\n}")[0]
    made = FileDescriptorProto.FromString(bytes(int(byte, 16) for byte in re.findall(r"0x(\w\w)", literal)))
    present = FileDescriptorProto()
    importlib.import_module(f"neuronpipe.api.v1.{name}_pb2").DESCRIPTOR.CopyToProto(present)
    for file in (made, present):
        _forget_json_names(file.message_type)
    assert made == present, "run: make fix-protos"


def _forget_json_names(messages: Iterable[DescriptorProto]) -> None:
    """protoc writes them for some languages only."""
    for message in messages:
        for field in message.field:
            field.ClearField("json_name")
        _forget_json_names(message.nested_type)


def test_no_two_fields_have_one_accessor_in_java() -> None:
    # A text has get…Bytes beside its own accessor.
    messages = [message for name in ("inference", "models", "tasks", "jobs") for message in _messages_of(name)]
    clashes = [
        f"{message.full_name}.{name}_bytes"
        for message in messages
        for name, field in message.fields_by_name.items()
        if field.type == field.TYPE_STRING and f"{name}_bytes" in message.fields_by_name
    ]
    assert messages
    assert clashes == []


def _messages_of(name: str) -> Iterable[Descriptor]:
    messages: Iterable[Descriptor] = importlib.import_module(
        f"neuronpipe.api.v1.{name}_pb2"
    ).DESCRIPTOR.message_types_by_name.values()
    return messages
