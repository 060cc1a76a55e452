"""doors/http/openai_text.py: the reasoning of chats. Its other rules are in the tests of the forms of generation."""

import json
from typing import Any

import pytest

from neuronpipe.api.v1.tasks_pb2 import GeneratedText, TaskInput, TaskResult, TextGenerationResult
from tests.unit.doors.http.written_pipeline import Browser, parts_of
from tests.unit.model_specs import model_spec

_TEMPLATE = "{%- if enable_thinking is false %}<think>\n\n</think>\n\n{%- endif %}"
_THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour."
_CHAT = {"messages": [{"role": "user", "content": "a"}]}


def _browser(text: str = _THOUGHT, *, template: str = _TEMPLATE, opens: tuple[str, ...] = (), **ends: Any) -> Browser:
    result = TaskResult(text_generation=TextGenerationResult(sequences=[GeneratedText(text=text, **ends)]))

    def answer(input: TaskInput) -> TaskResult:
        return result

    browser = Browser([model_spec("text_generation", chat_template=template, opens_reasoning=opens)], answer)
    browser.pipeline.parts = parts_of(text)
    return browser


async def _said(browser: Browser, **fields: Any) -> tuple[str | None, str | None]:
    """The reasoning and the content of an answer, which are the same whole and as events."""
    status, answer = await browser.post("/v1/chat/completions", _CHAT | fields)
    assert status == 200
    message = answer["choices"][0]["message"]
    _, events = await browser.post("/v1/chat/completions", _CHAT | fields | {"stream": True})
    chunks = [json.loads(line[6:]) for line in events.decode().splitlines() if line.startswith("data: {")]
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
