"""The bodies of OpenAI's chat completions and completions."""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from neuronpipe.api.v1.tasks_pb2 import ChatMessage
from neuronpipe.core.generation_options import OPTIONS
from neuronpipe.core.model import with_fields
from neuronpipe.core.parsing import check_depth
from neuronpipe.doors.http.bodies import MISSING
from neuronpipe.doors.http.body_types import (
    WHOLE,
    Body,
    Count,
    KeptTokens,
    Many,
    ModelBody,
    Role,
    TokenIds,
    Whole,
    fixed,
    only,
    option_field,
)
from neuronpipe.doors.http.call_formats import read_arguments
from neuronpipe.doors.http.unknown_fields import HARMLESS

# Fields of parts of answers, also LangChain's.
_OF_ANSWERS = HARMLESS | {"annotations", "logprobs", "id", "index"}


class TextPart(Body):
    harmless = _OF_ANSWERS

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """A model's refusal, as a part of an earlier message. The template gets the refusal as a text."""

    harmless = _OF_ANSWERS

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


SaidPart = Annotated[TextPart | RefusalPart, Discriminator("type")]


class OpenBody(Body):
    """An object that a template gets as it is, with any further fields."""

    model_config = ConfigDict(extra="allow")


class CalledFunction(OpenBody):
    name: str
    arguments: Annotated[str | dict[str, Any], Field(description="JSON, which the template gets as an object")]


class ToolCall(OpenBody):
    type: Literal["function"] = "function"
    function: CalledFunction


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type") or "object"
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError('must have the type "object"')
    return schema


Parameters = Annotated[
    Annotated[dict[str, Any], AfterValidator(_of_object)] | None, Field(description="the JSON Schema of its arguments")
]


class Function(OpenBody):
    """A function. The fields are in the order in which models learn them, because templates write it as it is."""

    name: FunctionName
    description: str | None = None
    parameters: Parameters = None
    strict: bool | None = None


class Tool(OpenBody):
    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    name: str


class ChosenTool(Body):
    type: Literal["function"] = "function"
    function: ChosenFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[Many[ChosenTool], Field(min_length=1)]


class AllowedChoice(Body):
    """OpenAI's choice of some tools that may be called. The template gets all tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind_of_choice(choice: Any) -> str:
    kind = choice.get("type") if isinstance(choice, dict) else None
    return kind if kind == "allowed_tools" else "function"


NamedChoice = Annotated[
    Annotated[ChosenTool, Tag("function")] | Annotated[AllowedChoice, Tag("allowed_tools")],
    Discriminator(_kind_of_choice),
]


# Words for models of OpenAI. Templates of other models, such as GPT-OSS, know some of them.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Verbosity = Literal["low", "medium", "high"]


# Roles whose messages say something in any case.
_WITH_CONTENT = ("user", "system")
# Further fields of messages, which clients send again as answers have them, or which many templates read.
_OF_MESSAGES = {"name", "reasoning", "reasoning_content", "reasoning_details", "thinking", "annotations", "prefix"}


class SaidMessage(OpenBody):
    """The template gets all fields of a message, such as `name`, `reasoning_content` and `prefix`."""

    role: Role
    content: Annotated[str | Many[SaidPart] | None, Field(description="a text, or parts of it")] = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Annotated[Any, only(advice="use tool_calls")] = None
    refusal: Annotated[str | None, Field(description="content of an earlier message that has no other content")] = None
    audio: Annotated[Any, only()] = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.role in _WITH_CONTENT and self.content is None and self.refusal is None:
            raise PydanticCustomError(MISSING, "is missing", {"field": "content"})
        return self

    def message(self) -> ChatMessage:
        """Returns the message for a chat template, with further fields as JSON. Calls get their arguments parsed."""
        fields = self.model_dump(exclude_none=True, exclude={"role", "content", "refusal", "audio", "annotations"})
        calls = fields.pop("tool_calls", None)
        for call in calls or ():
            if isinstance(arguments := call["function"]["arguments"], str):
                check_depth("messages.tool_calls.function.arguments", arguments.encode())
                with contextlib.suppress(ValueError):  # some clients write no arguments as an empty text
                    call["function"]["arguments"] = read_arguments(arguments)
        if calls:
            # transformers gives no content either, by which some templates recognise calls.
            fields |= {"tool_calls": calls} | ({"content": None} if self.content is None else {})
        content = self.content or self.refusal or ""
        return ChatMessage(
            role=self.role,
            content=content if isinstance(content, str) else "".join(part.text for part in content),
            fields=json.dumps(fields, ensure_ascii=False) if fields else "",
        )


def unread_fields(messages: Sequence[SaidMessage], tools: Sequence[Tool], template: str) -> Iterator[str]:
    """Yields the paths of unknown fields of messages and tools that the template does not name."""
    bodies: list[tuple[str, OpenBody]] = [(f"messages[{index}]", message) for index, message in enumerate(messages)]
    for index, tool in enumerate(tools):
        bodies += [(f"tools[{index}]", tool), (f"tools[{index}].function", tool.function)]
    words: set[str] | None = None
    for place, body in bodies:
        for name in body.model_extra or ():
            if isinstance(body, SaidMessage) and name in _OF_MESSAGES:
                continue
            words = {*re.findall(r"\w+", template)} if words is None else words
            if name not in words:
                yield f"{place}.{name}"


class StreamOptions(Body):
    harmless = HARMLESS | {"include_obfuscation"}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="vLLM's: `usage` so far in each chunk")


class NamedSchema(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="changes nothing: the text is valid in any case")


class ResponseFormat(Body):
    """The format of OpenAI. A format of TGI has a `value`, a format of llama.cpp and others a `schema`."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    value: str | dict[str, Any] | None = Field(None, description="a JSON Schema, or a regular expression")


