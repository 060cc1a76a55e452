"""Chat messages as text, by the model's own template. The only file that imports jinja2.

Equal to transformers' `apply_chat_template`: the same environment, functions and variables
(transformers/utils/chat_template_utils.py). Special tokens that a message spells are kept apart from those
that the template writes, as `sanitize_control_tokens=True` does it: each text knows which of its characters callers
wrote (`_Said`), and filters, methods and operators see the text alone.
"""

import json
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import suppress
from datetime import datetime
from functools import cached_property, wraps
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, Undefined, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from neuronpipe.core.errors import InvalidInput

# Behind the message that a text continues, as transformers writes it. A template that trims messages takes the space.
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Of what a template says to its caller.
_MAX_REASON = 200


class ChatTemplate:
    """A template of the model, in jinja's sandbox.

    `variables`: the special tokens by their names in templates (bos_token, …). `special_tokens`: all of them.
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
        """The prompt for the message after these, in parts. `tools`: those that the model may call. `arguments`: more
        variables of the template. `continues`: the text continues the last message.

        Every second part is a special token that a message spells, which is text. Raises InvalidInput where the
        template does not take the messages, or cannot be run.
        """
        said = [_with_reasoning(_hide(one)) for one in messages]
        if continues and not isinstance(said[-1].get("content"), str):
            raise InvalidInput("messages", "the content of the last one, which is to be continued, must be a text")
        variables = {"documents": None, "add_generation_prompt": not continues, **self._variables}
        try:
            if continues:
                said[-1]["content"] = _joined((said[-1]["content"], _CONTINUED))
            text = self._template.render(variables | _hide(arguments or {}) | {"messages": said, "tools": _hide(tools)})
        except _Refused as error:
            raise InvalidInput("messages", f"the model's template refuses them: {str(error)[:_MAX_REASON]}") from error
        except SecurityError as error:
            raise InvalidInput("messages", "the model's template tries to leave its sandbox") from error
        except Exception as error:  # what templates do with values raises anything
            problem = f"the model's template cannot be run on them ({type(error).__name__})"
            raise InvalidInput("messages", problem) from error
        if continues:
            end = text.rfind(_CONTINUED.rstrip())
            if end < 0:
                raise InvalidInput("messages", "the model's template leaves out the last one, which is to be continued")
            text = text[:end] if text.startswith(_CONTINUED, end) else _cut(text[:end], "rstrip")
        parts, begin, shadow = list[str](), 0, _shadow(text)
        for found in self._special.finditer(text):
            if found[0] != shadow[found.start() : found.end()]:
                parts += [str.__str__(text)[begin : found.start()], found[0]]
                begin = found.end()
        return [*parts, str.__str__(text)[begin:]]

    @cached_property
    def _template(self) -> Any:
        return _Environment().from_string(self._source)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning by the names that templates read."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Refused(TemplateError):
    """What a template raises on purpose, with its reason."""


class _Namespace(Namespace):
    """As transformers': without names that reach into Python."""

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
    """The block {% generation %}, which marks what the model said; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Code(CodeGenerator):
    """Jinja's, in which ~ keeps what callers wrote."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (jinja's)
        self.write("environment.concat((")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """Transformers' environment, in which each text knows what callers wrote of it."""

    code_generator_class = _Code
    intercepted_binops = frozenset("+*%")

    def __init__(self) -> None:
        extensions: list[Any] = [_Generation, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_text)
        self.concat = _joined  # type: ignore[method-assign]
        self.filters["tojson"] = _to_json
        self.filters = {name: _shadowed(one) for name, one in self.filters.items()}
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
        kwargs = {one: value for one, value in kwargs.items() if one not in ("_loop_vars", "_block_vars")}  # jinja's
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
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# For a character that a caller wrote, in a shadow. It is in no template: Unicode has no such character.
_HIDDEN = "\U0010ffff"
# Methods that give parts of a text, in their order.
_CUTS = {"strip", "lstrip", "rstrip", "removeprefix", "removesuffix"}
_CUTS |= {"split", "rsplit", "splitlines", "partition", "rpartition"}
# Read once, or no list: functions get a list instead, which has a shadow.
_PASSING = (Iterator, KeysView, ValuesView, ItemsView)


