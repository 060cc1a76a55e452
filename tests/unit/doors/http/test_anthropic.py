"""doors/http/anthropic.py."""

import json
from typing import Any

import pytest

from neuronpipe.api.v1.inference_pb2 import GenerateStart
from neuronpipe.api.v1.tasks_pb2 import FinishReason, GeneratedText, TaskInput, TaskResult, TextGenerationResult
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, Overloaded
from tests.unit.doors.http.written_pipeline import Browser, parts_of
from tests.unit.model_specs import model_spec
from tests.unit.task_messages import task_result

_TEMPLATE = "<tool_call> <think></think>"
_TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {"at": {}}}}
_FORM = {"type": "json_schema", "schema": _TOOL["input_schema"]}
_CALL = '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'
_ASKED: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
_END = FinishReason.FINISH_REASON_END


def _browser(
    text: str = "Four.",
    reason: "FinishReason.ValueType" = _END,
    error: NeuronpipeError | None = None,
    stop_string: str = "",
    **facts: Any,
) -> Browser:
    token_ids = [1] * len(parts_of(text))
    generated = GeneratedText(text=text, token_ids=token_ids, finish_reason=reason, stop_string=stop_string)
    result = TextGenerationResult(sequences=[generated])

    def answer(input: TaskInput) -> TaskResult | NeuronpipeError:
        return error or TaskResult(text_generation=result)

    browser = Browser([model_spec("text_generation", **{"chat_template": _TEMPLATE} | facts)], answer)
    browser.pipeline.parts = [GenerateStart(prompt_tokens=5), *parts_of(text)]
    return browser


def _of_blocks(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": blocks}]}


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


async def test_the_stop_sequence_that_ended_the_text_is_named() -> None:
    message = await _answers(_browser(reason=FinishReason.FINISH_REASON_STOP_STRING, stop_string="\n"))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "\n")


async def test_blocks_become_messages_of_the_template() -> None:
    browser = _browser()
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What is up?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
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


async def test_consecutive_messages_of_a_role_are_one_turn() -> None:
    browser = _browser()
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "I look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "The sun."}]},
        {"role": "user", "content": "And?"},
    ]
    assert (await browser.post("/v1/messages", _ASKED | {"messages": messages}))[0] == 200
    said = browser.inputs[0].text_generation.messages
    expected = [("user", "a\nbc"), ("assistant", "I look."), ("tool", "The sun."), ("user", "And?")]
    assert [(message.role, message.content) for message in said] == expected
    assert len(json.loads(said[1].fields)["tool_calls"]) == 1


_NUL = "a\0"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"system": _NUL}, "system"),
        ({"system": [{"type": "text", "text": _NUL}]}, "system"),
        ({"messages": [{"role": "user", "content": _NUL}]}, "messages[0].content"),
        ({"messages": [*_ASKED["messages"], {"role": "user", "content": _NUL}]}, "messages[0] to messages[1]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": _NUL}]}]},
            "messages[0].content[0].content",
        ),
    ],
    ids=str,
)
async def test_an_error_of_a_message_has_the_path_of_its_text(fields: dict[str, Any], place: str) -> None:
    def answer(input: TaskInput) -> NeuronpipeError:
        chat = input.text_generation.messages
        [wrong] = [index for index, message in enumerate(chat) if "\0" in message.content]
        return InvalidInput(f"messages[{wrong}].content", "has the character NUL")

    browser = Browser([model_spec("text_generation", chat_template=_TEMPLATE)], answer)
    _, error = await browser.post("/v1/messages", _ASKED | fields)
    assert error["error"]["message"] == f"{place}: has the character NUL"


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


async def test_the_answer_to_a_reasoning_that_the_last_message_begins_is_reasoning() -> None:
    messages = [*_ASKED["messages"], {"role": "assistant", "content": "<think>\nLet me think"}]
    thinking, text = (await _answers(_browser(" about it.\n</think>\nFour."), messages=messages))["content"]
    assert (thinking["thinking"], text["text"]) == (" about it.", "Four.")


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


