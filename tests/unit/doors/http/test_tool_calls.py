"""Calls of tools are found in the forms in which models write them, and nothing else is taken for one."""

import json
import random
from typing import Any, TypeAlias

import jsonschema
import pytest

from neuronpipe.api.v1.tasks_pb2 import GeneratedText, TaskResult, TextGenerationResult
from neuronpipe.doors.http.tool_calls import CallReader, ToolUse
from tests.unit.doors.http.written_pipeline import Browser
from tests.unit.model_specs import model_spec

_PLACE = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}},
    "required": ["place"],
    "$defs": {"Place": {"enum": ["here", "there"]}},
}
_FIELDS = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "is_new": {"type": "boolean"},
    "due": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "tree": {"type": ["object", "array"]},
}
_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "parameters": _PLACE}},
    {"type": "function", "function": {"name": "wait"}},
    {"type": "function", "function": {"name": "note", "parameters": {"type": "object", "properties": _FIELDS}}},
]
_LOOK, _WAIT = ("look", '{"place": "here"}'), ("wait", "{}")
_LOOK_JSON, _WAIT_JSON = '{"name": "look", "arguments": {"place": "here"}}', '{"name": "wait", "arguments": {}}'
_TEMPLATES = {
    "hermes": "{{ '<tool_call>' }}",
    "llama": "{{ '<|python_tag|>' }}",
    "mistral": "{{ '[TOOL_CALLS]' }}",
    "qwen": "{{ '<tool_call><function=' }}",
    "glm": "{{ '<tool_call><arg_key>' }}",
    "deepseek": "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' }}",
    "harmony": "{{ '<|channel|>' }}",
    "gemma": "{{ '<start_of_turn>' }}",
    "json": "",
}
_HERMES_LOOK = f"<tool_call>{_LOOK_JSON}</tool_call>"
_HARD = '{"a": "}]\\"{\\\\", "b": [{"c": {}}]}'
_SAID = 'He said: "go\\n".\n  </b> {"a": [1'
_NOTE = ("note", json.dumps({"text": _SAID, "count": 5, "is_new": True, "due": None, "tree": {"a": [{"b": "]}"}]}}))
_PYTHON_NOTE = f"note(text={_SAID!r}, count=5, is_new=True, due=None, tree={{'a': [{{'b': ']}}'}}]}})"
_NOTE_VALUES = {"text": _SAID, "count": "5", "is_new": "true", "due": "null", "tree": '{"a": [{"b": "]}"}]}'}
_XML_NOTE = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in _NOTE_VALUES.items())
_GLM_NOTE = "".join(
    f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in _NOTE_VALUES.items()
)
_XML_LOOK = "<tool_call>\n<function=look>\n<parameter=place>\nhere\n</parameter>\n</function>\n</tool_call>"
_GLM_LOOK = "<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>here</arg_value>\n</tool_call>"
_FENCED_LOOK = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"place": "here"}\n```<｜tool▁call▁end｜>'
_FENCED_LOOKS = f"<｜tool▁calls▁begin｜>{_FENCED_LOOK}\n{_FENCED_LOOK}<｜tool▁calls▁end｜>"
_CHANNEL_LOOK = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"place": "here"}'


def _reader(template: str, **use: Any) -> CallReader:
    return ToolUse(_TOOLS, **use).reader(_TEMPLATES.get(template, ""))


def _calls(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in found]


_Case: TypeAlias = tuple[str, str, str, list[tuple[str, str]]]


def _without_calls(template: str, *texts: str) -> list[_Case]:
    """Texts that say all that is in them."""
    return [(template, text, text, []) for text in texts]


def _noted(parameters: str) -> str:
    return f"<tool_call><function=note>{parameters}</function></tool_call>"


# A format, a text in it, what it says, and its calls.
_TEXTS: list[_Case] = [
    ("hermes", '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>', "", [_LOOK]),
    ("hermes", f"So.\n{_HERMES_LOOK}\n<tool_call>{_WAIT_JSON}</tool_call>\nDone.", "So.Done.", [_LOOK, _WAIT]),
    ("hermes", '<tool_call>{"name": "wait", "arguments": {}}', "", [_WAIT]),
    ("hermes", '<tool_call>{"arguments": {"place": "here"}, "name": "look"}</tool_call>', "", [_LOOK]),
    # Where its tags are special tokens, which no text has.
    ("hermes", '\n{"name": "wait", "arguments": {}}\n', "", [_WAIT]),
    ("hermes", '<tool_call>{"name": "wait", "arguments": ' + _HARD + "}</tool_call>", "", [("wait", _HARD)]),
    *_without_calls("hermes", "a\n<tool_call>nothing</tool_call> b", "<tool_call><tool_call>x", "A < b <tool> c\n"),
    ("llama", ' {"name": "look", "parameters": {"place": "here"}}', "", [_LOOK]),
    (
        "llama",
        '<|python_tag|>{"type": "function", "name": "wait", "parameters": {}}; {"name": "look", "parameters": '
        '{"place": "here"}}',
        "",
        [_WAIT, _LOOK],
    ),
    ("llama", '{"name": "wait", "parameters": {"s": ["cut", "sh', "", [("wait", '{"s": ["cut", "sh')]),
    ("llama", '{"name": "wait", "parameters": {"s": "cut\\', "", [("wait", '{"s": "cut\\')]),
    ("mistral", '[TOOL_CALLS][{"name": "wait", "arguments": {}, "id": "123456789"}]', "", [_WAIT]),
    ("mistral", f"[{_LOOK_JSON}, {_WAIT_JSON}]", "", [_LOOK, _WAIT]),
    ("mistral", 'look{"place": "here"}wait123456abc{}', "", [_LOOK, _WAIT]),
    ("mistral", "look{", "", [("look", "{")]),
    *_without_calls("mistral", "wait, look here", "loo"),
    ("json", '[{"name": "look", "arguments": {"place": "here"}}, {"name": "wait"}]', "", [_LOOK, _WAIT]),
    # As structured output writes it.
    (
        "json",
        '[  { \t"name" :"look" \t, \t"arguments"  :{"place": "here"} }\t ,  { "name"\t :  "wait" ,"arguments" :{}  } ]',
        "",
        [_LOOK, _WAIT],
    ),
    ("json", '{"type" : "function" , "function" : {"name" : "wait" , "arguments" : {} } }', "", [_WAIT]),
    ("json", '{"type": "function", "function": {"name": "wait", "arguments": {}}}', "", [_WAIT]),
    ("json", '{"name": "wait"} and more', "and more", [_WAIT]),
    *_without_calls("json", "", " \n", "Hello.", 'look{"place": "here"}', "{}", "[1, 2]\n", "[" * 5000),
    *_without_calls("json", '{"name": "sing", "arguments": {}}', '{"name": "wait", "arguments": 3}', '{"name": "wa'),
    *_without_calls("json", '{"answer": {"name": "wait"}}', '{"name": ["wait"]}', '{"name": ' * 5000),
]

# The same for the forms of calls that are read when they end.
_MARKED: list[_Case] = [
    ("qwen", f"So.\n\n{_XML_LOOK}\n{_XML_LOOK}\nDone.", "So.Done.", [_LOOK, _LOOK]),
    ("qwen", f"<tool_call>\n<function=note>\n{_XML_NOTE}</function>\n</tool_call>", "", [_NOTE]),
    ("qwen", "<function=wait></function></tool_call>", "", [_WAIT]),
    ("qwen", _noted("<parameter=text>a</parameter>b</parameter>"), "", [("note", '{"text": "a</parameter>b"}')]),
    (
        "qwen",
        _noted("<parameter=count>many</parameter><parameter=is_new>False</parameter><parameter=more>[1]</parameter>"),
        "",
        [("note", '{"count": "many", "is_new": false, "more": [1]}')],
    ),
    ("qwen", _noted("<parameter=tree>NaN</parameter>"), "", [("note", '{"tree": "NaN"}')]),
    ("qwen", '<tool_call>{"name": "wait", "arguments": {}}</tool_call>', "", [_WAIT]),
    *_without_calls("qwen", _XML_LOOK[:-30], "a <tool_call><function=sing></function></tool_call> b"),
    *_without_calls("qwen", "<function=look><parameter=place>here</function> and <function"),
    ("glm", f"So.\n{_GLM_LOOK}\n{_GLM_LOOK} Done.", "So.Done.", [_LOOK, _LOOK]),
    ("glm", f"<tool_call>note{_GLM_NOTE}\n</tool_call>", "", [_NOTE]),
    ("glm", "<tool_call>look<arg_key>place</arg_key><arg_value>here</arg_value></tool_call>", "", [_LOOK]),
    ("glm", "<tool_call>wait</tool_call><tool_call>wait\n</tool_call>", "", [_WAIT, _WAIT]),
    *_without_calls("glm", _GLM_LOOK[:-4], "<tool_call>looks</tool_call>"),
    *_without_calls("glm", "<tool_call>look\n<arg_key>place</arg_key>here</tool_call>"),
    ("deepseek", f"So.\n{_FENCED_LOOKS}Done.", "So.Done.", [_LOOK, _LOOK]),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>wait<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>note<｜tool▁sep｜>{_NOTE[1]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [_WAIT, _NOTE],
    ),
    *_without_calls("deepseek", f"<｜tool▁calls▁begin｜>{_FENCED_LOOK[:-20]}"),
    *_without_calls("deepseek", "<｜tool▁call▁begin｜>wait<｜tool▁sep｜>{a}<｜tool▁call▁end｜>"),
    ("harmony", _CHANNEL_LOOK, "", [_LOOK]),
    (
        "harmony",
        f"So.<|start|>assistant{_CHANNEL_LOOK}<|call|><|start|>assistant to=functions.note<|channel|>"
        f"commentary json<|message|>{_NOTE[1]}<|call|> Done.",
        "So.Done.",
        [_LOOK, _NOTE],
    ),
    # Where its tags are special tokens, which no text has.
    ("harmony", 'commentary to=functions.look json{"place": "here"}', "", [_LOOK]),
    *_without_calls("harmony", _CHANNEL_LOOK[:-1], "commentary to=functions.sing json{}<|call|>"),
    ("gemma", 'So.\n```tool_code\nprint(api.look(place="here"))\nwait()\n```\nDone.', "So.Done.", [_LOOK, _WAIT]),
    ("gemma", f"```tool_code\n{_PYTHON_NOTE}\n```\n```tool_code\nwait()\n```", "", [_NOTE, _WAIT]),
    (
        "gemma",
        f'```json\n[{{"name": "note", "parameters": {_NOTE[1]}}}, {{"name": "wait"}}]\n```\nDone.',
        "Done.",
        [_NOTE, _WAIT],
    ),
    ("gemma", '```tool_call\n{"name": "wait", "arguments": {}}\n```', "", [_WAIT]),
    *_without_calls("gemma", "```json\n[1, 2]\n``` and `a`", "```tool_code\nlook(place=here())\n```"),
    *_without_calls("gemma", '```tool_code\nlook("here")\n```', '```tool_code\nlook(place="he'),
    # Half a surrogate pair, which no answer could be sent with, stays an escape; NaN is no JSON.
    (
        "hermes",
        r'<tool_call>{"arguments": {"place": "\ud83d"}, "name": "look"}</tool_call>',
        "",
        [("look", r'{"place": "\ud83d"}')],
    ),
    *_without_calls("json", '{"arguments": {"place": NaN}, "name": "look"}'),
]
_TEXTS += _MARKED