class _Said(str):
    """A text of which callers wrote some. `_shadow`: the same with `_HIDDEN` for each character of theirs."""

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
    """The caller's value, whose texts know that they are the caller's."""
    if isinstance(value, str):
        return _said(value, _HIDDEN * len(value))
    if isinstance(value, Mapping):
        return {_hide(name): _hide(one) for name, one in value.items()}
    return [_hide(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, bytes) else value


def _shadow_of(text: _Said) -> str:
    return text._shadow


def _open_shadow_of(text: _Said) -> str:
    """The shadow in which white space and what JSON escapes are shown, which many functions look for."""
    pairs = zip(str.__str__(text), text._shadow, strict=True)
    return "".join(own if own.isspace() or own in '"\\' or own < " " else one for own, one in pairs)


def _shadow(value: Any, of: Callable[[_Said], str] = _shadow_of) -> Any:
    """The value with shadows for its texts. What cannot be looked into counts as written by callers."""
    if isinstance(value, str):
        return of(value) if isinstance(value, _Said) else value
    if isinstance(value, list | tuple):
        shadows = [_shadow(one, of) for one in value]
        return tuple(shadows) if type(value) is tuple else shadows
    if isinstance(value, dict):
        return {_shadow(name, of): _shadow(one, of) for name, one in value.items()}
    known = (int, float, type(None), Undefined, Environment, Context, EvalContext)
    return value if isinstance(value, known) else _HIDDEN


def _text(value: Any) -> Any:
    """What a template prints of a value."""
    return value if isinstance(value, str | int | float | Undefined | None) else _hide(str(value))


def _joined(values: Iterable[Any]) -> str:
    texts = [str(_text(one)) for one in values]
    return _said("".join(texts), "".join(map(_shadow, texts)))


def _shadowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose text knows what callers wrote of it: where the function gives the same of the shadows.
    Else it counts as written by callers.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [list(one) if isinstance(one, _PASSING) else one for one in args]
        made = function(*given, **kwargs)
        if not isinstance(made, str) or isinstance(made, _Said) or _shadow([given, kwargs]) == [given, kwargs]:
            return made
        for of in (_shadow_of, _open_shadow_of):
            shadow = ""
            with suppress(Exception):  # what functions do with a shadow raises anything
                shadow = str(function(*_shadow(given, of), **_shadow(kwargs, of)))
            if len(shadow) == len(made) and all(map(_is_same, shadow, made)):
                return _said(str(made), shadow)
        return _hide(str(made))

    return call


def _is_same(shadow: str, own: str) -> bool:
    return shadow in (own, _HIDDEN)


def _cut(text: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """What a method of `_CUTS` gives."""
    whole, shadow = str.__str__(text), _shadow(text)
    found = getattr(whole, name)(*args, **kwargs)
    gap = len((args[0] if args else kwargs.get("sep")) or "") if name in ("split", "rsplit") else 0
    begin, parts = len(whole) - len(found) if name == "removeprefix" else 0, []
    for part in [found] if isinstance(found, str) else found:
        begin = whole.index(part, begin)
        parts.append(_said(part, shadow[begin : begin + len(part)]))
        begin += len(part) + gap
    return parts[0] if isinstance(found, str) else type(found)(parts)


def _trim(value: Any, chars: str | None = None) -> Any:
    return _cut(str(_text(value)), "strip", chars)


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    if not old:
        return str(_hide(str(value).replace(old, new, -1 if count is None else count)))
    first, *rest = _cut(str(_text(value)), "split", str(old), -1 if count is None else count)
    return _joined([first, *(one for part in rest for one in (str(new), part))])
