"""doors/http/bodies.py: what is wrong with a body is named by its path, and nothing that is no JSON passes."""

import json
from base64 import b64encode, encodebytes, urlsafe_b64encode
from codecs import BOM_UTF8
from typing import Annotated, Any, Literal, get_args

import numpy as np
import pytest
from pydantic import Discriminator, TypeAdapter, ValidationError

from neuronpipe.core.errors import InvalidInput
from neuronpipe.doors.http.bodies import check_body, read_base64, read_body, read_json, write_body
from neuronpipe.doors.http.body_types import Body, Count, only
from neuronpipe.doors.http.huggingface_bodies import Generate, ImageFeatures, QuestionAnswering, TextClassification
from neuronpipe.doors.http.huggingface_tasks import AnyBody
from neuronpipe.doors.http.openai_responses import ResponsesRequest
from neuronpipe.doors.http.openai_text_bodies import ChatRequest
from neuronpipe.doors.http.rerank import CohereRerank
from neuronpipe.doors.http.vllm import Score
from tests.unit.doors.http.written_pipeline import ROUTES


class _Inner(Body):
    text: str


class _Words(Body):
    type: Literal["text"]
    text: str | list[str]
    str: int = 0


class _Number(Body):
    type: Literal["number"]
    number: int


class _Parts(Body):
    parts: str | list[Annotated[_Words | _Number, Discriminator("type")]]


class _Example(Body):
    input: str | list[str] | list[list[int]] | list[_Inner]
    count: Count | None = None
    share: float = 0.5
    unknown_here: Annotated[Any, only()] = None


_KIND = TypeAdapter(_Example)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["a", 3]}, "input[1]"),
        ({"input": [[1, 2], [1, "x"]]}, "input[1][1]"),
        ({"input": [{"text": "a"}, {"text": 7}]}, "input[1].text"),
        ({"input": [{"text": "a"}, {}]}, "input[1].text"),
        ({"input": "a", "count": "3"}, "count"),
        ({"input": "a", "count": True}, "count"),
        ({"input": "a", "count": 0}, "count"),
        ({"input": "a", "count": 1.5}, "count"),
        ({"input": "a", "count": 1 << 32}, "count"),
        ({"input": "a", "share": "x"}, "share"),
        ({"input": "a", "unknown_here": 1}, "unknown_here"),
        ([], "body"),
        ("text", "body"),
        (None, "body"),
    ],
)
def test_an_error_names_the_path_of_the_field(body: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_body(_KIND, json.dumps(body).encode())
    assert caught.value.field == field


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"input": }',
        b'{"input": "a"} x',
        b'{"input": NaN}',
        b'{"share": Infinity}',
        b'{"input": "\xff"}',
        b'{"input": "\\ud800"}',
        b"[" * 100,
    ],
)
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput, match="no valid JSON") as caught:
        read_body(_KIND, data)
    assert caught.value.field == "body"


@pytest.mark.parametrize("number", ["1e400", "-1e400", "9" * 400])
def test_a_number_that_no_float_holds_is_told_as_such(number: str) -> None:
    with pytest.raises(InvalidInput, match=r"^body: a number is too large, the limit is 1\.8e308: line 1, column 11$"):
        read_body(_KIND, b'{"share": %s}' % number.encode())


def test_json_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^body: lists and objects are nested more than 128 deep, the limit$"):
        read_body(_KIND, b"[" * 10_000)


def test_no_text_of_the_caller_is_in_an_error() -> None:
    with pytest.raises(InvalidInput) as caught:
        read_body(_KIND, b'{"input": ["a secret"], "count": "another secret"}')
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": "a" * 101}, "input"),
        ({"input": [{"text": "a"}, {"text": "b" * 101}]}, "input[1].text"),
        ({"input": "a", "user": {"ids": ["c" * 101]}}, "user.ids[0]"),
        ("d" * 101, "body"),
    ],
)
def test_a_text_that_is_too_long_is_named_before_anything_is_made_of_it(body: Any, field: str) -> None:
    problem = r": more than 100 bytes, the limit \(the gateway's max_input_bytes\)"
    with pytest.raises(InvalidInput, match=problem) as caught:
        read_body(_KIND, json.dumps(body).encode(), max_text_bytes=100)
    assert caught.value.field == field


