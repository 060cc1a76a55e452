"""The Open Inference Protocol's messages are those of tritonclient on the wire, and only a gateway has them.

A process can have one copy of messages of these names, so tritonclient's are read in another one.
"""

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

_PROGRAM = """
import importlib, json, sys, warnings

warnings.simplefilter("ignore")

def described(message):
    fields = {
        field.name: [
            field.number,
            field.type,
            field.is_repeated,
            field.message_type and field.message_type.full_name,
            field.enum_type and field.enum_type.full_name,
            field.containing_oneof and field.containing_oneof.name,
        ]
        for field in message.fields
    }
    found = {message.full_name: fields}
    for nested in message.nested_types:
        found |= described(nested)
    return found

messages, enums, rpcs = {}, {}, {}
for module in sys.argv[1:]:
    file = importlib.import_module(module).DESCRIPTOR
    for message in file.message_types_by_name.values():
        messages |= described(message)
    for enum in file.enum_types_by_name.values():
        enums[enum.full_name] = {value.name: value.number for value in enum.values}
    for service in file.services_by_name.values():
        for method in service.methods:
            kinds = [method.input_type.full_name, method.output_type.full_name]
            rpcs[f"{service.full_name}/{method.name}"] = [*kinds, method.client_streaming, method.server_streaming]
print(json.dumps([messages, enums, rpcs]))
"""
_OURS = ("neuronpipe.api.oip.v2.open_inference_pb2", "neuronpipe.api.oip.v2.model_config_pb2")
_THEIRS = ("tritonclient.grpc.service_pb2", "tritonclient.grpc.model_config_pb2")
# The one field that the Open Inference Protocol has and Triton has not.
_PROPERTIES = "inference.ModelMetadataResponse"


def _python(program: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def _described(*modules: str) -> Any:
    return json.loads(_python(_PROGRAM, *modules))


def test_every_field_is_what_tritonclient_has_by_its_name_and_number() -> None:
    ours, theirs = _described(*_OURS)[0], _described(*_THEIRS)[0]
    ours[_PROPERTIES].pop("properties")
    ours.pop(f"{_PROPERTIES}.PropertiesEntry")
    assert len(ours) > 30
    for message, fields in ours.items():
        assert fields.items() <= theirs[message].items(), message


def test_every_value_of_an_enumeration_is_the_same() -> None:
    ours, theirs = _described(*_OURS)[1], _described(*_THEIRS)[1]
    assert ours
    for name, values in ours.items():
        assert values == theirs[name]


def test_every_rpc_is_one_of_tritonclient() -> None:
    ours, theirs = _described(*_OURS)[2], _described(*_THEIRS)[2]
    assert len(ours) == 12
    assert ours.items() <= theirs.items()


def test_what_is_refused_is_the_rest_of_tritonclient_s_rpcs() -> None:
    listed = _python(
        "from neuronpipe.doors.oip.grpc_door import OipDoor\n"
        "print(*(rpc.path.removeprefix('/') for rpc, _ in OipDoor(None, 1).handlers()))"
    )
    assert set(listed.split()) == set(_described(*_THEIRS)[2])


@pytest.mark.parametrize(
    "module", ["neuronpipe.client", "neuronpipe.cli", "neuronpipe.measure.load.run", "neuronpipe.rpc.client"]
)
def test_what_callers_import_leaves_the_names_to_tritonclient(module: str) -> None:
    _python(f"import warnings; warnings.simplefilter('ignore'); import {module}, tritonclient.grpc")
