"""Requests with bytes and fields changed at random are answered, or refused as their caller's fault."""

import random
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from neuronpipe.api.oip.v2.open_inference_pb2 import ModelInferRequest
from neuronpipe.core.errors import DeadlineExceeded, InvalidInput, ModelNotFound
from tests.unit.doors.oip.written_stages import Server, asks
from tests.unit.model_specs import image_spec, model_spec

_CHANGES = 3_000
_SEED = 20_261_122


def _requests() -> list[ModelInferRequest]:
    typed = asks("rerank", query=[["a"]], texts=[["a", "b"]])
    del typed.raw_input_contents[:]
    typed.inputs[0].contents.bytes_contents.append(b"a")
    typed.inputs[1].contents.bytes_contents.extend([b"a", b"b"])
    return [
        asks(
            "rerank",
            {"top_n": 1, "function": "none", "priority": 2, "timeout": 60_000_000},
            query=[["a"]],
            texts=[["a", "b"]],
        ),
        typed,
        asks("rerank/raw", input_ids=np.array([[5, 6], [7, 0]]), attention_mask=np.array([[1, 1], [1, 0]])),
        asks("viewer/raw", pixels=np.zeros((1, 3, 32, 48), np.uint8)),
    ]


def _change_bytes(request: ModelInferRequest, chance: random.Random) -> ModelInferRequest | None:
    data = bytearray(request.SerializeToString())
    for _ in range(chance.randint(1, 4)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    try:
        return ModelInferRequest.FromString(bytes(data))
    except DecodeError:
        return None


def _change_field(request: ModelInferRequest, chance: random.Random) -> ModelInferRequest:
    changed = ModelInferRequest()
    changed.CopyFrom(request)
    tensor = chance.choice(changed.inputs)
    numbers = [0, 1, 2, 3, -1, 1 << 31, (1 << 63) - 1, -(1 << 63)]
    match chance.randrange(5):
        case 0:
            tensor.shape[:] = chance.choices(numbers, k=chance.randint(0, 5))
        case 1:
            tensor.datatype = chance.choice(["BYTES", "INT64", "INT32", "UINT8", "FP16", "FP32", "BOOL", "", "x"])
        case 2:
            changed.raw_input_contents[:] = [
                content[: chance.randint(0, len(content))] + chance.randbytes(chance.randint(0, 9))
                for content in changed.raw_input_contents
            ]
        case 3:
            name = chance.choice(["top_n", "function", "truncation", "priority", "timeout", "cache_control", "x"])
            kind = chance.choice(["bool_param", "int64_param", "string_param", "double_param", "uint64_param"])
            value: Any = {"bool_param": True, "string_param": "right", "double_param": float("inf")}.get(kind, 1 << 62)
            setattr(changed.parameters[name], kind, value)
        case 4:
            changed.inputs.extend([tensor])
    return changed


@pytest.mark.parametrize("change", [_change_bytes, _change_field])
async def test_no_request_is_a_fault_of_the_server(change: Any) -> None:
    server = Server([model_spec("rerank", name="rerank"), image_spec(name="viewer")])
    chance, refused = random.Random(_SEED), 0
    requests = _requests()
    for number in range(_CHANGES):
        request = change(chance.choice(requests), chance)
        if request is None:
            continue
        try:
            await server.infer(request)
        except (InvalidInput, ModelNotFound):
            refused += 1
        except DeadlineExceeded:  # its timeout was changed
            pass
        except Exception as error:
            raise AssertionError(f"change {number} of seed {_SEED}: {request}") from error
    assert refused > _CHANGES / 10
