"""doors/http/openai_responses.py. The real client reads its events in integration/generation/test_generation_http.py.

Events of calls are read in tests/integration/generation/test_structured_output.py.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from neuronpipe.api.v1.tasks_pb2 import (
    ChatMessage,
    FinishReason,
    GeneratedText,
    GenerationOptions,
    TaskInput,
    TaskResult,
    TextGenerationInput,
    TextGenerationResult,
    TokenizationResult,
)
from neuronpipe.core.errors import InvalidInput, NeuronpipeError
from neuronpipe.core.names import Name, Spans
from neuronpipe.gateway.requests import GeneratedPart, InferenceRequest, TextEvent
from tests.unit.doors.http.written_pipeline import Browser
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
    assert body["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    said = [ChatMessage(role="user", content="Who sat?")]
    found = browser.inputs
    assert found == [TaskInput(text_generation=TextGenerationInput(messages=said, options=GenerationOptions()))]


async def test_a_conversation_begins_with_the_instructions(browser: Browser) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [{"role": "developer", "content": "d"}, {"type": "message", "role": "user", "content": parts}]
    await browser.post("/v1/responses", {"input": items, "instructions": "i"})
    said = browser.inputs[0].text_generation.messages
    assert [(message.role, message.content) for message in said] == [("system", "i"), ("system", "d"), ("user", "ab")]


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


@pytest.mark.parametrize("name", ["summary", "generate_summary"])
async def test_a_summary_of_reasoning_is_named_as_ignored_and_refused_by_strict(browser: Browser, name: str) -> None:
    asked = {"input": "a", "reasoning": {name: "auto"}}
    assert (await browser.post("/v1/responses", asked))[0] == 200
    assert browser.headers["x-neuronpipe-ignored"] == f"reasoning.{name}"
    status, body = await browser.post("/v1/responses", asked, neuronpipe_strict="true")
    assert (status, body["error"]["param"]) == (400, f"reasoning.{name}")


_SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}
_LOOK = {"type": "function", "name": "look", "description": "Looks.", "parameters": _SCHEMA, "strict": True}
_WAIT = {"type": "function", "name": "wait"}
_ASKED = {"role": "user", "content": "Look."}
_CALLS = [{"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{}"} for call_id in "12"]
_DARK = {"type": "function_call_output", "call_id": "1", "output": "dark"}
_CALL = '{"name": "look", "arguments": {"at": 1}}'


def _writer(text: str, reason: FinishReason.ValueType = FinishReason.FINISH_REASON_END) -> Browser:
    """A model of Hermes' format whose text is given."""
    result = TextGenerationResult(sequences=[GeneratedText(text=text, finish_reason=reason)])
    spec = model_spec("text_generation", name="writer", chat_template="{{ tools }}<tool_call>")
    return Browser([spec], lambda _: TaskResult(text_generation=result))


async def test_tools_reach_the_template_as_those_of_a_chat_and_come_back_as_given() -> None:
    browser = _writer("No.")
    _, body = await browser.post("/v1/responses", {"input": "a", "tools": [_LOOK, _WAIT]})
    functions = [{name: value for name, value in tool.items() if name != "type"} for tool in (_LOOK, _WAIT)]
    tools = [{"type": "function", "function": function} for function in functions]
    await browser.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": tools})
    assert browser.inputs[0].text_generation.tools == json.dumps(tools)
    assert browser.inputs[0] == browser.inputs[1]
    # OpenAI's client reads these fields of a tool in any case.
    assert body["tools"] == [_LOOK, {"description": None, "parameters": None, "strict": None, **_WAIT}]
    assert (body["tool_choice"], [item["type"] for item in body["output"]]) == ("auto", ["message"])


async def test_calls_are_items_behind_the_text() -> None:
    text = f'So.\n<tool_call>{_CALL}</tool_call>\n<tool_call>{{"name": "wait", "arguments": {{}}}}</tool_call>'
    browser = _writer(text)
    _, body = await browser.post("/v1/responses", {"input": "a", "tools": [_LOOK, _WAIT]})
    said, look, wait = body["output"]
    assert (said["type"], said["content"][0]["text"], said["status"]) == ("message", "So.", "completed")
    assert {"type": "function_call", "name": "look", "arguments": '{"at": 1}', "status": "completed"}.items() <= (
        look.items()
    )
    assert (wait["name"], wait["arguments"], wait["status"]) == ("wait", "{}", "completed")
    assert look["id"].startswith("fc_")
    assert look["call_id"].startswith("call_")
    assert len({item["id"] for item in body["output"]} | {look["call_id"], wait["call_id"]}) == 5
    _, body = await browser.post("/v1/responses", {"input": "a", "tools": [_LOOK, _WAIT], "parallel_tool_calls": False})
    expected = (["message", "function_call"], False)
    assert ([item["type"] for item in body["output"]], body["parallel_tool_calls"]) == expected


