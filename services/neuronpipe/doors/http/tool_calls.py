"""OpenAI's tools: the form of texts that must call a tool, and the calls in texts that come in parts."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from secrets import token_hex
from typing import Any, Self

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.parsing import check_depth
from neuronpipe.doors.http.call_formats import CallFormat, format_of, json_of, value_at, whole_call
from neuronpipe.doors.http.unknown_fields import ignore
from neuronpipe.tasks.text_options import CALL_MARKS, GenerationFacts, form_of

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_MARK, _MARK_IN_STRING = re.compile(r'["{}\[\]]'), re.compile(r'"|\\.', re.DOTALL)
_JSON_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
# The beginning of an object that may become a call when the rest of the text comes.
_JSON_BEGIN = re.compile(r'\{\s*(?:$|"(?:$|(?P<key>[^"\\]*)(?:$|"\s*(?:$|:\s*(?:$|(?:"(?P<value>[^"\\]*)")?)))))')
_CALL_KEYS = {"name", "arguments", "parameters", "type", "id", "function"}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A request's choice among its tools.

    - `mode`: none, auto or required; None for the usual mode.
    - `function`: the name of the function that the request chooses instead; None for no function.
    - `field`: the field that names functions.
    - `allowed`: names of the functions that may be called; empty for all functions.
    """

    mode: str | None = None
    function: str | None = None
    field: str = "tool_choice"
    allowed: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The use of tools by a request. `must_call`: a text consists of calls. `function`: the function that it must call.

    `has_several`: whether a text may have several calls. `allowed`: names of the functions that may be called; empty
    for all functions.
    """

    tools: Sequence[Mapping[str, Any]]
    must_call: bool = False
    function: str = ""
    has_several: bool = True
    allowed: Sequence[str] = ()

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, *, has_several: bool) -> Self:
        """Reads how a request uses tools. Raises InvalidInput."""
        must_call, function = choice.mode == "required", choice.function
        if not tools and (function is not None or must_call or choice.allowed):
            raise InvalidInput("tool_choice", "has an effect only with tools")
        if choice.mode == "none":
            return cls(())
        names = [tool["function"]["name"] for tool in tools]
        for name in choice.allowed if function is None else (function,):
            if name not in names:
                raise InvalidInput(choice.field, f"{name[:64]!r} is not among the tools")
        return cls(tools, must_call, function or "", has_several, choice.allowed)

    @property
    def functions(self) -> Sequence[Mapping[str, Any]]:
        """The functions that may be called."""
        functions = [tool["function"] for tool in self.tools]
        return [function for function in functions if not self.allowed or function["name"] in self.allowed]

    @property
    def for_template(self) -> str:
        """The tools as JSON."""
        return json.dumps(self.tools, ensure_ascii=False) if self.tools else ""

    def set_form(self, options: GenerationOptions, strict: str, form: str, facts: GenerationFacts | None) -> None:
        """Sets the form of a text that must call, or that may call instead of having a form. Raises InvalidInput.

        - `strict`: the path of the field in a tool. Arguments of calls without a form are as the model writes them:
          the header of ignored fields then names it.
        - `form`: the field that sets the form of words. Empty: the whole text has the form.
        """
        if schema := self.schema():
            if form_of(options):
                raise InvalidInput("tool_choice", "that forces a call cannot be combined with a form of the text")
            options.json_schema = json.dumps(schema, ensure_ascii=False)
            return
        if form and facts and self.tools and form_of(options):
            self._allow_calls(options, form, facts)
            return
        for index, tool in enumerate(self.tools):
            if tool["function"].get("strict"):
                ignore(f"tools[{index}].{strict}", "is for calls that tool_choice forces")

    def _allow_calls(self, options: GenerationOptions, form: str, facts: GenerationFacts) -> None:
        """Lets a text with a form be calls in the model's format instead. Raises InvalidInput."""
        marks = _call_marks(facts)
        if not marks or form_of(options) not in ("json_schema", "json_object"):
            problem = "cannot be combined for this model; set tool_choice to none, or leave out the form"
            raise InvalidInput(f"tools and {form}", problem)
        schema = _schema_of(options.json_schema or '{"type": "object"}', form)
        calls, defined = self._calls_by_schema()
        rules = [
            f"start: {'call+' if self.has_several else 'call'} | form",
            f"call: {marks[0]} SPACE json_call SPACE {marks[1]} SPACE",
            r"SPACE: /\s{0,2}/",
            f"json_call: %json {json.dumps({'anyOf': calls, '$defs': defined}, ensure_ascii=False)}",
            f"form: %json {json_of(schema)}",
        ]
        for name in ("json_schema", "json_object"):
            options.ClearField(name)
        options.grammar = "\n".join(rules)

    def fields(self, parameters: str, form: str) -> dict[str, str]:
        """Returns the name of the field that sets the form. `parameters`: the path of parameters in a tool. `form`: see
        `set_form`.
        """
        if not (self.must_call or self.function):
            return {"options.grammar": f"tools and {form}"} if form and self.tools else {}
        names = [self.function] if self.function else [function["name"] for function in self.functions]
        indices = [index for index, tool in enumerate(self.tools) if tool["function"]["name"] in names]
        # An error in the form of several functions does not tell which of them is wrong.
        return {"options.json_schema": f"tools[{indices[0]}].{parameters}" if len(indices) == 1 else "tools"}

    def schema(self) -> dict[str, Any] | None:
        """Returns the JSON Schema of texts that must call: arguments of the chosen function, or a list of calls."""
        if self.function:
            return self._arguments[self.function]
        if not self.must_call:
            return None
        calls, defined = self._calls_by_schema()
        one_call = {} if self.has_several else {"maxItems": 1}
        return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **one_call, "$defs": defined}

    def _calls_by_schema(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Returns the schemas of calls, one for each function, and the definitions to which they refer."""
        calls, defined = [], {}
        for number, (name, schema) in enumerate(self._arguments.items()):
            properties = {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{number}"}}
            call = {"type": "object", "properties": properties, "additionalProperties": False}
            calls.append(call | {"required": [*properties]})
            # Each schema is a document in which its own references are resolved. Older drafts lack such documents, or
            # have them only without a reference beside the name.
            defined[str(number)] = {"$id": f"https://{number}.invalid", **schema, "$schema": _DRAFT}
        return calls, defined

    @property
    def _arguments(self) -> dict[str, dict[str, Any]]:
        """The schemas of arguments, by the names of functions."""
        return {
            function["name"]: (function.get("parameters") or {}) | {"type": "object"} for function in self.functions
        }

    def reader(self, template: str) -> "CallReader":
        """Returns a reader for a text of a model with this template for chats."""
        return CallReader(self, format_of(template))


def _schema_of(text: str, form: str) -> Any:
    check_depth(form, text.encode())
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInput(form, "is no valid JSON") from error


def _call_marks(facts: GenerationFacts) -> tuple[str, str] | None:
    """Returns the marks around a call in JSON, as llguidance's grammars have them; None for another format."""
    form = format_of(facts.chat_template)
    if (*form.openings, form.closing) != CALL_MARKS or facts.call_mark_ids is None:
        return None
    opening, closing = [f"<[{mark_id}]>" for mark_id in facts.call_mark_ids] or map(json.dumps, CALL_MARKS)
    return opening, closing


class _Place(Enum):
    """The place in a text at which the rest that is not divided yet begins."""

    BEGINNING = auto()  # a call may begin, also without an opening
    WORDS = auto()
    ARGUMENTS = auto()
    AFTER_ARGUMENTS = auto()  # the JSON around the arguments
    AFTER_CHOSEN_CALL = auto()  # text means nothing


@dataclass(slots=True)
class _JsonPosition:
    """A position in the JSON of a call. `end_depth`: the depth after the end of the arguments, or of the JSON."""

    depth: int
    end_depth: int
    is_quoted: bool = False

    def advance(self, text: str, *, is_last: bool) -> tuple[int, bool]:
        """Moves behind the next end, or to the end of the text. Returns its length, and whether an end came."""
        at = 0
        while match := (_MARK_IN_STRING if self.is_quoted else _MARK).search(text, at):
            at, mark = match.end(), match[0]
            self.is_quoted ^= mark == '"'
            self.depth += (mark in ("{", "[")) - (mark in ("}", "]"))
            if self.depth == self.end_depth and mark in ("}", "]"):
                return at, True
        # An escape stays whole.
        return len(text) - (self.is_quoted and not is_last and text.endswith("\\", at)), False


class CallReader:
    """Divides a text that comes in parts into words and calls. The parts may be cut anywhere."""

    def __init__(self, use: ToolUse, form: CallFormat) -> None:
        self._use, self._form = use, form
        self._parameters = {function["name"]: function.get("parameters") or {} for function in use.functions}
        self._names = {*self._parameters}
        names = "|".join(re.escape(name) for name in sorted(self._names, key=len, reverse=True))
        # The id of a call may follow its name; the marks around the id are special tokens.
        self._name_head = re.compile(rf"({names})(?:[a-zA-Z0-9]{{9}})?\s*(?=\{{)")
        self._name_begin = re.compile(rf"(?:{names})[a-zA-Z0-9]{{0,9}}\s*$")
        self._call, self._end = re.compile(form.call.replace("NAMES", names), re.DOTALL), re.compile(form.end)
        openings = "|".join(re.escape(opening) for opening in form.openings)
        begin = rf"(?P<begin>(?:{openings})?[\s\[]*)"
        self._before_first = re.compile(rf"(?P<end>[\s,;\]]*){begin}")
        closing = rf"(?!{openings}){re.escape(form.closing)}" if form.closing else ""
        self._before_next = re.compile(rf"(?P<end>[\s,;\]]*(?:{closing})?[\s,;\]]*){begin}")
        self._rest = ""  # text that is not divided yet
        self._place = _Place.BEGINNING
        self._json = _JsonPosition(0, 0)  # the beginning of the rest in the current call
        self._calls = 0

    @property
    def ends_with_calls(self) -> bool:
        """Whether the model chose to call, and the last call is whole. As with OpenAI, calls of a function that the
        caller chose do not count.
        """
        return self._calls > 0 and not self._use.function and self._place is not _Place.ARGUMENTS

    def read(self, text: str, *, is_last: bool = False) -> Iterator[str | dict[str, Any]]:
        """Yields the words and the `tool_calls` as far as they are certain, in the form of OpenAI's streams.

        The arguments of a call stay as the model writes them.
        """
        if not self._names:
            yield from [text] if text else []
            return
        self._rest += text
        use = self._use
        for part in self._divide_rest(is_last=is_last):
            # Words of a text that must call are the beginning of a call that was cut.
            is_shown = not use.must_call if isinstance(part, str) else use.has_several or not part["index"]
            if is_shown:
                yield part

    def whole(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Splits a complete text into its words and its calls."""
        said, calls = "", list[dict[str, Any]]()
        for part in self.read(text, is_last=True):
            if isinstance(part, str):
                said += part
            elif "id" in part:
                calls.append({name: value for name, value in part.items() if name != "index"})
            else:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
        return said, calls

    def _divide_rest(self, *, is_last: bool) -> Iterator[str | dict[str, Any]]:
        if (function := self._use.function) and not self._calls and self._rest:
            yield self._begin_call(function, depth=0)
        before = None
        while self._rest and before != (now := (len(self._rest), self._place)):
            before = now
            match self._place:
                case _Place.ARGUMENTS:
                    if arguments := self._take_json(is_last=is_last):
                        yield self._delta({"function": {"arguments": arguments}})
                case _Place.AFTER_ARGUMENTS:
                    self._take_json(is_last=is_last)
                case _Place.AFTER_CHOSEN_CALL:
                    self._rest = ""
                case _Place.BEGINNING:
                    yield from self._read_beginning(is_last=is_last)
                case _Place.WORDS:
                    yield from self._read_words(is_last=is_last)

    def _read_beginning(self, *, is_last: bool) -> Iterator[str | dict[str, Any]]:
        """Divides a rest that may be a call, or text before a call."""
        before = (self._before_next if self._calls else self._before_first).match(self._rest)
        assert before  # noqa: S101 (it also matches an empty text)
        body, begin = self._rest[before.end() :], self._rest[before.end("end") :]
        head = _JSON_HEAD.match(body)
        if calls := self._take_marked_calls(begin, is_last=is_last):
            for name, arguments in calls:
                yield from self._write_call(name, arguments)
        elif calls is None:
            return
        elif head and head[1] in self._names:
            self._rest = body[head.end() :]
            yield self._begin_call(head[1], depth=1)
        elif self._form.has_name_first and (head := self._name_head.match(body)):
            self._rest = body[head.end() :]
            yield self._begin_call(head[1], depth=0)
        elif call := whole_call(body, self._names):
            name, arguments, end = call
            self._rest = body[end:]
            yield from self._write_call(name, arguments)
        elif is_last or not self._may_become_call(body, begin):
            self._place = _Place.WORDS
            said, self._rest = before["begin"] if self._calls else before[0], body
            if said:
                yield said

    def _write_call(self, name: str, arguments: str) -> Iterator[dict[str, Any]]:
        yield self._begin_call(name, depth=0)
        yield self._delta({"function": {"arguments": arguments}})
        self._place = _Place.BEGINNING

    def _take_marked_calls(self, begin: str, *, is_last: bool) -> list[tuple[str, str]] | None:
        """Takes the calls in the form of `call` that begin the text: names, arguments. None: the end is to come."""
        opening = next((opening for opening in self._form.openings if begin.startswith(opening)), "")
        if not self._form.call or not opening or begin[len(opening) :].lstrip().startswith(("{", "[")):
            return []
        end = self._end.search(begin, len(opening))
        if not end and not is_last:
            return None
        text = begin[: end.end()] if end else begin
        calls = self._form.calls_of(match, self._parameters) if (match := self._call.fullmatch(text)) else []
        if calls:
            self._rest = begin[len(text) :]
        return calls

    def _may_become_call(self, body: str, begin: str) -> bool:
        """Returns whether more text can make a call of the body. `begin`: the body with the marks before its JSON."""
        if not body or any(tag.startswith(begin) for tag in (*self._form.openings, self._form.closing)):
            return True
        if self._form.has_name_first and (self._name_begin.match(body) or _begins_any(body, self._names)):
            return True
        if not (match := _JSON_BEGIN.match(body)) or value_at(body):
            return False
        key, is_whole_key = match["key"], match.end("key") < len(body)
        if key == "name" and match["value"] is not None:
            return match["value"] in self._names
        return key is None or (key in _CALL_KEYS if is_whole_key else _begins_any(key, _CALL_KEYS))

    def _read_words(self, *, is_last: bool) -> Iterator[str]:
        """Yields the text up to the next opening, without the white space before it."""
        openings, text = self._form.openings, self._rest
        end = len(text)
        if found := [at for opening in openings if (at := text.find(opening)) >= 0]:
            self._place, end = _Place.BEGINNING, len(text[: min(found)].rstrip())
        elif openings and not is_last:
            sizes = range(min(len(text), max(map(len, openings)) - 1), 0, -1)
            begun = next((size for size in sizes if _begins_any(text[-size:], openings)), 0)
            end = len(text[: end - begun].rstrip())
        self._rest = text[end:]
        if end:
            yield text[:end]

    def _take_json(self, *, is_last: bool) -> str:
        """Takes JSON of the current call, at most up to the end of the arguments or of the JSON around them."""
        end, is_found = self._json.advance(self._rest, is_last=is_last)
        taken, self._rest = self._rest[:end], self._rest[end:]
        if is_found and self._json.depth:
            self._place, self._json.end_depth = _Place.AFTER_ARGUMENTS, 0
        elif is_found:
            self._place = _Place.AFTER_CHOSEN_CALL if self._use.function else _Place.BEGINNING
        return taken

    def _begin_call(self, name: str, *, depth: int) -> dict[str, Any]:
        """Returns the head of a call whose arguments begin within `depth` braces."""
        self._calls += 1
        self._place, self._json = _Place.ARGUMENTS, _JsonPosition(depth, depth)
        length = self._form.id_length
        id = token_hex(12)[:length] if length else f"call_{token_hex(12)}"
        return self._delta({"id": id, "type": "function", "function": {"name": name, "arguments": ""}})

    def _delta(self, call: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._calls - 1, **call}


def _begins_any(beginning: str, words: Iterable[str]) -> bool:
    return any(word.startswith(beginning) for word in words)
