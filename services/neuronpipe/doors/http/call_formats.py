"""The formats in which models write calls of tools, and the reading of whole calls."""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The form in which a model writes calls: JSON with a tool's name and its arguments or parameters.

    - `openings`, `closing`: texts before and after a call. If they are special tokens, no text has them: so in every
      format, JSON that begins a text or follows a call is a call, and so are the items of a list.
    - `has_name_first`: a call may also be a name with an object behind it.
    - `id_length`: length of the ids that the template takes; 0: any.
    - `call`: pattern of a whole call in another form than JSON, with the group `name`, where NAMES stands for the names
      of the tools, and a group with its arguments: `json`, `pairs`, or `python` for the text of calls without `name`.
    - `end`: pattern of the end of a call of this form. `pair`: pattern of the key and the value of one of the `pairs`.
    """

    openings: tuple[str, ...] = ()
    closing: str = ""
    has_name_first: bool = False
    id_length: int = 0
    call: str = ""
    end: str = ""
    pair: str = ""

    def calls_of(self, match: re.Match[str], parameters: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Returns the names of the functions and the arguments in JSON of calls that have the form of `call`.

        Returns an empty list if they are not valid. `parameters`: the schema of each function's parameters.
        """
        groups = match.groupdict()
        if "python" in groups:
            return _python_calls(groups["python"], {*parameters})
        name = match["name"]
        if "json" in groups:
            value = value_at(match["json"])
            return [(name, match["json"])] if value and value[1] == len(match["json"]) else []
        arguments, at, pairs = dict[str, Any](), 0, match["pairs"].rstrip()
        properties = parameters[name].get("properties")
        pattern = re.compile(self.pair, re.DOTALL)
        while pair := pattern.match(pairs, at):
            key, at = pair[1].strip(), pair.end()
            schema = properties.get(key) if isinstance(properties, dict) else None
            arguments[key] = _typed(pair[2], _types(schema))
        return [(name, json_of(arguments))] if at == len(pairs) else []


# A word in the template of a model → the format: the first that the template has. The parsers of vLLM and SGLang read
# the same forms.
_FORMATS = {
    "<function=": CallFormat(  # Qwen3-Coder
        ("<tool_call>", "<function="),
        "</tool_call>",
        call=r"(?:<tool_call>\s*)?<function=(?P<name>NAMES)>(?P<pairs>.*)</function>",
        end="</function>",
        pair=r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))",
    ),
    "<arg_key>": CallFormat(  # GLM-4.5 and later
        ("<tool_call>",),
        "</tool_call>",
        call=r"<tool_call>\s*(?P<name>NAMES)(?P<pairs>\s.*|<arg_key>.*|)</tool_call>",
        end="</tool_call>",
        pair=r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    ),
    "<｜tool▁sep｜>": CallFormat(  # DeepSeek R1 and V3, whose arguments have fences, and V3.1
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        "<｜tool▁calls▁end｜>",
        call=r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>NAMES)"
        r"(?:<｜tool▁sep｜>|\s*```json)\s*(?P<json>\{.*\})\s*(?:```\s*)?<｜tool▁calls?▁end｜>",
        end="<｜tool▁calls?▁end｜>",
    ),
    "<|channel|>": CallFormat(  # harmony: GPT-OSS. The end of a call is also the end of the text.
        (
            "<|start|>assistant<|channel|>commentary to=functions.",
            "<|start|>assistant to=functions.",
            "<|channel|>commentary to=functions.",
            "commentary to=functions.",
        ),
        call=r"(?:<\|start\|>assistant)?(?:<\|channel\|>)?(?:commentary)? ?to=functions\.(?P<name>NAMES)"
        r"(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?(?:json)?\s*(?:<\|message\|>)?\s*(?P<json>\{.*\})"
        r"\s*(?:<\|(?:call|end)\|>)?",
        end=r"<\|(?:call|end)\|>",
    ),
    "<start_of_turn>": CallFormat(  # Gemma, which reads how to call in its prompt
        ("```tool_code", "```tool_call", "```json"), "```", call=r"```tool_code\s+(?P<python>.*)", end=r"\)\s*(?=```)"
    ),
    "<tool_call>": CallFormat(("<tool_call>",), "</tool_call>"),  # Hermes, Qwen
    "[TOOL_CALLS]": CallFormat(("[TOOL_CALLS]",), has_name_first=True, id_length=9),
    "<|python_tag|>": CallFormat(("<|python_tag|>",)),  # Llama 3
}


def format_of(template: str) -> CallFormat:
    """Returns the format of a model with this template for chats."""
    return next((form for word, form in _FORMATS.items() if word in template), CallFormat())


def value_at(text: str) -> tuple[Any, int] | None:
    """Returns the JSON that a text begins with, and its end."""
    try:
        return _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None


def whole_call(text: str, names: set[str]) -> tuple[str, str, int] | None:
    """Returns the call that a text begins with, with fields in any order: its name, arguments in JSON, and end."""
    if not text.startswith("{") or not (value := value_at(text)):
        return None
    call, end = value
    call = call.get("function", call) if isinstance(call.get("function"), dict) else call
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    try:
        return name, json_of(arguments), end
    except ValueError:
        return None


def _python_calls(text: str, names: set[str]) -> list[tuple[str, str]]:
    """Returns the calls of a Python program with literals as arguments, also in `print`, as names and JSON."""
    calls = []
    try:
        for line in ast.parse(text.strip()).body:
            call = line.value if isinstance(line, ast.Expr) else None
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "print" and len(call.args) == 1:
                call = call.args[0]
            name = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) and not call.args else ""
            if name not in names or not isinstance(call, ast.Call) or any(not word.arg for word in call.keywords):
                return []
            arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
            calls.append((name, json_of(arguments)))
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return []
    return calls


def json_of(value: Any) -> str:
    """Writes JSON. Half a surrogate pair stays an escape. Raises ValueError for a number that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def read_arguments(text: str) -> Any:
    """Returns the value of a call's arguments, an object if the text is empty.

    Raises ValueError for a text that is no JSON, and for half a surrogate pair, which no answer and no prompt may have.
    """
    value = json.loads(text or "{}")
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _types(schema: Any) -> set[str]:
    """Returns the types of JSON that a schema names; an empty set if it names none."""
    if not isinstance(schema, dict):
        return set()
    lists = {key: value if isinstance(value, list) else [value] for key, value in schema.items()}
    types = {name for name in lists.get("type", []) if isinstance(name, str)}
    types |= {"string" for value in lists.get("enum", []) if isinstance(value, str)}
    return types.union(*(_types(part) for key in ("anyOf", "oneOf") for part in lists.get(key, [])))


def _typed(text: str, types: set[str]) -> Any:
    """Returns the value that a text without quotes stands for: a text, or JSON if its types allow no text."""
    written = text.strip()
    if "string" in types and not ("null" in types and written in ("null", "None")):
        return text
    constants = {"True": "true", "False": "false", "None": "null"}  # as Qwen's template writes them
    try:
        value = json.loads(constants.get(written, written))
        json_of(value)
    except (ValueError, RecursionError):
        return text
    return value