async def test_a_text_of_calls_has_no_message() -> None:
    _, body = await _writer(_CALL).post("/v1/responses", {"input": "a", "tools": [_LOOK]})
    assert [item["type"] for item in body["output"]] == ["function_call"]


async def test_a_call_that_reached_its_limit_is_incomplete() -> None:
    browser = _writer(_CALL[:-4], FinishReason.FINISH_REASON_LENGTH)
    _, body = await browser.post("/v1/responses", {"input": "a", "tools": [_LOOK]})
    [call] = body["output"]
    assert (call["arguments"], call["status"], body["status"]) == ('{"at":', "incomplete", "incomplete")


async def _events(
    text: str, monkeypatch: pytest.MonkeyPatch, browser: Browser | None = None, **asked: Any
) -> list[dict[str, Any]]:
    """Those of a text that comes in single characters."""
    browser = browser or _writer(text)
    pipeline = browser.pipeline

    async def told(request: InferenceRequest, span: Name = Spans.GENERATE) -> AsyncGenerator[TextEvent, None]:
        for character in text:
            yield GeneratedPart(character, [1])
            await asyncio.sleep(0)
        yield await pipeline.infer(request, span)

    monkeypatch.setattr(pipeline, "generate", told)
    status, events = await browser.post("/v1/responses", {"input": "a", "stream": True, **asked})
    assert status == 200
    lines = [event.split("\n") for event in events.decode().split("\n\n")[:-1]]
    read = [json.loads(data.removeprefix("data: ")) for _, data in lines]
    assert [name for name, _ in lines] == [f"event: {event['type']}" for event in read]
    assert [event["sequence_number"] for event in read] == [*range(len(read))]
    return read


async def test_items_of_a_stream_come_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f'So.\n<tool_call>{_CALL}</tool_call>\n<tool_call>{{"name": "wait", "arguments": {{}}}}</tool_call>'
    events = await _events(text, monkeypatch, tools=[_LOOK, _WAIT])
    told = [(event["type"].removeprefix("response."), event.get("output_index")) for event in events]
    parts = "output_text", "function_call_arguments"
    message = ["output_item.added", "content_part.added", "output_text.delta"]
    message += ["output_text.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert [entry for entry, before in zip(told, [None, *told], strict=False) if entry != before] == [
        ("created", None),
        ("in_progress", None),
        *((name, 0) for name in message),
        *((name, 1) for name in call),
        *((name, 2) for name in call),
        ("completed", None),
    ]
    response = events[-1]["response"]
    for place, (item, whole) in enumerate(zip(response["output"], ["So.", '{"at": 1}', "{}"], strict=True)):
        own = [event for event in events if event.get("output_index") == place]
        begun: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
        assert own[0]["item"] == item | begun | {"status": "in_progress"}
        assert own[-1]["item"] == item
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}
        *deltas, done = [event for event in own if event["type"].split(".")[1] in parts]
        assert len(deltas) > 1
        assert "".join(delta["delta"] for delta in deltas) == done.get("text", done.get("arguments")) == whole
        assert done.get("name") == item.get("name")
    # The same items as in an answer that is whole, but for their ids, which are random.
    _, body = await _writer(text).post("/v1/responses", {"input": "a", "tools": [_LOOK, _WAIT]})
    random = "id", "call_id"
    items, expected = (
        [{name: value for name, value in item.items() if name not in random} for item in output]
        for output in (response["output"], body["output"])
    )
    assert items == expected


_THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour."


def _thinker(text: str, reason: FinishReason.ValueType = FinishReason.FINISH_REASON_END, *opens: str) -> Browser:
    """A model whose template knows reasoning, and whose text is given."""
    result = TextGenerationResult(sequences=[GeneratedText(text=text, finish_reason=reason)])
    spec = model_spec("text_generation", name="writer", chat_template="<think></think>", opens_reasoning=opens)
    return Browser([spec], lambda _: TaskResult(text_generation=result))


