"""Calls of tools are found in the forms in which models write them, and nothing else is taken for one."""

import json
from typing import Any

import jsonschema
import pytest

from neuronpipe.doors.http.tool_calls import ToolUse

_PLACE = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}},
    "required": ["place"],
    "$defs": {"Place": {"enum": ["here", "there"]}},
}
_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "parameters": _PLACE}},
    {"type": "function", "function": {"name": "wait"}},
]
_LOOK, _WAIT = ("look", '{"place": "here"}'), ("wait", "{}")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello.", "Hello.", []),
        ('<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>', "", [_LOOK]),
        (
            'So.\n<tool_call>{"name": "look", "arguments": {"place": "here"}}</tool_call>\n'
            '<tool_call>{"name": "wait", "arguments": {}}</tool_call>',
            "So.",
            [_LOOK, _WAIT],
        ),
        ('<tool_call>{"name": "wait", "arguments": {}}', "", [_WAIT]),
        (' {"name": "look", "parameters": {"place": "here"}}', "", [_LOOK]),
        ('[{"name": "look", "arguments": {"place": "here"}}, {"name": "wait"}]', "", [_LOOK, _WAIT]),
        ('{"name": "sing", "arguments": {}}', '{"name": "sing", "arguments": {}}', []),
        ('{"name": "wait", "arguments": 3}', '{"name": "wait", "arguments": 3}', []),
        ('{"name": "wait"} and more', '{"name": "wait"} and more', []),
        ('[{"name": "wait"}, 3]', '[{"name": "wait"}, 3]', []),
        ("<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
        ("[" * 5000, "[" * 5000, []),
        ("", "", []),
    ],
    ids=lambda value: str(value)[:40],
)
def test_calls_are_read_in_the_forms_of_models(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert ToolUse(_TOOLS).read(text) == (content, calls)


def test_a_text_that_must_call_is_a_list_of_calls() -> None:
    schema = ToolUse(_TOOLS, must_call=True).schema()
    look = {"name": "look", "arguments": {"place": "there"}}
    jsonschema.validate([look, {"name": "wait", "arguments": {}}], schema)
    for wrong in ([], [{"name": "look", "arguments": {"place": "up"}}], [{"name": "sing", "arguments": {}}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    one = ToolUse(_TOOLS, must_call=True, has_several=False)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([look, look], one.schema())
    assert one.read(json.dumps([look, look])) == ("", [("look", '{"place": "there"}')])


def test_the_text_of_a_chosen_function_is_its_arguments() -> None:
    use = ToolUse(_TOOLS, function="look")
    assert use.schema() == _PLACE
    assert use.read('{"place": "here"}') == ("", [("look", '{"place": "here"}')])
    assert use.read('{"place": "he') == ('{"place": "he', [])
    assert ToolUse(_TOOLS, function="wait").schema() == {"type": "object"}
    assert ToolUse(_TOOLS).schema() is None