def test_texts_that_are_long_only_together_are_read() -> None:
    assert len(read_body(_KIND, json.dumps({"input": ["a" * 100] * 5}).encode(), max_text_bytes=100).input) == 5


@pytest.mark.parametrize(
    "image", [{"image": "a" * 999}, {"images": ["a" * 999]}, {"image_url": {"url": "a" * 999}}], ids=str
)
def test_an_image_may_be_longer_than_a_text(image: dict[str, Any]) -> None:
    assert read_json(json.dumps({"input": [image]}).encode(), max_text_bytes=100) == {"input": [image]}


def test_a_path_has_an_end() -> None:
    class _Named(Body):
        names: dict[str, int]

    with pytest.raises(InvalidInput) as caught:
        read_body(TypeAdapter(_Named), json.dumps({"names": {"x" * 10_000: "no number"}}).encode())
    assert len(caught.value.field) == 200


def test_fields_that_change_nothing_are_left_out_at_any_depth() -> None:
    body = {"input": [{"text": "a", "cache_control": {"type": "ephemeral"}}], "user": {"id": 3}, "foo": None}
    assert read_body(_KIND, json.dumps(body).encode()).input == [_Inner(text="a")]


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "text", "text": "a", "foo": 1}, "foo"),
        ({"type": "text", "text": 1}, "text"),
        ({"type": "text", "text": ["a", 1]}, "text[1]"),
        ({"type": "text", "text": "a", "str": "b"}, "str"),
        ({"type": "text"}, "text"),
        ({"type": "number", "number": "a"}, "number"),
        ({"type": "number", "number": 1, "foo": 2}, "foo"),
        ({"type": "number", "number": 1, "text": 2}, "text"),
    ],
    ids=str,
)
def test_a_form_that_is_named_as_a_field_is_no_part_of_a_path(part: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_body(TypeAdapter(_Parts), {"parts": [part]})
    assert caught.value.field == f"parts[0].{field}"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": "a", "foo": 1}, "foo"),
        ({"input": "a", "foo": False}, "foo"),
        ({"foo": 1}, "foo"),
        ({"input": [{"text": "a"}, {"text": "a", "foo": 1}]}, "input[1].foo"),
    ],
)
def test_an_unknown_field_is_refused_by_its_path(body: Any, field: str) -> None:
    with pytest.raises(InvalidInput, match="is not supported") as caught:
        read_body(_KIND, json.dumps(body).encode())
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"input": "a", "cuont": 1}, "is not supported; did you mean count?"),
        ({"input": "a", "foo": 1}, "is not supported"),
        ({"input": "a", "x" * (1 << 20): 1}, "is not supported"),
        ({"input": 1}, "must be a text or a list"),
        ({"input": "a", "share": "1"}, "must be a number"),
    ],
)
def test_a_wrong_field_is_answered_with_a_similar_name_or_the_forms_that_it_may_have(body: Any, problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_body(_KIND, json.dumps(body).encode())
    assert caught.value.problem == problem


def test_many_unknown_fields_are_one_error() -> None:
    with pytest.raises(ValidationError) as caught:
        _KIND.validate_python({"input": "a"} | dict.fromkeys(map(str, range(1000)), 1))
    assert caught.value.error_count() == 1


_TYPED = [route for route in ROUTES if isinstance(route.takes, type) and issubclass(route.takes, Body)]


@pytest.mark.parametrize("route", _TYPED, ids=lambda route: route.key)
def test_every_door_refuses_a_field_that_it_does_not_have(route: Any) -> None:
    with pytest.raises(InvalidInput, match="is not supported") as caught:
        check_body(TypeAdapter(route.takes), {"instruction": "Find."})
    assert caught.value.field == "instruction"


@pytest.mark.parametrize("takes", get_args(AnyBody), ids=lambda takes: takes.__name__)
def test_every_body_of_hugging_face_refuses_a_field_that_it_does_not_have(takes: Any) -> None:
    with pytest.raises(InvalidInput, match="is not supported") as caught:
        check_body(TypeAdapter(takes), {"instruction": "Find."})
    assert caught.value.field == "instruction"
    parameters = takes.model_fields.get("parameters")
    with pytest.raises(InvalidInput) as caught:
        check_body(TypeAdapter(takes), {"parameters": {"instruction": "Find."}})
    assert caught.value.field == ("parameters.instruction" if parameters else "parameters")


_PART = {"type": "text", "text": "a", "id": "1", "index": 0}
_RERANK = {"query": "q", "documents": ["a"]}


@pytest.mark.parametrize(
    ("takes", "body"),
    [
        (ChatRequest, {"messages": [{"role": "assistant", "content": [_PART]}]}),  # LangChain's
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "session_id": "1", "cache_prompt": True}),
        (ResponsesRequest, {"input": "a", "client_metadata": {"version": "1"}}),
        (CohereRerank, _RERANK | {"max_tokens_per_doc": 4096, "max_chunks_per_doc": 10, "rank_fields": ["text"]}),
        (CohereRerank, _RERANK | {"raw_scores": False, "use_activation": True}),
        (Score, {"text_1": "a", "text_2": "b", "add_special_tokens": True}),
        (Generate, {"inputs": "a", "stream": False, "parameters": {"ignore_eos_token": False}}),
        (ImageFeatures, {"inputs": "a", "parameters": {}}),
        (TextClassification, {"inputs": "a", "parameters": {"padding": True}, "options": {"retry_on_error": False}}),
        (QuestionAnswering, {"inputs": {"id": "1", "question": "a", "context": "b"}}),
    ],
)
def test_defaults_that_clients_send_are_taken(takes: Any, body: Any) -> None:
    assert check_body(TypeAdapter(takes), body)


