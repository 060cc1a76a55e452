"""Chat messages as text, by the model's own template. The only file that imports jinja2.

The text equals the text of transformers' `apply_chat_template`, because environment, functions and variables are the
same (transformers/utils/chat_template_utils.py). Special tokens that a message spells stay separate from special tokens
that the template writes, as with `sanitize_control_tokens=True`. Each text knows which of its characters callers wrote
(`_Said`), while filters, methods and operators see only the text.
"""

import json
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import suppress
from datetime import datetime
from functools import cached_property, wraps
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, Undefined, meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from neuronpipe.core.errors import InvalidInput

# The mark behind the message that a text continues, as in transformers. A template that trims messages takes the space.
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING = ("reasoning_content", "thinking", "reasoning")
# The characters of a template's refusal that the caller gets.
_MAX_REASON = 200


def variables_of(source: str) -> list[str]:
    """Returns the names of the variables that a template reads, sorted."""
    return sorted(meta.find_undeclared_variables(_TemplateEnvironment().parse(source)))


class ChatTemplate:
    """A template of the model in jinja's sandbox.

    `variables`: the special tokens by their names in templates (bos_token, …). `special_tokens`: all special tokens.
    """

    def __init__(self, source: str, variables: Mapping[str, str], special_tokens: Iterable[str]) -> None:
        self._source = source
        self._variables = variables
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
    ) -> list[str]:
        """Writes the prompt for the message after `messages`, in parts.

        - `tools`: tools that the model may call.
        - `arguments`: more variables of the template.
        - `continues`: the text continues the last message.

        Every second part is a special token that a message spells, which counts as text. Raises InvalidInput if the
        template refuses the messages, or cannot be run.
        """
        marked = [_with_reasoning(_hide(message)) for message in messages]
        if continues and not isinstance(marked[-1].get("content"), str):
            raise InvalidInput("messages", "the content of the last one, which is to be continued, must be a text")
        variables = {"documents": None, "add_generation_prompt": not continues, **self._variables}
        try:
            if continues:
                marked[-1]["content"] = _joined((marked[-1]["content"], _CONTINUED))
            chat = {"messages": marked, "tools": _hide(tools)}
            text = self._template.render(variables | _hide(arguments or {}) | chat)
        except _TemplateRefusal as error:
            raise InvalidInput("messages", f"the model's template refuses them: {str(error)[:_MAX_REASON]}") from error
        except SecurityError as error:
            raise InvalidInput("messages", "the model's template tries to leave its sandbox") from error
        except Exception as error:  # a template may raise any error
            problem = f"the model's template cannot be run on them ({type(error).__name__})"
            raise InvalidInput("messages", problem) from error
        if continues:
            end = text.rfind(_CONTINUED.rstrip())
            if end < 0:
                raise InvalidInput("messages", "the model's template leaves out the last one, which is to be continued")
            text = text[:end] if text.startswith(_CONTINUED, end) else _cut(text[:end], "rstrip")
        parts, begin, shadow = list[str](), 0, _shadow(text)
        for match in self._special.finditer(text):
            if match[0] != shadow[match.start() : match.end()]:
                parts += [str.__str__(text)[begin : match.start()], match[0]]
                begin = match.end()
        return [*parts, str.__str__(text)[begin:]]

    @cached_property
    def _template(self) -> Any:
        return _TemplateEnvironment().from_string(self._source)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Copies a message with its reasoning under the names that templates read."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _TemplateRefusal(TemplateError):
    """The error that a template raises on purpose, with its reason."""


class _Namespace(Namespace):
    """A namespace as in transformers, without names that reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace takes no name like {name!r}")
        super().__setitem__(name, value)


class _Generation(Extension):
    """The block {% generation %}, which marks the model's words. Here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Code(CodeGenerator):
    """Jinja's code generator, in which ~ keeps the marks of callers' characters."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (jinja's)
        self.write("environment.concat((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Transformers' environment, in which each text knows which of its characters callers wrote."""

    code_generator_class = _Code
    intercepted_binops = frozenset("+*%")

    def __init__(self) -> None:
        extensions: list[Any] = [_Generation, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_text)
        self.concat = _joined  # type: ignore[method-assign]
        self.filters["tojson"] = _to_json
        self.filters = {name: _shadowed(function) for name, function in self.filters.items()}
        self.filters |= {"trim": _trim, "replace": _replace}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _shadowed(_strftime_now),
            "dict": _make_dict,
            "namespace": _Namespace,
        }

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        call, method = super().call, getattr(obj, "__wrapped__", obj)  # jinja wraps str.format
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, bytes):
            return _hide(call(context, obj, *args, **kwargs))
        if not isinstance(text, str):
            return call(context, obj, *args, **kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}  # jinja's
        if name in _CUTS:
            return _cut(text, name, *args, **kwargs)
        if name == "replace":
            return _replace(text, *args, **kwargs)

        def run(text: str, *args: Any, **kwargs: Any) -> Any:
            return call(context, self.getattr(str.__str__(text), name), *args, **kwargs)

        return _shadowed(run)(text, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            return _joined((left, right))
        return _shadowed(self.binop_table[operator])(left, right)


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# The character that stands for a caller's character in a shadow. Unicode has no such character, so no template has it.
_HIDDEN = "\U0010ffff"
# Methods that return parts of a text, in their order.
_CUTS = {"strip", "lstrip", "rstrip", "removeprefix", "removesuffix"}
_CUTS |= {"split", "rsplit", "splitlines", "partition", "rpartition"}
# Values that can be read only once, or that are no list. Functions get a list instead, which has a shadow.
_PASSING = (Iterator, KeysView, ValuesView, ItemsView)


class _Said(str):
    """A text with characters that callers wrote. `_shadow`: the text with `_HIDDEN` for each such character."""

    __slots__ = ("_shadow",)
    _shadow: str

    def __new__(cls, text: str, shadow: str) -> "_Said":
        made = super().__new__(cls, text)
        made._shadow = shadow
        return made

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: Any) -> str:
        return _said(str.__str__(self)[key], self._shadow[key])

    def __iter__(self) -> Iterator[str]:
        return map(_said, str.__str__(self), self._shadow)


