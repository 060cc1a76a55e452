"""OpenAI's tools: the form of texts that must call one, and calls found in texts as they come."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Self

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.errors import InvalidInput
from neuronpipe.tasks.text_generation import form_of

_DECODER = json.JSONDecoder()
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_MARK, _MARK_IN_STRING = re.compile(r'["{}\[\]]'), re.compile(r'"|\\.', re.DOTALL)
_JSON_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
# The beginning of an object, as far as it is there, that may still be a call.
_JSON_BEGIN = re.compile(r'\{\s*(?:$|"(?:$|(?P<key>[^"\\]*)(?:$|"\s*(?:$|:\s*(?:$|(?:"(?P<value>[^"\\]*)")?)))))')
_CALL_KEYS = {"name", "arguments", "parameters", "type", "id", "function"}


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls: JSON with a tool's name and its arguments or parameters.

    `opening`, `closing`: before and after a call. Where they are special tokens, no text has them: so JSON that begins
    a text, or follows a call, is a call in every format, and lists of calls are calls. `has_name_first`: a call may
    also be a name with an object behind it. `id_length`: of the ids of calls that the template takes; 0: any.
    """

    opening: str = ""
    closing: str = ""
    has_name_first: bool = False
    id_length: int = 0


# By what the template of a model says. The first one is the format of Hermes and Qwen.
_FORMATS = {
    "<tool_call>": CallFormat("<tool_call>", "</tool_call>"),
    "[TOOL_CALLS]": CallFormat("[TOOL_CALLS]", has_name_first=True, id_length=9),
    "<|python_tag|>": CallFormat("<|python_tag|>"),  # Llama 3
}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request uses tools. `must_call`: a text is nothing but calls. `function`: the only one that may be called.

    `has_several`: whether a text may have several calls. `allowed`: the names of those that may be called; none: all.
    """

    tools: Sequence[Mapping[str, Any]]
    must_call: bool = False
    function: str = ""
    has_several: bool = True
    allowed: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        tools: Sequence[Mapping[str, Any]],
        choice: str | None,
        chosen: str | None,
        field: str,
        has_several: bool,
        allowed: Sequence[str] = (),
    ) -> Self:
        """The use by a request's `tool_choice`: none, auto or required, or else a function that is `chosen` by its name
        in this field. Raises InvalidInput.
        """
        if not tools and (chosen is not None or choice == "required" or allowed):
            raise InvalidInput("tool_choice", "has an effect only with tools")
        if choice == "none":
            return cls(())
        names = [one["function"]["name"] for one in tools]
        for name in allowed if chosen is None else (chosen,):
            if name not in names:
                raise InvalidInput(field, f"{name[:64]!r} is not among the tools")
        return cls(tools, choice == "required", chosen or "", has_several, allowed)

    @property
    def functions(self) -> Sequence[Mapping[str, Any]]:
        """The functions that may be called."""
        every = [one["function"] for one in self.tools]
        return [one for one in every if not self.allowed or one["name"] in self.allowed]

    @property
    def for_template(self) -> str:
        """The tools as JSON."""
        return json.dumps(self.tools, ensure_ascii=False) if self.tools else ""

    def force(self, options: GenerationOptions) -> None:
        """Gives a text that must call its form. Raises InvalidInput."""
        if schema := self.schema():
            if form_of(options):
                raise InvalidInput("tool_choice", "that forces a call cannot be combined with a form of the text")
            options.json_schema = json.dumps(schema, ensure_ascii=False)

    def fields(self, parameters: str) -> dict[str, str]:
        """The name of the field that forces the form. `parameters`: its name in a tool."""
        if not (self.must_call or self.function):
            return {}
        names = [one["function"]["name"] for one in self.tools]
        wanted = [self.function] if self.function else [one["name"] for one in self.functions]
        places = [place for place, name in enumerate(names) if name in wanted]
        # Of several functions, whose is wrong is not known.
        return {"options.json_schema": f"tools[{places[0]}].{parameters}" if len(places) == 1 else "tools"}

    def schema(self) -> dict[str, Any] | None:
        """The JSON Schema of texts that must call: the arguments of the one function, or a list of calls."""
        arguments = {one["name"]: (one.get("parameters") or {}) | {"type": "object"} for one in self.functions}
        if self.function:
            return arguments[self.function]
        if not self.must_call:
            return None
        calls, defined = [], {}
        for number, (name, schema) in enumerate(arguments.items()):
            properties = {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{number}"}}
            calls.append({"type": "object", "properties": properties, "additionalProperties": False})
            calls[-1]["required"] = [*properties]
            # A document of its own, in which its references are resolved. Older drafts know no such documents, or only
            # without a reference beside the name.
            defined[str(number)] = {"$id": f"https://{number}.invalid", **schema, "$schema": _DRAFT}
        most = {} if self.has_several else {"maxItems": 1}
        return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, "$defs": defined}

    def reader(self, template: str) -> "CallReader":
        """Reads a text of a model with this template for chats."""
        form = next((form for word, form in _FORMATS.items() if word in template), CallFormat())
        return CallReader(self, form)


class CallReader:
    """Divides a text that comes in parts into what it says and its calls. The parts may be cut anywhere."""

    def __init__(self, use: ToolUse, form: CallFormat) -> None:
        self._function, self._must_call, self._has_several = use.function, use.must_call, use.has_several
        self._form = form
        self._names = {one["name"] for one in use.functions}
        names = "|".join(re.escape(name) for name in sorted(self._names, key=len, reverse=True))
        # The id of a call may be behind its name, whose own marks are special tokens.
        self._name_head = re.compile(rf"({names})(?:[a-zA-Z0-9]{{9}})?\s*(?=\{{)")
        self._name_begin = re.compile(rf"(?:{names})[a-zA-Z0-9]{{0,9}}\s*$")
        self._before = re.compile(
            rf"(?P<end>\s*(?:{re.escape(form.closing)})?[\s,;\]]*)(?P<begin>(?:{re.escape(form.opening)})?[\s\[]*)"
        )
        self._rest = ""  # what is not told yet
        self._may_begin = True  # whether a call without an opening may begin here
        self._calls = 0
        self._depth = 0  # in JSON of a call: open braces before the rest
        self._base = 0  # of these, those before the arguments
        self._is_quoted = self._has_arguments = False

    @property
    def ends_with_calls(self) -> bool:
        """Whether the model has chosen to call: not a function that the caller chose, as OpenAI has it."""
        return self._calls > 0 and not self._function

    def read(self, text: str, *, is_last: bool = False) -> Iterator[str | dict[str, Any]]:
        """The parts that are now known: of what is said, and of `tool_calls` as OpenAI's streams have them.

        The arguments of a call are as the model writes them.
        """
        if not self._names:
            yield from [text] if text else []
            return
        self._rest += text
        for part in self._parts(is_last=is_last):
            # What is said where the text must call is the beginning of a call that was cut.
            is_told = not self._must_call if isinstance(part, str) else self._has_several or not part["index"]
            if is_told:
                yield part

    def whole(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """What a whole text says, and its calls."""
        said, calls = "", list[dict[str, Any]]()
        for part in self.read(text, is_last=True):
            if isinstance(part, str):
                said += part
            elif "id" in part:
                calls.append({name: value for name, value in part.items() if name != "index"})
            else:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
        return said, calls

    def _parts(self, *, is_last: bool) -> Iterator[str | dict[str, Any]]:
        if self._function and not self._calls and self._rest:
            yield self._begun(self._function, base=0)
        before = None
        while self._rest and before != (now := (len(self._rest), self._may_begin, self._has_arguments)):
            before = now
            if self._has_arguments:
                arguments, self._has_arguments = self._taken(self._base, is_last=is_last)
                if arguments:
                    yield self._called(arguments)
            elif self._depth:  # what else is in the JSON of the call
                self._taken(0, is_last=is_last)
            elif self._function:
                self._rest = ""
            elif self._may_begin:
                yield from self._at_begin(is_last=is_last)
            else:
                yield from self._said(is_last=is_last)

    def _at_begin(self, *, is_last: bool) -> Iterator[str | dict[str, Any]]:
        """Where the rest may be a call, or what stands before one."""
        before = self._before.match(self._rest)
        assert before  # noqa: S101 (it matches an empty text, too)
        body = self._rest[before.end() :]
        head = _JSON_HEAD.match(body)
        if head and head[1] in self._names:
            self._rest = body[head.end() :]
            yield self._begun(head[1], base=1)
        elif self._form.has_name_first and (head := self._name_head.match(body)):
            self._rest = body[head.end() :]
            yield self._begun(head[1], base=0)
        elif call := _whole_call(body, self._names):
            name, arguments, end = call
            self._rest = body[end:]
            yield self._begun(name, base=0)
            yield self._called(arguments)
            self._has_arguments = False
        elif is_last or not self._may_become_call(body, self._rest[before.end("end") :]):
            self._may_begin = False
            said, self._rest = before["begin"] if self._calls else before[0], body
            if said:
                yield said

    def _may_become_call(self, body: str, begin: str) -> bool:
        """Whether what follows can make a call of it. `begin`: with what stands before the JSON."""
        if not body or any(tag.startswith(begin) for tag in (self._form.opening, self._form.closing)):
            return True
        if self._form.has_name_first and (
            self._name_begin.match(body) or any(one.startswith(body) for one in self._names)
        ):
            return True
        if not (found := _JSON_BEGIN.match(body)) or _value_at(body):
            return False
        key, is_whole_key = found["key"], found.end("key") < len(body)
        if key == "name" and found["value"] is not None:
            return found["value"] in self._names
        return key is None or (key in _CALL_KEYS if is_whole_key else any(one.startswith(key) for one in _CALL_KEYS))

    def _said(self, *, is_last: bool) -> Iterator[str]:
        """Text up to the next opening, without the white space before it."""
        opening, text = self._form.opening, self._rest
        end = len(text)
        if opening and (at := text.find(opening)) >= 0:
            self._may_begin, end = True, len(text[:at].rstrip())
        elif opening and not is_last:
            begun = next((size for size in range(len(opening) - 1, 0, -1) if text.endswith(opening[:size])), 0)
            end = len(text[: end - begun].rstrip())
        self._rest = text[end:]
        if end:
            yield text[:end]

    def _taken(self, depth: int, *, is_last: bool) -> tuple[str, bool]:
        """The rest up to the brace behind which so many are open, and whether that is still to come."""
        at = 0
        while found := (_MARK_IN_STRING if self._is_quoted else _MARK).search(self._rest, at):
            at, mark = found.end(), found[0]
            self._is_quoted ^= mark == '"'
            self._depth += (mark in ("{", "[")) - (mark in ("}", "]"))
            if self._depth == depth and mark in ("}", "]"):
                break
        else:
            # Not within an escape.
            at = len(self._rest) - (self._is_quoted and not is_last and self._rest.endswith("\\", at))
        taken, self._rest = self._rest[:at], self._rest[at:]
        return taken, not found

    def _begun(self, name: str, *, base: int) -> dict[str, Any]:
        self._calls += 1
        self._depth = self._base = base
        self._has_arguments = self._may_begin = True
        length = self._form.id_length
        return self._delta(
            {
                "id": token_hex(12)[:length] if length else f"call_{token_hex(12)}",
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
        )

    def _called(self, arguments: str) -> dict[str, Any]:
        return self._delta({"function": {"arguments": arguments}})

    def _delta(self, call: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._calls - 1, **call}


def _value_at(text: str) -> tuple[Any, int] | None:
    """The JSON that a text begins with, and its end."""
    try:
        return _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None


def _whole_call(text: str, names: set[str]) -> tuple[str, str, int] | None:
    """The call that a text begins with, with its fields in any order: the name, the arguments in JSON, and its end."""
    if not text.startswith("{") or not (found := _value_at(text)):
        return None
    call, end = found
    call = call.get("function", call) if isinstance(call.get("function"), dict) else call
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False), end