@pytest.mark.parametrize(("template", "text", "said", "calls"), _TEXTS, ids=lambda value: str(value)[:40])
def test_calls_are_read_in_forms_of_models(template: str, text: str, said: str, calls: list[tuple[str, str]]) -> None:
    found_text, found = _reader(template).whole(text)
    assert (found_text, _calls(found)) == (said, calls)


@pytest.mark.parametrize(("template", "text", "said", "calls"), _TEXTS, ids=lambda value: str(value)[:40])
def test_calls_are_told_as_they_come_however_the_text_is_cut(
    template: str, text: str, said: str, calls: list[tuple[str, str]]
) -> None:
    chance = random.Random(text)
    for most in (1, 3, 20):
        reader, parts, rest = _reader(template), list[Any](), text[:400]
        while rest:
            size = chance.randint(1, most)
            parts += reader.read(rest[:size])
            rest = rest[size:]
        parts += reader.read(text[400:], is_last=True)
        assert "" not in parts
        assert "".join(part for part in parts if isinstance(part, str)) == said
        found = list[list[str]]()
        for part in parts:
            if isinstance(part, dict) and "id" in part:
                assert part == {
                    "index": len(found),
                    "id": part["id"],
                    "type": "function",
                    "function": {"name": part["function"]["name"], "arguments": ""},
                }
                found.append([part["function"]["name"], ""])
            elif isinstance(part, dict):
                assert [*part] == ["index", "function"]
                assert part["index"] == len(found) - 1
                found[-1][1] += part["function"]["arguments"]
        assert [tuple(call) for call in found] == calls