async def test_reasoning_is_an_item_before_the_message_with_openais_events(monkeypatch: pytest.MonkeyPatch) -> None:
    events = await _events(_THOUGHT, monkeypatch, _thinker(_THOUGHT))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    told = [(event["type"].removeprefix("response."), event.get("output_index")) for event in events]
    items = [
        (["output_item.added", "content_part.added", f"{part}.delta"], [f"{part}.done", "content_part.done"])
        for part in ("reasoning_text", "output_text")
    ]
    assert [entry for entry, before in zip(told, [None, *told], strict=False) if entry != before] == [
        ("created", None),
        ("in_progress", None),
        *((name, place) for place, (begun, done) in enumerate(items) for name in [*begun, *done, "output_item.done"]),
        ("completed", None),
    ]
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == "Two and two."
    reasoning, message = events[-1]["response"]["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Two and two."}]
    assert (reasoning["type"], reasoning["summary"], reasoning["status"]) == ("reasoning", [], "completed")
    assert message["content"][0]["text"] == "Four."
    _, body = await _thinker(_THOUGHT).post("/v1/responses", {"input": "a"})
    assert [item["content"] for item in body["output"]] == [reasoning["content"], message["content"]]
    Response.model_validate(body, strict=True)


async def test_reasoning_that_reached_the_limit_is_an_incomplete_item() -> None:
    browser = _thinker("<think>\nTwo", FinishReason.FINISH_REASON_LENGTH)
    _, body = await browser.post("/v1/responses", {"input": "a"})
    [reasoning] = body["output"]
    assert (reasoning["type"], reasoning["status"], body["status"]) == ("reasoning", "incomplete", "incomplete")


@pytest.mark.parametrize(
    ("fields", "is_open"),
    [
        ({}, True),
        ({"reasoning": {"effort": "high"}}, True),
        ({"reasoning": {"effort": "none"}}, False),
        ({"text": {"format": {"type": "json_object"}}}, False),
    ],
    ids=str,
)
async def test_a_template_may_open_the_reasoning(fields: dict[str, Any], is_open: bool) -> None:
    browser = _thinker("So.\n</think>\nYes.", FinishReason.FINISH_REASON_END, "default", "on")
    _, body = await browser.post("/v1/responses", {"input": "a", **fields})
    kinds = [item["type"] for item in body["output"]]
    assert kinds == (["reasoning", "message"] if is_open else ["message"])


async def test_no_effort_switches_the_templates_thinking_off() -> None:
    browser = _thinker("Yes.")
    await browser.post("/v1/responses", {"input": "a", "reasoning": {"effort": "none"}})
    arguments = json.loads(browser.inputs[0].text_generation.template_arguments)
    assert arguments == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}


async def test_reasoning_that_is_sent_again_is_the_reasoning_of_the_assistants_message() -> None:
    browser, part = _thinker("Yes."), {"type": "reasoning_text", "text": "Hm."}
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [part], "status": "completed"}
    said = {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "Four."}]}
    without_text: dict[str, Any] = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": None}
    items = [{"role": "user", "content": "a"}, reasoning, said, {"role": "user", "content": "b"}, without_text, *_CALLS]
    status, answer = await browser.post("/v1/responses", {"input": items})
    assert status == 200, answer
    messages = browser.inputs[0].text_generation.messages
    expected = [("user", "a"), ("assistant", "Four."), ("user", "b"), ("assistant", "")]
    assert [(message.role, message.content) for message in messages] == expected
    assert json.loads(messages[1].fields) == {"reasoning_content": "Hm."}
    assert len(json.loads(messages[3].fields)["tool_calls"]) == 2


async def test_an_empty_text_is_a_message_in_a_stream_too(monkeypatch: pytest.MonkeyPatch) -> None:
    events = await _events("", monkeypatch)
    message = ["output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"]
    assert [event["type"].removeprefix("response.") for event in events[2:-1]] == message
    assert events[-1]["response"]["output"] == [events[-2]["item"]]


async def test_an_error_within_a_stream_is_its_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    browser = Browser(_SPECS, lambda _: InvalidInput("options.top_p", "is too late"))
    *_, last = await _events("So.", monkeypatch, browser)
    told = {"code": "invalid_input", "message": "top_p: is too late", "param": "top_p"}
    error = told | {"type": "invalid_request_error"}
    assert last == {**told, "type": "error", "error": error, "sequence_number": last["sequence_number"]}


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "store: false"),
        ({"previous_response_id": "resp_1"}, "send the whole conversation"),
        ({"conversation": {"id": "conv_1"}}, "send the whole conversation"),
    ],
)
async def test_what_is_stored_is_refused_with_advice(browser: Browser, given: dict[str, Any], advice: str) -> None:
    _, body = await browser.post("/v1/responses", {"input": "a", **given})
    assert advice in body["error"]["message"]


