"""doors/http/openai_text.py: the reasoning of chats. Its other rules are in the tests of the forms of generation."""

import json
from typing import Any

import pytest

from neuronpipe import __version__
from neuronpipe.api.v1.inference_pb2 import GenerateStart
from neuronpipe.api.v1.tasks_pb2 import FinishReason, TaskInput, TaskResult, TokenLogprob, TopLogprob
from neuronpipe.gateway.requests import GeneratedPart
from tests.unit.doors.http.written_pipeline import Browser, parts_of
from tests.unit.model_specs import model_spec
from tests.unit.task_messages import task_result

_TEMPLATE = "{%- if enable_thinking is false %}<think>\n\n</think>\n\n{%- endif %}"
_THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour."
_CHAT = {"messages": [{"role": "user", "content": "a"}]}


def _browser(
    text: str = _THOUGHT,
    *,
    template: str = _TEMPLATE,
    opens: tuple[str, ...] = (),
    read: list[str] | None = None,
    **fields: Any,
) -> Browser:
    result = task_result(text_generation={"sequences": [{"text": text, **fields}]})

    def answer(input: TaskInput) -> TaskResult:
        return result

    facts: dict[str, Any] = {"chat_template": template, "opens_reasoning": opens}
    facts |= {} if read is None else {"read_variables": read}
    browser = Browser([model_spec("text_generation", **facts)], answer)
    browser.pipeline.parts = parts_of(text)
    return browser