@pytest.mark.parametrize(("template", "text", "said", "calls"), _MARKED, ids=lambda value: str(value)[:40])
def test_marked_calls_may_be_cut_anywhere(template: str, text: str, said: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([*text], *([text[:size], text[size:]] for size in range(1, len(text)))):
        reader = _reader(template)
        parts = [part for piece in pieces for part in reader.read(piece)] + [*reader.read("", is_last=True)]
        assert "".join(part for part in parts if isinstance(part, str)) == said
        found = list[list[str]]()
        for part in parts:
            if isinstance(part, dict) and "id" in part:
                found.append([part["function"]["name"], ""])
            elif isinstance(part, dict):
                found[part["index"]][1] += part["function"]["arguments"]
        assert [tuple(call) for call in found] == calls


def test_texts_and_arguments_do_not_wait_for_their_end() -> None:
    reader = _reader("hermes")
    assert [*reader.read("Let me see. <tool")] == ["Let me see."]
    assert [*reader.read('_call>{"name": "look", "arguments"')] == []
    begin, arguments = reader.read(': {"place": "he')
    assert begin["function"] == {"name": "look", "arguments": ""}  # type: ignore[index]
    assert arguments == {"index": 0, "function": {"arguments": '{"place": "he'}}
    assert [*reader.read('re"}}\n</tool_call>')] == [{"index": 0, "function": {"arguments": 're"}'}}]
    qwen = _reader("qwen")
    assert [*qwen.read("Let me see.\n<tool_call>\n<function=look>\n<parameter=")] == ["Let me see."]
    assert [*qwen.read("place>\nhere\n</parameter>\n")] == []
    assert len([*qwen.read("</function>")]) == 2
    plain = _reader("json")
    assert [*plain.read('{"answer": 4')] == ['{"answer": 4']


def test_ids_are_those_that_the_template_takes() -> None:
    for template, length in (("mistral", 9), ("hermes", 29)):
        _, found = _reader(template).whole('[{"name": "wait", "arguments": {}}, {"name": "wait", "arguments": {}}]')
        assert len({call["id"] for call in found}) == 2
        assert {len(call["id"]) for call in found} == {length}
    assert found[0]["id"].startswith("call_")


def test_a_text_that_must_call_is_a_list_of_calls() -> None:
    schema = ToolUse(_TOOLS, must_call=True).schema()
    look = {"name": "look", "arguments": {"place": "there"}}
    jsonschema.validate([look, {"name": "wait", "arguments": {}}], schema)
    for wrong in ([], [{"name": "look", "arguments": {"place": "up"}}], [{"name": "sing", "arguments": {}}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    single = ToolUse(_TOOLS, must_call=True, has_several=False)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([look, look], single.schema())
    said, found = single.reader("").whole(json.dumps([look, look]))
    assert (said, _calls(found)) == ("", [("look", '{"place": "there"}')])


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/definitions/A", "definitions": {"A": _PLACE | {"properties": {"place": {"const": "there"}}}}},
        {"properties": {"place": {"$ref": "#it"}}, "$defs": {"A": {"$anchor": "it", "const": "there"}}},
        {
            "$id": "https://a.example/x",
            "properties": {"place": {"$ref": "#/$defs/A"}},
            "$defs": {"A": {"const": "there"}},
        },
        {"properties": {"place": {"const": {"$ref": "#/$defs/A"}}}},
        {"type": ["object", "null"], "properties": {"place": {"const": "there"}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("draft", ["http://json-schema.org/draft-07/schema#", None])
def test_arguments_of_a_list_of_calls_are_valid_by_their_schema(parameters: dict[str, Any], draft: str | None) -> None:
    given = parameters | ({"$schema": draft} if draft else {}) | {"required": ["place"]}
    tools = [*_TOOLS, {"type": "function", "function": {"name": "go", "parameters": given}}]
    schema = ToolUse(tools, must_call=True).schema()
    place = parameters.get("properties", {}).get("place", {}).get("const", "there")
    jsonschema.validate([{"name": "go", "arguments": {"place": place}}], schema)
    for wrong in ({"place": "here"}, None):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([{"name": "go", "arguments": wrong}], schema)


@pytest.mark.parametrize("text", ["", "[", '[{"na', '[{"name": "look", "arguments": ', "[ \n "])
def test_a_text_that_must_call_says_nothing_where_it_was_cut(text: str) -> None:
    reader = ToolUse(_TOOLS, must_call=True).reader("")
    assert reader.whole(text) == ("", [])
    reader = ToolUse(_TOOLS, must_call=True).reader("")
    said, found = reader.whole('[{"name": "wait", "arguments": {}}, {  "name": "wait", \t')
    assert (said, _calls(found)) == ("", [_WAIT])


def test_the_text_of_a_chosen_function_is_its_arguments() -> None:
    use = ToolUse(_TOOLS, function="look")
    assert use.schema() == _PLACE
    for text in ('{"place": "here"}', '{"place": "he'):
        said, found = use.reader("").whole(text)
        assert (said, _calls(found)) == ("", [("look", text)])
    assert ToolUse(_TOOLS, function="wait").schema() == {"type": "object"}
    assert ToolUse(_TOOLS).schema() is None


_STRICT = {"name": "look", "strict": True}


@pytest.mark.parametrize(
    ("path", "body", "forced", "ignored"),
    [
        (
            "/v1/chat/completions",
            {"tools": [_TOOLS[1], {"type": "function", "function": _STRICT}]},
            {"tool_choice": "required"},
            "tools[1].function.strict",
        ),
        ("/v1/responses", {"tools": [{"type": "function", **_STRICT}]}, {"tool_choice": "required"}, "tools[0].strict"),
        ("/v1/messages", {"max_tokens": 4, "tools": [_STRICT]}, {"tool_choice": {"type": "any"}}, "tools[0].strict"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_strict_is_named_as_ignored_unless_calls_are_forced(
    path: str, body: dict[str, Any], forced: dict[str, Any], ignored: str
) -> None:
    result = TaskResult(text_generation=TextGenerationResult(sequences=[GeneratedText(text="[]")]))
    browser = Browser([model_spec("text_generation", chat_template="{{ tools }}")], lambda _: result)
    said = [{"role": "user", "content": "a"}]
    body |= {"input": "a"} if path == "/v1/responses" else {"messages": said}
    assert (await browser.post(path, body))[0] == 200
    assert browser.headers["x-neuronpipe-ignored"] == ignored
    assert (await browser.post(path, body | forced))[0] == 200
    assert "x-neuronpipe-ignored" not in browser.headers
    status, _ = await browser.post(path, body, neuronpipe_strict="true")
    assert status == 400


_FORM = {"type": "object", "properties": {"a": {"type": "integer"}}}
_RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": _FORM}}
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "tools": _TOOLS[:2]}
_RESPONSE: dict[str, Any] = {"input": "a", "tools": [{"type": "function", **tool["function"]} for tool in _TOOLS[:2]]}
_FORMAT = {"type": "json_schema", "name": "n", "schema": _FORM}
_WITH_FORM = [
    ("/v1/chat/completions", _CHAT | {"response_format": _RESPONSE_FORMAT}, "tools and response_format"),
    ("/v1/responses", _RESPONSE | {"text": {"format": _FORMAT}}, "tools and text.format"),
]


def _hermes(mark_ids: tuple[int, ...] | None = (), template: str = "{{ tools }}<tool_call>") -> Browser:
    call = GeneratedText(text='<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>')
    result = TaskResult(text_generation=TextGenerationResult(sequences=[call]))
    return Browser([model_spec("text_generation", chat_template=template, call_mark_ids=mark_ids)], lambda _: result)


@pytest.mark.parametrize(("path", "body", "field"), _WITH_FORM, ids=["chat", "response"])
@pytest.mark.parametrize("mark_ids", [(), (7, 8)])
async def test_a_text_with_a_form_may_call_instead(
    path: str, body: dict[str, Any], field: str, mark_ids: tuple[int, ...]
) -> None:
    browser = _hermes(mark_ids)
    status, answer = await browser.post(path, body)
    assert status == 200
    options = browser.inputs[0].text_generation.options
    marks = [f"<[{mark}]>" for mark in mark_ids] or ['"<tool_call>"', '"</tool_call>"']
    assert f"call: {marks[0]} SPACE json_call SPACE {marks[1]} SPACE" in options.grammar
    assert f"form: %json {json.dumps(_FORM)}" in options.grammar
    assert not options.json_schema
    written = json.dumps(answer)
    assert '"wait"' in written
    assert "<tool_call>" not in written


@pytest.mark.parametrize(("path", "body", "field"), _WITH_FORM, ids=["chat", "response"])
async def test_tools_and_a_form_are_refused_together_for_other_formats_of_calls(
    path: str, body: dict[str, Any], field: str
) -> None:
    for browser in (_hermes(None), _hermes(template="{{ tools }}[TOOL_CALLS]"), _hermes(template="{{ tools }}")):
        status, answer = await browser.post(path, body)
        assert (status, answer["error"]["param"]) == (400, field)
        assert (await browser.post(path, body | {"tool_choice": "none"}))[0] == 200
        assert browser.inputs[-1].text_generation.options.json_schema == json.dumps(_FORM)
