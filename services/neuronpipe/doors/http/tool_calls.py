"""OpenAI's tools: what a template gets of them, the form of texts that must call one, and calls found in texts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BEGIN, _END = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request uses tools. `must_call`: a text is nothing but calls. `function`: the only one that may be called.

    `has_several`: whether a text may have several calls.
    """

    tools: Sequence[Mapping[str, Any]]
    must_call: bool = False
    function: str = ""
    has_several: bool = True

    def schema(self) -> dict[str, Any] | None:
        """The JSON Schema of texts that must call: the arguments of the one function, or a list of calls."""
        functions = [one["function"] for one in self.tools]
        if self.function:
            return next(
                one.get("parameters") or {"type": "object"} for one in functions if one["name"] == self.function
            )
        if not self.must_call:
            return None
        calls = []
        # Each function's parameters have a place of their own, where what they refer to is found.
        for number, one in enumerate(functions):
            arguments = {"$ref": f"#/$defs/{number}"}
            properties = {"name": {"const": one["name"]}, "arguments": arguments}
            calls.append({"type": "object", "properties": properties, "additionalProperties": False})
            calls[-1]["required"] = [*properties]
        defined = {str(k): _moved(one.get("parameters") or {"type": "object"}, k) for k, one in enumerate(functions)}
        most = {} if self.has_several else {"maxItems": 1}
        return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, "$defs": defined}

    def read(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        """What a text says, and its calls: names of functions with their arguments in JSON.

        Calls are in tags (Hermes, Qwen), or the whole text is one or a list of them (Llama 3, Mistral).
        """
        value, end = _value_at(text)
        is_json = end > 0 and not text[end:].strip()
        if self.function:
            return ("", [(self.function, text)]) if is_json else (text, [])
        names = {one["function"]["name"] for one in self.tools}
        content, values = _in_tags(text) if _BEGIN in text else ("", [value] if is_json else [])
        found = [value for one in values for value in (one if isinstance(one, list) else [one])]
        calls = [
            (one["name"], json.dumps(_arguments(one), ensure_ascii=False)) for one in found if _is_call(one, names)
        ]
        if not calls or len(calls) < len(found):  # what is no call would be lost
            return text, []
        return content.strip(), calls if self.has_several else calls[:1]


def _moved(schema: Any, number: int) -> Any:
    """A schema that is no longer the root: what it refers to in itself is found from there."""
    if isinstance(schema, list):
        return [_moved(one, number) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(one, number) for name, one in schema.items()}
    if isinstance(target := schema.get("$ref"), str) and target.startswith("#"):
        moved["$ref"] = f"#/$defs/{number}{target[1:]}"
    return moved


def _in_tags(text: str) -> tuple[str, list[Any]]:
    """What a text says between its calls, and the calls."""
    said, *parts = text.split(_BEGIN)
    values = []
    for part in parts:
        value, end = _value_at(part)
        values.append(value)
        said += part[end:].strip().removeprefix(_END)
    return said, values


def _value_at(text: str) -> tuple[Any, int]:
    """The JSON that a text begins with and its end; 0 where there is none."""
    try:
        return _DECODER.raw_decode(text, len(text) - len(text.lstrip()))
    except (ValueError, RecursionError):
        return None, 0


def _is_call(value: Any, names: set[str]) -> bool:
    return isinstance(value, dict) and value.get("name") in names and isinstance(_arguments(value), dict)


def _arguments(call: Mapping[str, Any]) -> Any:
    return call.get("arguments", call.get("parameters", {}))