@pytest.mark.parametrize("field", ["rank_fields", "raw_scores"])
def test_a_rerank_that_would_be_another_one_is_refused(field: str) -> None:
    with pytest.raises(InvalidInput, match="is not supported") as caught:
        check_body(TypeAdapter(CohereRerank), _RERANK | {field: 1})
    assert caught.value.field == field


def test_whole_numbers_are_numbers() -> None:
    assert read_body(_KIND, b'{"input": "a", "share": 1}').share == 1
    assert read_body(_KIND, b'{"input": "a", "count": 5.0}').count == 5


def test_a_byte_order_mark_is_no_part_of_a_body() -> None:
    assert read_body(_KIND, BOM_UTF8 + b'{"input": "a"}').input == "a"


_BYTES = bytes(range(256))


@pytest.mark.parametrize(
    "text",
    [
        b64encode(_BYTES).decode(),
        encodebytes(_BYTES).decode(),
        encodebytes(_BYTES).decode().replace("\n", "\r\n"),
        urlsafe_b64encode(_BYTES).decode().rstrip("="),
        "data:image/png;base64," + b64encode(_BYTES).decode(),
        "DATA:;charset=x;BASE64," + encodebytes(_BYTES).decode(),
    ],
)
def test_base64_is_read_as_clients_write_it(text: str) -> None:
    assert read_base64(text) == _BYTES


@pytest.mark.parametrize("text", ["no base64!", "A", "AA==AA", "data:image/png,abc"])
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Base64"):
        read_base64(text)


def test_arrays_are_written_as_lists_of_float32() -> None:
    # As float64 it would be 0.10000000149011612.
    assert write_body({"vector": np.array([0.1, 2], np.float32)}) == b'{"vector":[0.1,2.0]}'


@pytest.mark.parametrize(
    "kind",
    [route.takes for route in ROUTES if route.takes is not None],
    ids=[route.key for route in ROUTES if route.takes is not None],
)
@pytest.mark.parametrize("item", [1.5, {}, [1.5]], ids=str)
def test_a_list_of_wrong_items_has_few_errors(kind: Any, item: Any) -> None:
    # Each takes memory: those of all items of a body of 64 MiB would take gigabytes.
    items = [item] * 1000
    body = dict.fromkeys(("inputs", "input", "texts", "documents"), items) | {"query": "q", "model": "m"}
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(body)
    assert caught.value.error_count() < 50