def _said(text: str, shadow: str) -> str:
    return _Said(text, shadow) if _HIDDEN in shadow else text


def _hide(value: Any) -> Any:
    """Marks all texts of a caller's value as the caller's."""
    if isinstance(value, str):
        return _said(value, _HIDDEN * len(value))
    if isinstance(value, Mapping):
        return {_hide(name): _hide(item) for name, item in value.items()}
    return [_hide(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, bytes) else value


def _shadow_of(text: _Said) -> str:
    return text._shadow


def _open_shadow_of(text: _Said) -> str:
    """Returns a shadow that shows white space and characters that JSON escapes. Many functions look for these."""
    pairs = zip(str.__str__(text), text._shadow, strict=True)
    return "".join(char if char.isspace() or char in '"\\' or char < " " else hidden for char, hidden in pairs)


def _shadow(value: Any, of: Callable[[_Said], str] = _shadow_of) -> Any:
    """Replaces the texts of a value by their shadows. A value of an unknown type counts as written by callers."""
    if isinstance(value, str):
        return of(value) if isinstance(value, _Said) else value
    if isinstance(value, list | tuple):
        shadows = [_shadow(item, of) for item in value]
        return tuple(shadows) if type(value) is tuple else shadows
    if isinstance(value, dict):
        return {_shadow(name, of): _shadow(item, of) for name, item in value.items()}
    known = (int, float, type(None), Undefined, Environment, Context, EvalContext)
    return value if isinstance(value, known) else _HIDDEN


def _text(value: Any) -> Any:
    """Returns the text that a template prints for a value."""
    return value if isinstance(value, str | int | float | Undefined | None) else _hide(str(value))


def _joined(values: Iterable[Any]) -> str:
    texts = [str(_text(value)) for value in values]
    return _said("".join(texts), "".join(map(_shadow, texts)))


def _shadowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that its text knows which of its characters callers wrote.

    The function runs again with the shadows of its arguments, and the two results are compared. If they differ in more
    than hidden characters, the whole text counts as written by callers.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        values = [list(value) if isinstance(value, _PASSING) else value for value in args]
        text = function(*values, **kwargs)
        if not isinstance(text, str) or isinstance(text, _Said) or _shadow([values, kwargs]) == [values, kwargs]:
            return text
        for of in (_shadow_of, _open_shadow_of):
            shadow = ""
            with suppress(Exception):  # a function may raise any error for a shadow
                shadow = str(function(*_shadow(values, of), **_shadow(kwargs, of)))
            if len(shadow) == len(text) and all(map(_is_same, shadow, text)):
                return _said(str(text), shadow)
        return _hide(str(text))

    return call


def _is_same(shadow: str, character: str) -> bool:
    return shadow in (character, _HIDDEN)


def _cut(text: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of `_CUTS` on a text, and returns its result, whose texts have shadows."""
    whole, shadow = str.__str__(text), _shadow(text)
    cut = getattr(whole, name)(*args, **kwargs)
    gap = len((args[0] if args else kwargs.get("sep")) or "") if name in ("split", "rsplit") else 0
    begin, parts = len(whole) - len(cut) if name == "removeprefix" else 0, []
    for part in [cut] if isinstance(cut, str) else cut:
        begin = whole.index(part, begin)
        parts.append(_said(part, shadow[begin : begin + len(part)]))
        begin += len(part) + gap
    return parts[0] if isinstance(cut, str) else type(cut)(parts)


def _trim(value: Any, chars: str | None = None) -> Any:
    return _cut(str(_text(value)), "strip", chars)


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    if not old:
        return str(_hide(str(value).replace(old, new, -1 if count is None else count)))
    first, *rest = _cut(str(_text(value)), "split", str(old), -1 if count is None else count)
    return _joined([first, *(text for part in rest for text in (str(new), part))])
