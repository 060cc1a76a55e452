"""doors/http/reasoning.py."""

from typing import Any

import pytest

from neuronpipe.doors.http.reasoning import AnswerReader, ReasoningText
from neuronpipe.doors.http.tool_calls import ToolUse

_MARKS = ("<think>", "</think>")
_TOOL = {"type": "function", "function": {"name": "look"}}


def _reader(*, is_open: bool = False, tools: bool = False) -> AnswerReader:
    return AnswerReader(ToolUse([_TOOL] if tools else ()).reader("<tool_call>"), _MARKS, begun="" if is_open else None)


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "answer"),
    [
        ("<think>\nTwo and two.\n\nFour?\n</think>\n\nFour.\n", False, "Two and two.\n\nFour?", "Four.\n"),
        ("\n <think>a</think>b", False, "a", "b"),
        ("<think>\n\n</think>\n\nb", False, "", "b"),
        ("\na\n</think>\n\nb", True, "a", "b"),
        (" b </think> c", False, "", " b </think> c"),  # no reasoning is open
        ("b <think>c</think>", False, "", "b <think>c</think>"),
        ("<think>a < b </ c </thin", False, "a < b </ c </thin", ""),  # cut within the reasoning
        ("a </think>", True, "a", ""),
        ("<thin", False, "", "<thin"),
        ("", True, "", ""),
        ("<think>a</think>b</think>", False, "a", "b</think>"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_reasoning_is_divided_from_the_answer_wherever_the_parts_are_cut(
    text: str, is_open: bool, reasoning: str, answer: str, size: int
) -> None:
    assert _reader(is_open=is_open).whole(text) == (reasoning, answer, [])
    reader = _reader(is_open=is_open)
    parts: list[Any] = []
    for at in range(0, len(text), size):
        parts += reader.read(text[at : at + size])
    parts += reader.read("", is_last=True)
    assert "".join(part for part in parts if isinstance(part, ReasoningText)) == reasoning
    assert "".join(part for part in parts if not isinstance(part, ReasoningText)) == answer
    assert all(parts)


def test_reasoning_comes_as_it_is_written() -> None:
    reader = _reader()
    assert [*reader.read("<think>\nOne")] == ["One"]
    assert [*reader.read(" two ")] == [" two"]
    assert [*reader.read("three</thi")] == [" three"]
    assert [*reader.read("s</think>")] == ["</this"]
    assert [*reader.read("\n\nFour")] == ["Four"]


def test_calls_behind_the_reasoning_are_read_and_calls_within_it_are_not() -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    reader = _reader(tools=True)
    reasoning, said, calls = reader.whole(f"<think>I could {call}</think>\n\nI look. {call}")
    assert (reasoning, said) == (f"I could {call}", "I look.")
    assert [call["function"] for call in calls] == [{"name": "look", "arguments": "{}"}]
    assert reader.ends_with_calls


def test_a_model_without_marks_has_no_reasoning() -> None:
    text = " <think>a</think>b"
    assert AnswerReader(ToolUse(()).reader("")).whole(text) == ("", text, [])


@pytest.mark.parametrize(
    ("parts", "end_id", "is_open", "expected"),
    [
        # A mark of its own, 9, is the fourth token.
        ([("<think>", [1]), ("\nTwo", [2, 3]), ("</think>", [9]), ("\n\nFour", [4, 5])], 9, False, 4),
        ([("Two", [2, 3]), ("</think>Four", [9, 4])], 9, True, 3),
        ([("Two", [2, 3])], 9, True, 2),  # cut within the reasoning
        ([("Four", [2, 3])], 9, False, 0),
        ([("Four", [2, 9])], 9, False, 0),  # the mark of a text without reasoning
        # Reasoning with its marks has 20 of 40 characters, so half of the 10 tokens.
        ([("<think>Two..", [1, 2, 3]), ("</think>" + 20 * "a", [4, 5, 6, 7, 8, 9, 10])], None, False, 5),
    ],
)
def test_tokens_of_the_reasoning_are_counted_however_the_parts_are_cut(
    parts: list[tuple[str, list[int]]], end_id: int | None, is_open: bool, expected: int
) -> None:
    def reader() -> AnswerReader:
        return AnswerReader(ToolUse(()).reader(""), _MARKS, begun="" if is_open else None, end_id=end_id)

    streamed, whole = reader(), reader()
    for text, token_ids in parts:
        streamed.count(token_ids)
        list(streamed.read(text))
    list(streamed.read("", is_last=True))
    whole.count([token_id for _, token_ids in parts for token_id in token_ids])
    whole.whole("".join(text for text, _ in parts))
    assert streamed.reasoning_tokens == whole.reasoning_tokens == expected