async def _chunks(browser: Browser, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    _, events = await browser.post(path, body | {"stream": True})
    return [json.loads(line[6:]) for line in events.decode().splitlines() if line.startswith("data: {")]


async def _said(browser: Browser, **fields: Any) -> tuple[str | None, str | None]:
    """The reasoning and the content of an answer, which are the same whole and as events."""
    status, answer = await browser.post("/v1/chat/completions", _CHAT | fields)
    assert status == 200
    message = answer["choices"][0]["message"]
    chunks = await _chunks(browser, "/v1/chat/completions", _CHAT | fields)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
    return message.get("reasoning_content"), message["content"]


async def test_a_chat_has_its_reasoning_beside_the_answer() -> None:
    assert await _said(_browser()) == ("Two and two.", "Four.")
    assert await _said(_browser("Four.")) == (None, "Four.")
    assert await _said(_browser(template="no marks")) == (None, _THOUGHT)
    assert await _said(_browser("<think>\nTwo")) == ("Two", None)


@pytest.mark.parametrize(
    ("opens", "fields", "is_open"),
    [
        (("default", "on"), {}, True),
        (("default", "on"), {"chat_template_kwargs": {"enable_thinking": False}}, False),
        (("default", "on"), {"reasoning_effort": "none"}, False),
        (("default", "on"), {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
        (("default", "on"), {"reasoning_effort": "high"}, True),
        (("default", "on"), {"continue_final_message": True, "add_generation_prompt": False}, False),
        (("on",), {}, False),
        (("on",), {"chat_template_kwargs": {"thinking": True}}, True),
        (("default", "on", "off"), {"response_format": {"type": "json_object"}}, False),
    ],
    ids=str,
)
async def test_a_template_may_open_the_reasoning(opens: tuple[str, ...], fields: dict[str, Any], is_open: bool) -> None:
    text = "Two and two.\n</think>\n\nFour."
    expected = ("Two and two.", "Four.") if is_open else (None, text)
    assert await _said(_browser(text, opens=opens), **fields) == expected


@pytest.mark.parametrize(
    ("begun", "is_open"),
    [
        ("<think>\nLet me think", True),
        ("<think>a</think>b<think>", True),
        ("<think>a</think>\nIt is", False),
        ("It is", False),
    ],
)
async def test_an_answer_that_continues_a_reasoning_begins_with_reasoning(begun: str, is_open: bool) -> None:
    text = "Two and two.\n</think>\n\nFour."
    expected = ("Two and two.", "Four.") if is_open else (None, text)
    messages = [*_CHAT["messages"], {"role": "assistant", "content": [{"type": "text", "text": begun}]}]
    assert await _said(_browser(text), messages=messages, continue_final_message=True) == expected
    closed = await _said(_browser(text), messages=messages)
    assert closed == (None, text)


async def test_no_effort_turns_the_thinking_of_templates_off() -> None:
    browser = _browser()
    await browser.post("/v1/chat/completions", _CHAT | {"reasoning_effort": "none"})
    arguments = json.loads(browser.inputs[0].text_generation.template_arguments)
    assert arguments == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ({"finish_reason": "FINISH_REASON_STOP_STRING", "stop_string": "END"}, "END"),
        ({"finish_reason": "FINISH_REASON_END", "token_ids": [3, 7]}, 7),
        ({"finish_reason": "FINISH_REASON_END", "token_ids": [7, 2]}, None),
        ({"finish_reason": "FINISH_REASON_LENGTH", "token_ids": [3, 7]}, None),
    ],
    ids=str,
)
async def test_a_choice_names_the_stop_of_the_request_that_ended_its_text(ends: dict[str, Any], reason: Any) -> None:
    fields = _CHAT | {"stop": ["END"], "stop_token_ids": [7]}
    browser = _browser("Four.", **ends)
    _, whole = await browser.post("/v1/chat/completions", fields)
    _, events = await browser.post("/v1/chat/completions", fields | {"stream": True})
    last = json.loads(events.decode().splitlines()[-4].removeprefix("data: "))
    assert [answer["choices"][0].get("stop_reason") for answer in (whole, last)] == [reason, reason]


async def test_a_completion_without_new_tokens_scores_its_prompt() -> None:
    prompt = [{"token_id": 3, "text": "a", "utf8": b"a"}, {"token_id": 4, "text": " b", "utf8": b" b", "logprob": -1}]
    new = {"token_id": 5, "text": " c", "utf8": b" c", "logprob": -2}
    browser = _browser(" c", token_ids=[5], prompt_logprobs=prompt, logprobs=[new])
    asked = {"prompt": "a b", "max_tokens": 0, "logprobs": 0}
    _, answer = await browser.post("/v1/completions", asked | {"echo": True})
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == ("a b", "length", ["a", " b"])
    assert browser.inputs[0].text_generation.options.max_new_tokens == 1
    status, refused = await browser.post("/v1/completions", asked)
    assert (status, refused["error"]["param"]) == (400, "max_tokens")


_TOOLS = {"tools": [{"type": "function", "function": {"name": "look"}}]}
_CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [(_CALL[:-2], "stop"), (_CALL[:-1], "tool_calls"), (_CALL + "</tool_call>", "tool_calls"), ("Look.", "stop")],
)
async def test_a_stop_string_within_the_arguments_of_a_call_is_no_end_by_calls(text: str, reason: str) -> None:
    stopped = FinishReason.FINISH_REASON_STOP_STRING
    browser = _browser(text, template="{{ tools }}<tool_call>", finish_reason=stopped)
    _, answer = await browser.post("/v1/chat/completions", _CHAT | _TOOLS)
    assert answer["choices"][0]["finish_reason"] == reason
    chunks = await _chunks(browser, "/v1/chat/completions", _CHAT | _TOOLS)
    assert chunks[-1]["choices"][0]["finish_reason"] == reason


