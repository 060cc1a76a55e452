"""doors/http/anthropic.py."""

import json
from typing import Any

import pytest

from neuronpipe.api.v1.inference_pb2 import GenerateStart
from neuronpipe.api.v1.tasks_pb2 import FinishReason, GeneratedText, TaskInput, TaskResult, TextGenerationResult
from neuronpipe.core.errors import NeuronpipeError, Overloaded
from tests.unit.doors.http.written_pipeline import Browser, parts_of
from tests.unit.model_specs import model_spec

_TEMPLATE = "<tool_call> <think></think>"
_TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {"at": {}}}}
_CALL = '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'
_ASKED: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
_END = FinishReason.FINISH_REASON_END


def _browser(
    text: str = "Four.", reason: "FinishReason.ValueType" = _END, error: NeuronpipeError | None = None, **facts: Any
) -> Browser:
    result = TextGenerationResult(
        sequences=[GeneratedText(text=text, token_ids=[1] * len(parts_of(text)), finish_reason=reason)]
    )

    def answer(input: TaskInput) -> TaskResult | NeuronpipeError:
        return error or TaskResult(text_generation=result)

    browser = Browser([model_spec("text_generation", **{"chat_template": _TEMPLATE} | facts)], answer)
    browser.pipeline.parts = [GenerateStart(prompt_tokens=5), *parts_of(text)]
    return browser


async def _answers(browser: Browser, **fields: Any) -> dict[str, Any]:
    """The message, which is the same whole and as events."""
    status, message = await browser.post("/v1/messages", _ASKED | fields, x_request_id="r")
    assert status == 200
    _, written = await browser.post("/v1/messages", _ASKED | fields | {"stream": True}, x_request_id="r")
    lines = written.decode().splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in events]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    streamed = events[0]["message"]
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(streamed["content"])
            streamed["content"].append(event["content_block"])
            block, pieces = event["content_block"], ""
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            pieces += event["delta"]["partial_json"]
            block["input"] = json.loads(pieces) if pieces.count("{") == pieces.count("}") > 0 else {}
        elif event["type"] == "content_block_delta":
            block[block["type"]] += event["delta"][block["type"]]
    streamed |= events[-2]["delta"]
    streamed["usage"] |= events[-2]["usage"]
    message["usage"].pop("output_tokens")
    streamed["usage"].pop("output_tokens")
    for block in (*message["content"], *streamed["content"]):
        assert ("id" in block) == (block["type"] == "tool_use")
        block.pop("id", None)
    assert streamed == message
    return dict(message)


async def test_a_text_is_a_message() -> None:
    assert await _answers(_browser()) == {
        "id": "msg_r",
        "type": "message",
        "role": "assistant",
        "model": "small",
        "content": [{"type": "text", "text": "Four."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens_details": {"thinking_tokens": 0}},
    }


async def test_reasoning_text_and_calls_are_blocks() -> None:
    message = await _answers(_browser(f"<think>\nHm.\n</think>\n\nI look. {_CALL}"), tools=[_TOOL])
    thinking, text, call = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "I look."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "look", {"at": "sky"})
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("reason", "stop_reason"),
    [
        (FinishReason.FINISH_REASON_LENGTH, "max_tokens"),
        (FinishReason.FINISH_REASON_STOP_STRING, "stop_sequence"),
        (_END, "end_turn"),
    ],
)
async def test_the_reason_for_the_end_has_anthropics_word(reason: "FinishReason.ValueType", stop_reason: str) -> None:
    assert (await _answers(_browser(reason=reason)))["stop_reason"] == stop_reason


