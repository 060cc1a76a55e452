"""POST /v1/infer: an InferRequest in protobuf's JSON, and the InferResponse as `neuronpipe infer` prints it."""

import base64
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from neuronpipe.api.v1.inference_pb2 import CacheControl, InferResponse, Priority
from neuronpipe.api.v1.tasks_pb2 import ScoreFunction, TaskInput, TaskResult
from neuronpipe.core.errors import InvalidInput, NeuronpipeError
from neuronpipe.doors.http.messages import message_body
from tests.unit.doors.http.written_pipeline import Browser
from tests.unit.model_specs import model_spec
from tests.unit.task_messages import task_result

_TEXT: dict[str, Any] = {"model": "small", "input": {"text_classification": {"text": "a"}}}


def _answer(input: TaskInput) -> TaskResult | NeuronpipeError:
    if input.HasField("sentence_embedding"):
        return task_result(sentence_embedding={"embedding": [0.1, -2.5]})
    if input.WhichOneof("task") is None:
        return InvalidInput("input", "has no task")
    return task_result(text_classification={"labels": [{"label": "b", "score": 0.75}]})


@pytest.fixture
def browser() -> Browser:
    return Browser([model_spec()], _answer)


async def test_the_answer_is_a_response_with_timings_and_usage(browser: Browser) -> None:
    status, body = await browser.post("/v1/infer", _TEXT, x_request_id="r1")
    assert status == 200
    assert body["request_id"] == "r1"
    assert body["result"] == {"text_classification": {"labels": [{"label": "b", "score": 0.75}]}}
    assert body["timings"]["predict_queue_ns"] == "2000000"  # of 64 bits, which are strings in protobuf's JSON
    assert body["usage"]["token_cache"] == "CACHE_OUTCOME_UNSPECIFIED"
    message = ParseDict(body, InferResponse())
    assert (message.timings.total_ns, message.usage.tokens, message.usage.truncated_tokens) == (9_000_000, 5, 2)


async def test_several_optional_fields_are_taken(browser: Browser) -> None:
    options = {"max_new_tokens": 5, "do_sample": True, "temperature": 0.5}
    input = {"text_generation": {"prompt": "a", "options": options}}
    await browser.post("/v1/infer", {"model": "small", "input": input})
    (asked,) = browser.pipeline.asked
    found = asked.input.message.text_generation.options
    assert (found.max_new_tokens, found.do_sample, found.temperature) == (5, True, 0.5)


@pytest.mark.parametrize(
    ("seed", "expected"),
    [("0", 0), (7, 7), (str((1 << 64) - 1), (1 << 64) - 1), (str(1 << 64), None), ("9" * 5000, None)],
)
async def test_numbers_of_64_bits_are_read_from_strings_and_numbers(
    browser: Browser, seed: str | int, expected: int | None
) -> None:
    input = {"text_generation": {"prompt": "a", "options": {"seed": seed}}}
    status, body = await browser.post("/v1/infer", {"model": "small", "input": input})
    if expected is None:
        assert status == 400
        assert "must be at most 18446744073709551615" in body["detail"]
    else:
        (asked,) = browser.pipeline.asked
        assert asked.input.message.text_generation.options.seed == expected


async def test_all_fields_of_a_request_are_taken(browser: Browser) -> None:
    fields = {
        "version": "1",
        "request_id": "mine",
        "priority": "PRIORITY_BULK",
        "cache_control": "CACHE_CONTROL_REFRESH",
    }
    status, body = await browser.post("/v1/infer", _TEXT | fields, x_request_id="header")
    (asked,) = browser.pipeline.asked
    assert (status, body["request_id"], asked.call.request_id) == (200, "mine", "mine")
    assert (asked.model, asked.version, asked.call.priority) == ("small", "1", Priority.PRIORITY_BULK)
    assert asked.cache_control == CacheControl.CACHE_CONTROL_REFRESH


async def test_names_may_be_in_camel_case_and_bytes_are_base64(browser: Browser) -> None:
    image = bytes(range(256))
    fields = {"image": base64.b64encode(image).decode(), "topK": 3, "function": "SCORE_FUNCTION_SIGMOID"}
    status, _ = await browser.post("/v1/infer", {"model": "small", "input": {"imageClassification": fields}})
    (input,) = browser.inputs
    assert status == 200
    assert input.image_classification.image == image
    assert input.image_classification.top_k == 3
    assert input.image_classification.function == ScoreFunction.SCORE_FUNCTION_SIGMOID


async def test_a_vector_is_written_as_float32_is(browser: Browser) -> None:
    _, body = await browser.post("/v1/infer", {"model": "small", "input": {"sentence_embedding": {"text": "a"}}})
    assert body["result"] == {"sentence_embedding": {"embedding": [0.1, -2.5]}}  # not 0.10000000149011612


@pytest.mark.parametrize(
    ("input", "field"),
    [
        ({"text_classification": {"txt": "a"}}, "input.text_classification.txt"),
        ({"text_classification": {"text": 3}}, "input.text_classification.text"),
        ({"text_classification": {"top_k": -1}}, "input.text_classification.top_k"),
        ({"text_classification": {"top_k": 1 << 32}}, "input.text_classification.top_k"),
        ({"text_classification": {"truncation": "right"}}, "input.text_classification.truncation"),
        ({"rerank": {"texts": ["a", 3]}}, "input.rerank.texts[1]"),
        ({"image_classification": {"image": "no Base64!"}}, "input.image_classification.image"),
        ({"image_classification": {"image": 3}}, "input.image_classification.image"),
        ({"rerank": {}, "fill_mask": {}}, "input"),
        ({"unknown": {}}, "input.unknown"),
        ({}, "input"),
    ],
)
async def test_what_is_wrong_is_named_by_its_path(browser: Browser, input: Any, field: str) -> None:
    status, body = await browser.post("/v1/infer", {"model": "small", "input": input})
    assert (status, body["field"]) == (400, field)
    assert browser.headers["content-type"] == "application/problem+json"


def test_every_field_of_the_schema_says_what_its_proto_says(browser: Browser) -> None:
    schema = message_body(TaskInput.DESCRIPTOR).model_json_schema()
    rerank = schema["$defs"]["RerankInput"]["properties"]
    assert rerank["query"]["description"] == "The query. Required."
    bodies = [schema, *schema["$defs"].values()]
    # Within an input: GenerationOptions, TokenSequence, TokenBias, ChatMessage, TextSpan.
    assert len(bodies) == 1 + len(TaskInput.DESCRIPTOR.fields) + 5
    assert [name for body in bodies for name, field in body["properties"].items() if not field.get("description")] == []