async def test_a_choice_of_tools_is_as_in_a_chat() -> None:
    browser = _writer('{"at": 1}')
    asked = {"input": "a", "tools": [_LOOK]}
    choice = {"type": "function", "name": "look"}
    _, body = await browser.post("/v1/responses", asked | {"tool_choice": choice})
    assert json.loads(browser.inputs[0].text_generation.options.json_schema) == _SCHEMA
    assert (body["tool_choice"], body["output"][0]["arguments"]) == (choice, '{"at": 1}')
    await browser.post("/v1/responses", asked | {"tool_choice": "required"})
    assert json.loads(browser.inputs[1].text_generation.options.json_schema)["minItems"] == 1
    _, body = await browser.post("/v1/responses", asked | {"tool_choice": "none"})
    assert not browser.inputs[2].text_generation.tools
    assert (body["tool_choice"], [item["type"] for item in body["output"]]) == ("none", ["message"])


async def test_calls_and_their_outputs_are_messages_of_a_chat() -> None:
    text = f"So.\n<tool_call>{_CALL}</tool_call><tool_call>{_CALL}</tool_call>"
    browser = _writer(text)
    _, body = await browser.post("/v1/responses", {"input": "Look.", "tools": [_LOOK]})
    ids = [call["call_id"] for call in body["output"][1:]]
    outputs = [
        {"type": "function_call_output", "call_id": ids[0], "output": "dark"},
        {"type": "function_call_output", "call_id": ids[1], "output": [{"type": "input_text", "text": "light"}]},
    ]
    alone = {"type": "function_call", "call_id": "1", "name": "wait", "arguments": "none"}
    given = [{"role": "user", "content": "Look."}, *body["output"], *outputs, alone]
    status, _ = await browser.post("/v1/responses", {"input": given, "tools": [_LOOK]})
    assert status == 200
    said = browser.inputs[1].text_generation.messages
    expected = [("user", "Look."), ("assistant", "So."), ("tool", "dark"), ("tool", "light"), ("assistant", "")]
    assert [(message.role, message.content) for message in said] == expected
    look = {"name": "look", "arguments": {"at": 1}}
    calls = [{"type": "function", "id": id, "function": look} for id in ids]
    wait = {"type": "function", "id": "1", "function": {"name": "wait", "arguments": "none"}}
    assert [json.loads(message.fields or "{}") for message in said] == [
        {},
        {"tool_calls": calls},
        {"tool_call_id": ids[0]},
        {"tool_call_id": ids[1]},
        {"tool_calls": [wait], "content": None},
    ]


@pytest.mark.parametrize(
    ("given", "field", "expected"),
    [
        ({"input": "a"}, "messages[0].content", "input"),
        ({"input": "a", "instructions": "i"}, "messages[0].content", "instructions"),
        ({"input": "a", "instructions": "i"}, "messages[1].content", "input"),
        ({"input": [_ASKED, *_CALLS, _DARK, _ASKED], "instructions": "i"}, "messages[1].role", "input[0].role"),
        ({"input": [_ASKED, *_CALLS, _DARK, _ASKED], "instructions": "i"}, "messages[2]", "input[1]"),
        ({"input": [_ASKED, *_CALLS, _DARK, _ASKED], "instructions": "i"}, "messages[3].content", "input[3].output"),
        ({"input": [_ASKED, *_CALLS, _DARK, _ASKED]}, "messages[3].content", "input[4].content"),
        ({"input": [_ASKED]}, "messages", "input"),
    ],
)
async def test_an_error_of_a_message_names_the_callers_item(given: dict[str, Any], field: str, expected: str) -> None:
    browser = Browser(_SPECS, lambda _: InvalidInput(field, "is wrong"))
    status, body = await browser.post("/v1/responses", given)
    assert (status, body["error"]["param"], body["error"]["message"]) == (400, expected, f"{expected}: is wrong")


async def test_wrong_parameters_of_a_forced_call_are_named() -> None:
    spec = model_spec("text_generation", name="writer", chat_template="{{ tools }}")
    browser = Browser([spec], lambda _: InvalidInput("options.json_schema", "is wrong"))
    asked = {"input": "a", "tools": [_WAIT, _LOOK]}
    for choice, field in (("required", "tools"), ({"type": "function", "name": "look"}, "tools[1].parameters")):
        status, body = await browser.post("/v1/responses", asked | {"tool_choice": choice})
        assert (status, body["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "name": "n", "description": "d", "strict": True, "schema": {"type": "object"}},
    ],
    ids=lambda form: form["type"],
)
async def test_the_form_of_the_text_comes_back_as_given(browser: Browser, form: dict[str, Any]) -> None:
    _, body = await browser.post("/v1/responses", {"input": "a", "text": {"format": form}})
    assert body["text"] == {"format": form}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"input": []}, "input: has 0 elements, the minimum is 1"),
        ({"tools": [{**_WAIT, "parameters": {"type": "array"}}]}, 'tools[0].parameters: must have the type "object"'),
    ],
)
async def test_a_refusal_says_what_is_wrong(browser: Browser, given: dict[str, Any], problem: str) -> None:
    status, body = await browser.post("/v1/responses", {"input": "a", **given})
    assert (status, body["error"]["message"]) == (400, problem)