async def test_the_token_that_was_drawn_is_among_the_best_tokens_of_a_completion() -> None:
    best = TopLogprob(token_id=1, utf8=b"a", text="a", logprob=-0.5)
    drawn = TokenLogprob(token_id=2, utf8=b"b", text="b", logprob=-2, top=[best])
    alone = TokenLogprob(token_id=1, utf8=b"a", text="a", logprob=-0.5)
    chosen = TokenLogprob(token_id=1, utf8=b"a", text="a", logprob=-0.5, top=[best])
    same_text = TokenLogprob(token_id=3, utf8=b"a", text="a", logprob=-4, top=[best])
    browser = _browser("baaa", logprobs=[drawn, alone, chosen, same_text])
    _, answer = await browser.post("/v1/completions", {"prompt": "p", "logprobs": 1})
    expected = [{"a": -0.5, "b": -2}, {"a": -0.5}, {"a": -0.5}, {"a": -0.5, "token_id:3": -4}]
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == expected


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", _CHAT | {"n": 2}), ("/v1/completions", {"prompt": "a", "echo": True})]
)
async def test_the_first_chunk_tells_the_tokens_of_the_prompt(path: str, body: dict[str, Any]) -> None:
    browser = _browser()
    start = GenerateStart(model="small", version="1", prompt_tokens=5)
    browser.pipeline.parts = [start, GeneratedPart("a", [1])]
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = await _chunks(browser, path, body | usage)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks if chunk["choices"]} == {5}
    browser.pipeline.parts = []  # a result that was kept comes as a whole
    chunks = await _chunks(browser, path, body | usage)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks if chunk["choices"]} == {5}


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", _CHAT), ("/v1/completions", {"prompt": "a"})])
async def test_an_answer_has_the_fingerprint_of_the_version_that_made_it(path: str, body: dict[str, Any]) -> None:
    browser = _browser()
    browser.pipeline.parts = [GenerateStart(model="small", version="1", prompt_tokens=5), GeneratedPart("a", [1])]
    _, answer = await browser.post(path, body)
    chunks = await _chunks(browser, path, body)
    found = {written["system_fingerprint"] for written in (answer, *chunks)}
    assert found == {f"neuronpipe-{__version__}-1"}


_KWARGS = {"chat_template_kwargs": {"enable_thinking": False, "foo": 1}}


@pytest.mark.parametrize(
    ("path", "fields", "read", "ignored"),
    [
        ("/v1/chat/completions", _KWARGS, ["enable_thinking"], "chat_template_kwargs.foo"),
        ("/v1/chat/completions", _KWARGS, None, None),  # a bundle that does not say
        ("/v1/chat/completions", {"reasoning_effort": "high"}, ["enable_thinking"], "reasoning_effort"),
        ("/v1/chat/completions", {"reasoning_effort": "high"}, ["reasoning_effort"], None),
        ("/v1/chat/completions", {"reasoning_effort": "none"}, ["thinking"], None),
        ("/v1/chat/completions", {"reasoning_effort": "none", "verbosity": "low"}, [], "reasoning_effort, verbosity"),
        ("/v1/responses", {"reasoning": {"effort": "low"}}, [], "reasoning.effort"),
        ("/v1/responses", {"reasoning": {"effort": "none"}}, ["thinking"], None),
        ("/v1/responses", {"text": {"verbosity": "low"}}, ["reasoning_effort"], "text.verbosity"),
        ("/v1/responses", {"text": {"verbosity": "low"}}, ["verbosity"], None),
        ("/v1/messages", {"thinking": {"type": "enabled"}}, [], "thinking"),
        ("/v1/messages", {"thinking": {"type": "enabled"}}, ["enable_thinking"], None),
    ],
    ids=str,
)
async def test_a_field_whose_variable_the_template_does_not_read_is_named_as_ignored(
    path: str, fields: dict[str, Any], read: list[str] | None, ignored: str | None
) -> None:
    body: dict[str, Any] = {"input": "a"} if path == "/v1/responses" else _CHAT
    body = body | ({"max_tokens": 4} if path == "/v1/messages" else {}) | fields
    browser = _browser(read=read)
    assert (await browser.post(path, body))[0] == 200
    assert browser.headers.get("x-neuronpipe-ignored") == ignored
    status, _ = await browser.post(path, body, neuronpipe_strict="true")
    assert status == (400 if ignored else 200)


_FUNCTION = {"name": "look", "parametres": {}, "returned": {}}
_PARTS = [{"type": "text", "text": "a"}]