async def test_blocks_become_messages_of_the_template() -> None:
    browser = _browser()
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What is up?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "1", "name": "look", "input": {"at": "sky"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "The sun."}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    options = {"temperature": 0.5, "top_k": 3, "stop_sequences": ["."], "thinking": {"type": "disabled"}}
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    asked = _ASKED | {"messages": messages, "system": system, "tools": [_TOOL]} | options
    assert (await browser.post("/v1/messages", asked))[0] == 200
    assert browser.headers["x-neuronpipe-ignored"] == "cache_control, signature"
    input = browser.inputs[0].text_generation
    assert [(message.role, message.content) for message in input.messages] == [
        ("system", "Be brief."),
        ("user", "What is up?"),
        ("assistant", "I look."),
        ("tool", "The sun."),
        ("user", "And?"),
    ]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    assert json.loads(input.messages[2].fields) == {"tool_calls": [call], "reasoning_content": "Hm."}
    assert json.loads(input.messages[3].fields) == {"tool_call_id": "1"}
    function = {"name": "look", "description": "Looks.", "parameters": _TOOL["input_schema"]}
    assert json.loads(input.tools) == [{"type": "function", "function": function}]
    assert json.loads(input.template_arguments) == {"enable_thinking": False, "thinking": False}
    assert (input.options.max_new_tokens, input.options.do_sample, list(input.options.stop_strings)) == (9, True, ["."])
    assert not input.continue_final_message


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]], ids=str)
async def test_an_empty_message_is_still_a_message(content: object) -> None:
    browser = _browser()
    assert (await browser.post("/v1/messages", _ASKED | {"messages": [{"role": "user", "content": content}]}))[0] == 200
    assert [message.role for message in browser.inputs[0].text_generation.messages] == ["user"]


async def test_the_answer_continues_the_last_message_of_the_assistant() -> None:
    browser = _browser()
    messages = [*_ASKED["messages"], {"role": "assistant", "content": "It is"}]
    await browser.post("/v1/messages", _ASKED | {"messages": messages})
    assert browser.inputs[0].text_generation.continue_final_message


@pytest.mark.parametrize(
    ("choice", "schema"),
    [({"type": "auto"}, ""), ({"type": "tool", "name": "look"}, json.dumps(_TOOL["input_schema"]))],
    ids=str,
)
async def test_a_choice_may_force_a_call(choice: dict[str, str], schema: str) -> None:
    browser = _browser('{"at": "sky"}')
    _, message = await browser.post("/v1/messages", _ASKED | {"tools": [_TOOL], "tool_choice": choice})
    assert browser.inputs[0].text_generation.options.json_schema == schema
    assert (message["content"][0]["type"] == "tool_use") == bool(schema)


async def test_tokens_are_counted_as_the_model_reads_them() -> None:
    browser = _browser()
    status, answer = await browser.post("/v1/messages/count_tokens", {"messages": _ASKED["messages"], "system": "b"})
    assert (status, answer) == (200, {"input_tokens": 5})
    assert browser.inputs[0].text_generation.options.max_new_tokens == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens: field required"),
        ({"messages": []}, "messages: list should have at least 1 item"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: has an effect only with tools"),
        ({"tools": [_TOOL], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice.name: 'b' is not among"),
        ({"mcp_servers": []}, "mcp_servers: is not supported"),
        ({"model": "other"}, "other"),
    ],
    ids=str,
)
async def test_an_error_has_anthropics_form(fields: dict[str, Any], message: str) -> None:
    status, answer = await _browser().post("/v1/messages", _ASKED | fields)
    kind = "not_found_error" if fields.get("model") else "invalid_request_error"
    assert (status, answer["type"], answer["error"]["type"]) == (404 if fields.get("model") else 400, "error", kind)
    assert message in answer["error"]["message"]


async def test_an_error_within_a_stream_is_an_event() -> None:
    browser = _browser(error=Overloaded("full", retry_after_s=1))
    _, events = await browser.post("/v1/messages", _ASKED | {"stream": True})
    assert events.decode().splitlines()[-3] == "event: error"
    assert json.loads(events.decode().splitlines()[-2][6:])["error"]["type"] == "rate_limit_error"