class StructuredOutputs(Body):
    """vLLM's format, with one field."""

    json_schema: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choices: Many[str] | None = Field(None, alias="choice")
    grammar: str | None = None


@with_fields(
    {option.openai: option_field(option) for option in OPTIONS.values() if option.openai}
    | fixed(use_beam_search=False, include_stop_str_in_output=False, allowed_token_ids=[], bad_words=[])
    | fixed(logits_processors=[], return_tokens_as_token_ids=False, detokenize=True, include_reasoning=True)
)
class CompletionOptions(ModelBody):
    """Fields of chats and completions, and the options of generation, which are made of their declarations.

    The fields after `stream_options` are vLLM's.
    """

    max_tokens: Count | None = None
    seed: Annotated[int, WHOLE] | None = None
    n: Annotated[Count | None, Field(description="N texts, drawn at random")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 32, description="0 and -1: all"), WHOLE] | None = None
    # Fields of SGLang and vLLM that are not supported.
    regex: Annotated[Any, only(advice="use guided_regex")] = None
    ebnf: Annotated[Any, only(advice="use guided_grammar")] = None
    ignore_eos: bool | None = Field(None, description="vLLM's: the text has max_tokens, unless a stop string ends it")
    return_token_ids: bool | None = Field(None, description="vLLM's: `token_ids` in each choice")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


@with_fields(fixed(modalities=["text"], echo=False, add_special_tokens=False, documents=[]))
class ChatRequest(CompletionOptions):
    messages: Annotated[Many[SaidMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tools: Annotated[Many[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="whether an answer may call several functions")
    functions: Annotated[Any, only([], advice="use tools")] = None
    function_call: Annotated[Any, only("none", "auto", advice="use tool_choice")] = None
    reasoning_effort: Effort | None = Field(None, description="a variable of the model's template")
    verbosity: Verbosity | None = Field(None, description="a variable of the model's template")
    # Fields of vLLM.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="whether the text continues the last message")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the model's template")


@with_fields(fixed(suffix="", add_special_tokens=True))
class CompletionRequest(CompletionOptions):
    prompt: Annotated[
        str | Many[str] | TokenIds | Many[TokenIds],
        Field(description="a text or its token ids; or several, of which each gets a choice"),
    ]
    max_tokens: Whole | None = Field(None, description="0 only with echo and logprobs: to score the prompt")
    logprobs: Whole | None = None
    echo: Annotated[bool | None, Field(description="the prompt before the text")] = None
    best_of: Count | None = Field(None, description="number of texts to choose from: the same as n")
    truncate_prompt_tokens: KeptTokens | None = Field(
        None, description="vLLM's: tokens that are kept of the end of a prompt; -1: as many as there is room for"
    )
