"""core/parsing.py: what is made of a message is limited by its fields, wherever they are in it."""

import random

import pytest
from google.protobuf.message import DecodeError

from neuronpipe.api.forward.v1 import inference_pb2 as wire
from neuronpipe.api.oip.v2.open_inference_pb2 import ModelInferRequest
from neuronpipe.api.v1.inference_pb2 import InferBatchRequest, InferRequest
from neuronpipe.api.v1.tasks_pb2 import ChatMessage, TaskInput, TextGenerationInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.parsing import check_depth, parse, parser
from tests.fuzz.expanding import field_of
from tests.fuzz.messages import change_bytes

# As many fields as a message may have, and numbers of a packed list.
_FIELDS, _NUMBERS = 131_072, 1_048_576


def test_a_message_may_have_as_many_fields_as_the_limit_and_no_more() -> None:
    data = field_of(1, b"") * _FIELDS
    # Padding, without which it would be too small to be looked at.
    most = data[: -2 * 2] + field_of(1, field_of(1, b"a" * 100))
    assert len(parse(InferBatchRequest, most).requests) == _FIELDS - 1
    with pytest.raises(InvalidInput, match=r"^requests: .* 131072 fields, or 1048576 numbers, the limit"):
        parse(InferBatchRequest, most + field_of(1, b""))


def test_the_error_names_the_path_of_what_is_too_much() -> None:
    messages = [ChatMessage()] * _FIELDS
    input = TaskInput(text_generation=TextGenerationInput(messages=messages))
    batch = InferBatchRequest(requests=[InferRequest(model="a"), InferRequest(model="a", input=input)])
    with pytest.raises(InvalidInput) as caught:
        parse(InferBatchRequest, batch.SerializeToString())
    assert caught.value.field == "requests.input.text_generation.messages"


def test_texts_together_have_a_limit_where_a_message_is_one_input() -> None:
    # Beside them, what names the model and the request.
    texts = [b"a" * (1 << 19), b"b" * (1 << 19)]
    read = parser(InferRequest, max_text_bytes=1 << 20)
    assert read(field_of(1, texts[0]) + field_of(2, texts[1])).version == "b" * (1 << 19)
    input = TaskInput(text_generation=TextGenerationInput(prompt="c" * (1 << 20), tools="d" * (65 << 10)))
    request = InferRequest(input=input)
    with pytest.raises(InvalidInput, match=r"^input\.text_generation\.tools: more than 1048576 bytes; the limits are"):
        read(request.SerializeToString())


def test_parts_that_stay_bytes_are_looked_into() -> None:
    input = TaskInput(text_generation=TextGenerationInput(messages=[ChatMessage()] * _FIELDS))
    data = InferRequest(input=input).SerializeToString()
    with pytest.raises(InvalidInput, match=r"^input\.text_generation\.messages: "):
        parser(wire.InferRequest, InferRequest.DESCRIPTOR)(data)


@pytest.mark.parametrize("field", ["int64_contents", "bool_contents"])
def test_numbers_of_a_packed_list_count(field: str) -> None:
    def tensor(count: int) -> bytes:
        request = ModelInferRequest()
        getattr(request.inputs.add().contents, field).extend([1] * count)
        return request.SerializeToString()

    parse(ModelInferRequest, tensor(_NUMBERS - 100))
    with pytest.raises(InvalidInput, match=rf"^inputs\.contents\.{field}: "):
        parse(ModelInferRequest, tensor(_NUMBERS))


def test_unknown_fields_count() -> None:
    with pytest.raises(InvalidInput, match=r"^unknown fields: "):
        parse(InferBatchRequest, field_of(1000, b"") * (_FIELDS + 1))


def test_large_texts_do_not_count() -> None:
    data = InferBatchRequest(requests=[InferRequest(model="a" * (8 << 20))] * 3).SerializeToString()
    assert len(parse(InferBatchRequest, data).requests) == 3


def test_what_the_parser_takes_and_refuses_is_the_same_of_large_messages() -> None:
    chance = random.Random(7)
    right = InferBatchRequest(requests=[InferRequest(model="a" * 1000, request_id="b") for _ in range(400)])
    data = right.SerializeToString()
    for _ in range(200):
        changed = change_bytes(data, chance)
        try:
            expected: InferBatchRequest | None = InferBatchRequest.FromString(changed)
        except DecodeError:
            expected = None
        try:
            found: InferBatchRequest | None = parse(InferBatchRequest, changed)
        except DecodeError:
            found = None
        assert found == expected


@pytest.mark.parametrize(
    "begin", [b"", b'{"a": "' + b"[" * 200 + b'\\"{", "b": ', b"[" + b"[], " * 9000, b'["' + b"a" * (1 << 18) + b'", ']
)
def test_json_may_be_nested_128_deep_and_no_deeper(begin: bytes) -> None:
    opened = begin.strip()[:1]
    end = {b"": b"", b"[": b"]", b"{": b"}"}[opened]
    for opens, closes, levels in ((b"[", b"]", 1), (b'{"a": ', b"}", 1), (b'{"a": [', b"]}", 2)):
        depth = (128 - bool(opened)) // levels
        check_depth("body", begin + opens * depth + b"0" + closes * depth + end)
        with pytest.raises(InvalidInput, match=r"^body: lists and objects are nested more than 128 deep, the limit$"):
            check_depth("body", begin + opens * (depth + 1) + b"0" + closes * (depth + 1) + end)
