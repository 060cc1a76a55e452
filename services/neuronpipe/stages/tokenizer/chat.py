"""Chat messages as text, by the model's own template. The only file that imports jinja2.

Equal to transformers' `apply_chat_template`: the same environment, functions and variables
(transformers/utils/chat_template_utils.py). Special tokens that a message spells are kept apart from those
that the template writes, as `sanitize_control_tokens=True` does it.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from neuronpipe.core.errors import InvalidInput

# No message holds it (tasks/text_generation.py).
_MARK = "\0"
# As JSON has it: behind a backslash that is not itself behind one.
_MARK_IN_JSON = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
# Behind the message that a text continues. A template that trims messages takes the space.
_CONTINUED = f"{_MARK}{_MARK} "
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
        marked = "|".join(re.escape(_marked(token)) for token in longest_first)
        self._marks = re.compile(f"({marked or '(?!)'})|{_MARK}")

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
        said = [_with_reasoning(self._mark(one)) for one in messages]
        variables = {"documents": None, "add_generation_prompt": not continues, **self._variables}
        try:
            if continues:
                said[-1]["content"] += _CONTINUED
            text = self._template.render(
                **variables | self._mark(arguments or {}) | {"messages": said, "tools": self._mark(tools)}
            )
        except _Refused as error:
            raise InvalidInput("messages", f"the model's template refuses them: {str(error)[:_MAX_REASON]}") from error
        except SecurityError as error:
            raise InvalidInput("messages", "the model's template tries to leave its sandbox") from error
        except Exception as error:  # what templates do with values raises anything
            problem = f"the model's template cannot be run on them ({type(error).__name__})"
            raise InvalidInput("messages", problem) from error
        if continues:
            text, found, rest = text.rpartition(_CONTINUED.rstrip())
            if not found:
                raise InvalidInput("messages", "the model's template leaves out the last one, which is to be continued")
            text = text if rest.startswith(" ") else text.rstrip()
        return [(part or "").replace(_MARK, "") for part in self._marks.split(text)]

    @cached_property
    def _template(self) -> Any:
        return _environment().from_string(self._source)

    def _mark(self, value: Any) -> Any:
        """The value with a mark inside each special token of its texts, so that nothing that a template does with them
        makes one.
        """
        if isinstance(value, str):
            return self._special.sub(lambda found: _marked(found[0]), value)
        if isinstance(value, Mapping):
            return {self._mark(name): self._mark(one) for name, one in value.items()}
        return [self._mark(one) for one in value] if isinstance(value, Sequence) else value


def _marked(token: str) -> str:
    return token[0] + _MARK + token[1:]


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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _make_dict,
        "namespace": _Namespace,
    }
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _MARK_IN_JSON.sub(rf"\g<1>{_MARK}", text)