async def test_a_text_that_reached_its_limit_is_incomplete(browser: Browser) -> None:
    _, body = await browser.post("/v1/responses", {"input": "a", "max_output_tokens": 1})
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


_F = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"metadata": {"a": 1}}, "metadata.a"),
        # Fields of chats, which change their texts.
        ({"seed": 1}, "seed"),
        ({"stop": ["."]}, "stop"),
        ({"max_tokens": 9}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"messages": []}, "messages"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [_F, {"type": "web_search"}]}, "tools[1].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),  # as in a chat
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [_F], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [_F], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [_F], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "tool_choice"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}, "include"),
        ({"reasoning": {"effort": "much", "summary": None}}, "reasoning.effort"),
        ({"reasoning": {"context": "all"}}, "reasoning.context"),
        ({"text": {"format": {"type": "text", "schema": {"type": "object"}}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}]},
            "input[0].output[0].type",
        ),
        ({"temperature": 1.5}, "temperature"),
    ],
)
async def test_what_is_not_here_is_refused_by_its_name(browser: Browser, given: dict[str, Any], field: str) -> None:
    status, body = await browser.post("/v1/responses", {"input": "a", **given})
    assert (status, body["error"]["param"]) == (400, field)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_writes_no_texts_is_refused_with_tools_as_without(stream: bool) -> None:
    refusing = Browser(
        [model_spec("text_classification", name="labels")], lambda given: InvalidInput("model", "is wrong")
    )
    asked = {"model": "labels", "input": "a", "tools": [_LOOK], "stream": stream}
    status, body = await refusing.post("/v1/responses", asked)
    assert (status, body["error"]["message"]) == (400, "model: is wrong")


async def test_efforts_and_verbosity_are_variables_of_the_template(browser: Browser) -> None:
    given = {"input": "a", "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}}
    assert (await browser.post("/v1/responses", given))[0] == 200
    arguments = json.loads(browser.inputs[0].text_generation.template_arguments)
    assert arguments == {"reasoning_effort": "low", "verbosity": "low"}


async def test_a_refusal_of_the_history_is_a_text(browser: Browser) -> None:
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"role": "user", "content": "b"},
    ]
    assert (await browser.post("/v1/responses", {"input": said}))[0] == 200
    assert [message.content for message in browser.inputs[0].text_generation.messages] == ["a", "I cannot.", "b"]


async def test_a_schema_with_a_json_object_is_its_form(browser: Browser) -> None:
    form = {"type": "json_object", "schema": {"type": "object"}}
    assert (await browser.post("/v1/responses", {"input": "a", "text": {"format": form}}))[0] == 200
    assert browser.inputs[0].text_generation.options == GenerationOptions(json_schema='{"type": "object"}')


async def test_tools_that_are_allowed_are_those_that_may_be_called(browser: Browser) -> None:
    tools = [_WAIT, {**_WAIT, "name": "other"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    given = {"input": "a", "tools": tools, "tool_choice": choice}
    assert (await browser.post("/v1/responses", given))[0] == 200
    asked = browser.inputs[0].text_generation
    assert [load["function"]["name"] for load in json.loads(asked.tools)] == [tool["name"] for tool in tools]
    calls = json.loads(asked.options.json_schema)["items"]["anyOf"]
    assert [call["properties"]["name"]["const"] for call in calls] == ["other"]
    choice["tools"] = [{"type": "function", "name": "none"}]
    status, body = await browser.post("/v1/responses", given)
    assert (status, body["error"]["param"]) == (400, "tool_choice.tools")


async def test_tokens_of_a_conversation_are_counted_without_an_answer() -> None:
    def answer(input: TaskInput) -> TaskResult:
        assert [message.content for message in input.tokenization.chat.messages] == ["b", "a"]
        return TaskResult(tokenization=TokenizationResult(chat_tokens=7))

    browser, body = Browser(_SPECS, answer), {"input": "a", "instructions": "b"}
    status, counted = await browser.post("/v1/responses/input_tokens", body)
    assert (status, counted) == (200, {"object": "response.input_tokens", "input_tokens": 7})
    status, refused = await browser.post("/v1/responses/input_tokens", body | {"previous_response_id": "r"})
    assert (status, refused["error"]["param"]) == (400, "previous_response_id")