@pytest.mark.parametrize(
    ("messages", "tools", "ignored"),
    [
        ([{"role": "user", "content": "a", "contents": "b"}], [], "messages[0].contents"),
        ([{"role": "user", "content": _PARTS, "name": "n", "reasoning_content": "r", "mood": "m"}], [], None),
        ([{"role": "assistant", "content": "a", "annotations": [], "function_call": None, "audio": None}], [], None),
        (
            [{"role": "user", "content": "a"}],
            [{"type": "function", "foo": 1, "function": _FUNCTION}],
            "tools[0].foo, tools[0].function.parametres",
        ),
        ([{"role": "user", "content": "a"}], [{"type": "function", "function": {"name": "look"}}], None),
    ],
    ids=str,
)
async def test_unknown_fields_of_messages_and_tools_that_no_template_reads_are_named_as_ignored(
    messages: list[Any], tools: list[Any], ignored: str | None
) -> None:
    browser = _browser(template="{{ tools[0].function.returned }}{{ messages[0].mood }}")
    body = {"messages": messages} | ({"tools": tools} if tools else {})
    assert (await browser.post("/v1/chat/completions", body))[0] == 200
    assert browser.headers.get("x-neuronpipe-ignored") == ignored
    status, answer = await browser.post("/v1/chat/completions", body, neuronpipe_strict="true")
    assert status == (400 if ignored else 200)
    assert not ignored or answer["error"]["param"] == ignored.split(", ")[0]


@pytest.mark.parametrize("message", [{"role": "user", "contents": "a"}, {"role": "developer"}], ids=str)
async def test_a_message_of_the_user_and_of_the_system_needs_content(message: dict[str, Any]) -> None:
    messages = [{"role": "assistant", "refusal": "No."}, message]
    status, answer = await _browser().post("/v1/chat/completions", {"messages": messages})
    assert (status, answer["error"]["param"]) == (400, "messages[1].content")
    assert "is missing" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/v1/chat/completions", ("completion_tokens_details", "reasoning_tokens")),
        ("/v1/responses", ("output_tokens_details", "reasoning_tokens")),
        ("/v1/messages", ("output_tokens_details", "thinking_tokens")),
    ],
)
async def test_usage_has_the_tokens_of_the_reasoning(path: str, place: tuple[str, str]) -> None:
    # Of 36 characters, which are 12 tokens, 29 are the reasoning with its marks: 9.7 tokens.
    browser = _browser(token_ids=[1] * 12)
    body: dict[str, Any] = {"input": "a"} if path == "/v1/responses" else _CHAT
    body = body | ({"max_tokens": 4} if path == "/v1/messages" else {})
    _, answer = await browser.post(path, body)
    usage = {"stream_options": {"include_usage": True}} if path == "/v1/chat/completions" else {}
    chunks = await _chunks(browser, path, body | usage)
    ends = [chunk.get("response", chunk) for chunk in chunks]
    streamed = [end["usage"] for end in ends if place[0] in (end.get("usage") or ())]
    assert [used[place[0]][place[1]] for used in (answer["usage"], *streamed)] == [10, 10]


async def test_a_request_for_a_model_that_is_not_in_memory_is_left_to_the_pipeline() -> None:
    message = {"role": "user", "content": "a", "contents": "b"}
    form = {"response_format": {"type": "json_object"}, "verbosity": "low"}
    browser = _browser()
    await browser.post("/v1/chat/completions", {"messages": [message], "model": "asleep"} | form | _TOOLS)
    assert browser.pipeline.asked[0].model == "asleep"
    assert "x-neuronpipe-ignored" not in browser.headers


@pytest.mark.parametrize("arguments", ['{"a":"\\ud800"}', '{"a": NaN}', "{'a': 1}"])
async def test_arguments_that_no_template_can_have_stay_as_they_were_written(arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    browser = _browser()
    said = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "b"}]
    status, _ = await browser.post("/v1/chat/completions", {"messages": [*_CHAT["messages"], *said]})
    assert status == 200
    fields = json.loads(browser.inputs[0].text_generation.messages[1].fields)
    assert fields["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"guided_choice": []}, "guided_choice"), ({"structured_outputs": {"choice": []}}, "structured_outputs.choice")],
)
async def test_a_form_without_choices_is_refused(fields: dict[str, Any], field: str) -> None:
    status, refused = await _browser().post("/v1/chat/completions", _CHAT | fields)
    assert (status, refused["error"]["param"]) == (400, field)
