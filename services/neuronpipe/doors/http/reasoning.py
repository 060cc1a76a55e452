"""The reasoning of a model before its answer, in texts that come in parts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.doors.http.tool_calls import CallReader, ToolUse
from neuronpipe.doors.http.unknown_fields import ignore
from neuronpipe.doors.inference import Inference, ModelName
from neuronpipe.tasks.text_options import GenerationFacts

# Variables with which templates switch reasoning: `enable_thinking` of Qwen's, `thinking` of DeepSeek's.
THINKING_VARIABLES = ("enable_thinking", "thinking")


def facts_of(inference: Inference, model: ModelName) -> GenerationFacts | None:
    """Returns the facts of a model; None if it is not in memory, or does not generate, which the pipeline refuses."""
    with suppress(NeuronpipeError, LookupError):
        return GenerationFacts.of(inference.spec(model))
    return None


def name_unread(facts: GenerationFacts | None, fields: Mapping[str, Iterable[str]]) -> None:
    """Names the fields whose variables the model's template does not read in the header of ignored fields.

    `fields`: the variables of each field. Raises InvalidInput if the request is strict.
    """
    for field, variables in fields.items():
        if facts and not facts.reads_any(variables):
            ignore(field, "is no variable of the model's chat template")


def effort_variables(effort: str | None) -> tuple[str, ...]:
    """Returns the variables of a template that an effort sets; see `switched`."""
    return ("reasoning_effort", *(THINKING_VARIABLES if effort == "none" else ()))


def switched(effort: str | None, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables of a template that a request names. No effort switches the reasoning off."""
    if effort != "none" or not variables.keys().isdisjoint(THINKING_VARIABLES):
        return dict(variables)
    return {**dict.fromkeys(THINKING_VARIABLES, False), **variables}


def thinking_of(variables: Mapping[str, Any]) -> str:
    """Returns the setting of a template's thinking; see GenerationFacts.opens_reasoning."""
    switches = [bool(value) for name, value in variables.items() if name in THINKING_VARIABLES]
    return "default" if not switches else "on" if switches[-1] else "off"


class ReasoningText(str):
    """A part of a text before the answer."""

    __slots__ = ()


class AnswerReader:
    """Divides a text that comes in parts into the model's reasoning, words and calls. The parts may be cut anywhere.

    White space around the marks belongs to neither the reasoning nor the answer.

    - `calls`: divides the answer behind the reasoning.
    - `marks`: texts before and behind the reasoning; None: the text has no reasoning.
    - `begun`: the reasoning in the prompt, which may be empty; None: the prompt does not have the first mark.
    - `end_id`: the token that is the mark behind the reasoning; None: several tokens, or unknown.
    """

    def __init__(
        self,
        calls: CallReader,
        marks: tuple[str, str] | None = None,
        *,
        begun: str | None = None,
        end_id: int | None = None,
    ) -> None:
        is_open = begun is not None
        self._calls, (self._opening, self._closing) = calls, marks or ("", "")
        self._may_open, self._is_open = bool(marks) and not is_open, bool(marks) and is_open
        self._rest = ""  # text that is not divided yet
        # Whether white space at the beginning of the rest is left out.
        self._skips_space = self._is_open and not (begun or "").strip()
        self._end_id, self._tokens, self._tokens_to_end = end_id, 0, 0
        self._characters = self._characters_to_end = 0

    @property
    def ends_with_calls(self) -> bool:
        """Whether the model chose to call."""
        return self._calls.ends_with_calls

    def count(self, token_ids: Sequence[int]) -> None:
        """Counts the next tokens of the text."""
        if self._end_id is not None and not self._tokens_to_end and self._end_id in token_ids:
            self._tokens_to_end = self._tokens + [*token_ids].index(self._end_id) + 1
        self._tokens += len(token_ids)

    @property
    def reasoning_tokens(self) -> int:
        """The number of counted tokens in the reasoning that was read, with its marks.

        The number is estimated by characters if the last mark is no token of its own.
        """
        if self._is_open:
            return self._tokens
        if not self._characters_to_end:
            return 0
        estimate = round(self._tokens * self._characters_to_end / self._characters)
        return self._tokens_to_end or estimate

    def read(self, text: str, *, is_last: bool = False) -> Iterator[str | dict[str, Any]]:
        """Yields the known parts of the reasoning, the words and the calls; see CallReader.read."""
        for part in self._divided(text, is_last=is_last):
            if isinstance(part, ReasoningText):
                yield part
            else:
                yield from self._calls.read(part)
        if is_last:
            yield from self._calls.read("", is_last=True)

    def whole(self, text: str) -> tuple[str, str, list[dict[str, Any]]]:
        """Returns the reasoning, the words and the calls of a whole text."""
        parts = [*self._divided(text, is_last=True)]
        said, calls = self._calls.whole("".join(part for part in parts if not isinstance(part, ReasoningText)))
        return "".join(part for part in parts if isinstance(part, ReasoningText)), said, calls

    def _divided(self, text: str, *, is_last: bool) -> Iterator[str]:
        """Yields the known parts of the reasoning, and of the text behind it."""
        self._rest += text
        self._characters += len(text)
        if self._may_open:
            begin = self._rest.lstrip()
            if not is_last and begin != self._opening and self._opening.startswith(begin):
                return  # the rest may become the mark
            self._may_open, self._is_open = False, begin.startswith(self._opening)
            if self._is_open:
                self._rest, self._skips_space = begin.removeprefix(self._opening), True
        if self._is_open:
            yield from self._reasoning(is_last=is_last)
        if self._is_open:
            return
        if self._skips_space:
            self._rest = self._rest.lstrip()
            self._skips_space = not self._rest
        if self._rest:
            answer, self._rest = self._rest, ""
            yield answer

    def _reasoning(self, *, is_last: bool) -> Iterator[ReasoningText]:
        """Yields the reasoning in the rest, without white space and a possible beginning of the mark at its end."""
        said, closing, behind = self._rest.partition(self._closing)
        if self._skips_space:
            said = said.lstrip()
        end = len(said)
        if not closing and not is_last:
            sizes = range(min(len(self._closing) - 1, end), 0, -1)
            end -= next((size for size in sizes if said.endswith(self._closing[:size])), 0)
        end = len(said[:end].rstrip())
        self._rest = behind if closing or is_last else said[end:]
        if end:
            self._skips_space = False
            yield ReasoningText(said[:end])
        if closing or is_last:
            self._characters_to_end = self._characters - len(self._rest)
            self._is_open, self._skips_space = False, True


def reader_of_answer(
    inference: Inference, model: ModelName, tools: ToolUse, *, has_form: bool, thinking: str, begun: str = ""
) -> AnswerReader:
    """Returns the reader of an answer, once the model has answered, which only a model that generates does.

    - `has_form`: the text has a form, which holds from the first token on, so there is no reasoning.
    - `thinking`: see `thinking_of`; empty for a prompt that ends in the answer.
    - `begun`: the message that the answer continues, which may end within the reasoning.
    """
    facts = GenerationFacts.of(inference.spec(model))
    calls = tools.reader(facts.chat_template if tools.tools else "")
    marks = None if has_form else facts.reasoning_marks
    reasoning = "" if thinking in facts.opens_reasoning else None
    if marks and marks[0] in (last := begun.rpartition(marks[1])[2]):
        reasoning = last.rpartition(marks[0])[2]
    return AnswerReader(calls, marks, begun=reasoning, end_id=facts.reasoning_end_id)
