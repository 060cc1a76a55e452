"""doors/http/openai_responses.py. The real client reads its events in tests/integration/test_generation_http.py."""

from typing import Any

import pytest

from neuronpipe.api.v1.tasks_pb2 import (
    ChatMessage,
    FinishReason,
    GeneratedText,
    GenerationOptions,
    TaskInput,
    TaskResult,
    TextGenerationInput,
    TextGenerationResult,
)
from neuronpipe.core.errors import InvalidInput, NeuronpipeError
from tests.unit.doors.http.doubles import Browser
from tests.unit.model_specs import model_spec

_SPECS = [model_spec("text_generation", name="writer")]


def _answer(input: TaskInput) -> TaskResult | NeuronpipeError:
    options = input.text_generation.options
    if options.temperature > 1:
        return InvalidInput("options.temperature", "is too hot")
    reasons = FinishReason.FINISH_REASON_LENGTH, FinishReason.FINISH_REASON_END
    text = GeneratedText(text="The cat.", finish_reason=reasons[options.max_new_tokens != 1])
    return TaskResult(text_generation=TextGenerationResult(sequences=[text]))


@pytest.fixture
def browser() -> Browser:
    return Browser(_SPECS, _answer)


async def test_a_text_is_answered_by_a_message(browser: Browser) -> None:
    status, body = await browser.post("/v1/responses", {"input": "Who sat?", "metadata": {"a": "b"}, "store": True})
    assert (status, body["object"], body["status"], body["model"]) == (200, "response", "completed", "writer")
    [message] = body["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": "The cat.", "annotations": [], "logprobs": []}]
    assert (body["metadata"], body["store"], body["usage"]["input_tokens"]) == ({"a": "b"}, False, 5)
    said = [ChatMessage(role="user", content="Who sat?")]
    assert browser.inputs == [
        TaskInput(text_generation=TextGenerationInput(messages=said, options=GenerationOptions()))
    ]


async def test_a_conversation_begins_with_the_instructions(browser: Browser) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [{"role": "developer", "content": "d"}, {"type": "message", "role": "user", "content": parts}]
    await browser.post("/v1/responses", {"input": items, "instructions": "i"})
    said = browser.inputs[0].text_generation.messages
    assert [(one.role, one.content) for one in said] == [("system", "i"), ("system", "d"), ("user", "ab")]


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"temperature": 0.5, "top_p": 0.25}, {"temperature": 0.5, "top_p": 0.25, "do_sample": True}),
        ({"temperature": 0, "top_p": 0.5}, {"do_sample": False}),
        ({"max_output_tokens": 7}, {"max_new_tokens": 7}),
        ({"text": {"format": {"type": "json_object"}}}, {"json_object": True}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
            {"json_schema": '{"type": "object"}'},
        ),
    ],
)
async def test_options_have_our_names(browser: Browser, given: dict[str, Any], options: dict[str, Any]) -> None:
    assert (await browser.post("/v1/responses", {"input": "a", **given}))[0] == 200
    assert browser.inputs[0].text_generation.options == GenerationOptions(**options)


@pytest.mark.parametrize(
    "given",
    [
        {"include": ["reasoning.encrypted_content"]},  # litellm, AI SDK
        {"reasoning": {"effort": None, "summary": None}},
        {"reasoning": {"effort": "none"}},
        {"tools": [], "tool_choice": "auto", "include": [], "truncation": "disabled", "top_logprobs": 0},
    ],
    ids=str,
)
async def test_what_changes_nothing_is_ignored(browser: Browser, given: dict[str, Any]) -> None:
    assert (await browser.post("/v1/responses", {"input": "a", **given}))[0] == 200


async def test_a_text_that_reached_its_limit_is_incomplete(browser: Browser) -> None:
    _, body = await browser.post("/v1/responses", {"input": "a", "max_output_tokens": 1})
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"input": []}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}, "include"),
        ({"reasoning": {"effort": "low", "summary": None}}, "reasoning"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].type"),
        ({"temperature": 1.5}, "temperature"),
    ],
)
async def test_what_is_not_here_is_refused_by_its_name(browser: Browser, given: dict[str, Any], field: str) -> None:
    status, body = await browser.post("/v1/responses", {"input": "a", **given})
    assert (status, body["error"]["param"]) == (400, field)