async def test_an_output_config_sets_the_form_of_the_text_and_the_effort() -> None:
    browser = _browser('{"at": "sky"}')
    config = {"format": _FORM, "effort": "max"}
    message = await _answers(browser, output_config=config, thinking={"type": "adaptive"})
    assert message["content"] == [{"type": "text", "text": '{"at": "sky"}'}]
    input = browser.inputs[0].text_generation
    assert json.loads(input.options.json_schema) == _FORM["schema"]
    variables = {"enable_thinking": True, "thinking": True, "reasoning_effort": "max"}
    assert json.loads(input.template_arguments) == variables
    status, refused = await browser.post("/v1/messages", _ASKED | {"output_config": config, "tools": [_TOOL]})
    assert status == 400
    assert refused["error"]["message"].startswith("tools and output_config.format: cannot be combined for this model; ")


async def test_half_a_surrogate_pair_in_the_arguments_of_a_call_harms_no_answer() -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": "\\ud800"}}</tool_call>'
    browser = _browser(call, chat_template="{{ tools }}<tool_call>")
    status, message = await browser.post("/v1/messages", _ASKED | {"tools": [_TOOL]})
    assert (status, message["content"][0]["input"]) == (200, {"at": "?"})


async def test_tokens_are_counted_without_an_answer_of_the_model() -> None:
    def answer(input: TaskInput) -> TaskResult:
        assert [message.content for message in input.tokenization.chat.messages] == ["b", "a"]
        return task_result(tokenization={"chat_tokens": 7})

    browser = Browser([model_spec("text_generation", chat_template=_TEMPLATE)], answer)
    status, counted = await browser.post("/v1/messages/count_tokens", {"messages": _ASKED["messages"], "system": "b"})
    assert (status, counted) == (200, {"input_tokens": 7})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens: is missing"),
        ({"messages": []}, "messages: has 0 elements, the minimum is 1"),
        (_of_blocks({"type": "image", "source": {}}), "messages[0].content[0]: images are not supported; send texts"),
        (
            _of_blocks({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "document", "source": {}}]}),
            "messages[0].content[0].content[0]: documents are not supported",
        ),
        (_of_blocks({"type": "search_result"}), "messages[0].content"),
        (_of_blocks({"type": "text", "text": "a", "foo": 1}), "messages[0].content[0].foo: is not supported"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: has an effect only with tools"),
        ({"tools": [_TOOL], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice.name: 'b' is not among"),
        ({"tools": [_TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: is missing"),
        ({"tools": [_TOOL], "tool_choice": {"type": "any", "name": "look"}}, "tool_choice.name: has an effect only"),
        (
            {"tools": [_TOOL], "tool_choice": {"type": "any"}, "output_config": {"format": _FORM}},
            "tool_choice: that forces a call cannot be combined",
        ),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: is missing"),
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


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_thread_is_refused_even_where_unknown_fields_are_ignored(path: str) -> None:
    headers = {"neuronpipe_strict": "false"}
    status, answer = await _browser().post(path, _ASKED | {"thread": {"type": "create"}}, **headers)
    advice = "thread: is not supported; send the whole conversation; tool_runner(thread=False)"
    assert (status, answer["error"]["message"]) == (400, advice)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"messages": []}], ids=str)
async def test_every_answer_has_the_id_of_its_request_where_anthropics_client_reads_it(fields: dict[str, Any]) -> None:
    browser = _browser()
    await browser.post("/v1/messages", _ASKED | fields, x_request_id="mine")
    assert (browser.headers["request-id"], browser.headers["x-request-id"]) == ("mine", "mine")
    await browser.get("/v1/models")
    assert "request-id" not in browser.headers


async def test_an_error_within_a_stream_is_an_event() -> None:
    browser = _browser(error=Overloaded("full", retry_after_s=1))
    _, events = await browser.post("/v1/messages", _ASKED | {"stream": True})
    assert events.decode().splitlines()[-3] == "event: error"
    assert json.loads(events.decode().splitlines()[-2][6:])["error"]["type"] == "rate_limit_error"
