"""OpenAI's responses: a text that continues a conversation, or calls of its functions. Nothing is stored."""

import json
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from neuronpipe.api.v1.inference_pb2 import Usage
from neuronpipe.api.v1.tasks_pb2 import FinishReason, GenerationOptions, TaskInput, TextGenerationInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generation_options import OPTIONS, message_fields, with_drawing
from neuronpipe.core.model import with_fields
from neuronpipe.doors.http import openai_text_bodies as bodies
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.body_types import Body, Count, Many, ModelBody, Role, fixed, only, option_field
from neuronpipe.doors.http.events import event_response
from neuronpipe.doors.http.exchange import Answers, HttpRequest, HttpResponse, Route, named
from neuronpipe.doors.http.openai_text_bodies import RefusalPart, SaidMessage
from neuronpipe.doors.http.problems import OPENAI_ERROR, Problem
from neuronpipe.doors.http.reasoning import (
    AnswerReader,
    ReasoningText,
    effort_variables,
    facts_of,
    name_unread,
    reader_of_answer,
    switched,
    thinking_of,
)
from neuronpipe.doors.http.tool_calls import ToolChoice, ToolUse
from neuronpipe.doors.http.unknown_fields import HARMLESS, ignore
from neuronpipe.doors.inference import Inference, ModelCall
from neuronpipe.gateway.requests import GeneratedPart, InferenceResult, TextEvent
from neuronpipe.tasks.text_options import form_of

_DRAWING = ("temperature", "top_p")
_FIELDS = {
    **dict.fromkeys(("messages", "prompt"), "input"),
    "options.max_new_tokens": "max_output_tokens",
    "options.json_schema": "text.format.schema",
    **{f"options.{name}": name for name in _DRAWING},
}


class AnsweredBody(Body):
    """A part of an answer that a client may send again, with fields that only answers have."""

    harmless = HARMLESS | {"id", "status", "annotations", "logprobs", "phase", "parsed", "parsed_arguments"}


class SaidPart(AnsweredBody):
    type: Literal["input_text", "output_text", "text"]
    text: str


Parts = Many[Annotated[SaidPart | RefusalPart, Discriminator("type")]]
# Clients such as the AI SDK send references to items if the request has `store`.
_ITEMS = "send messages, function_call and function_call_output as they are, with store: false, as none is stored"
_NONE_STORED = "send the whole conversation, as none is stored"


class SaidItem(AnsweredBody):
    type: Annotated[str, only("message", advice=_ITEMS)] = "message"
    role: Role
    content: str | Parts


class ReasoningPart(AnsweredBody):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(AnsweredBody):
    """The reasoning of an answer that a client sends again, with the message or the calls behind it."""

    harmless = AnsweredBody.harmless | {"summary", "encrypted_content"}

    type: Literal["reasoning"]
    content: Many[ReasoningPart] | None = None


class CallItem(AnsweredBody):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(AnsweredBody):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else None
    return kind if kind in ("reasoning", "function_call", "function_call_output") else "message"


InputItem = Annotated[
    Annotated[SaidItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    Discriminator(_kind),
]


class FunctionTool(Body):
    type: Literal["function"]
    name: bodies.FunctionName
    description: str | None = None
    parameters: bodies.Parameters = None
    strict: bool | None = None


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class AllowedFunctions(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Many[NamedFunction], Field(min_length=1)]


NamedChoice = Annotated[NamedFunction | AllowedFunctions, Discriminator("type")]


class Reasoning(Body):
    effort: bodies.Effort | None = Field(None, description="a variable of the model's template: reasoning_effort")
    summary: Annotated[Any, only("auto", "concise", "detailed")] = None
    generate_summary: Annotated[Any, only("auto", "concise", "detailed")] = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: bodies.Verbosity | None = Field(None, description="a variable of the model's template")


@with_fields(
    {name: option_field(OPTIONS[name]) for name in _DRAWING}
    | fixed(background=False, top_logprobs=0, truncation="disabled")
)
class ResponsesRequest(ModelBody):
    harmless = HARMLESS | {"max_tool_calls"}  # a limit of OpenAI's own tools

    input: str | Annotated[Many[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    stream_options: bodies.StreamOptions | None = None
    text: TextOptions = TextOptions()
    tools: Annotated[Many[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    # Fields that need stored responses, which are not supported.
    previous_response_id: Annotated[Any, only(advice=_NONE_STORED)] = None
    conversation: Annotated[Any, only(advice=_NONE_STORED)] = None
    include: Annotated[Any, only([], ["reasoning.encrypted_content"])] = None
    reasoning: Reasoning = Reasoning()


_RESPONSE = named(
    "Response",
    id=str,
    object=Literal["response"],
    created_at=int,
    model=str,
    status=Literal["completed", "incomplete", "in_progress"],
    output=list[dict[str, Any]],
    usage=dict[str, Any] | None,
)
_SUMMARY = "OpenAI: a text that continues a conversation, or calls of its functions, whole or as events"
RESPONSES = Route("POST", "/v1/responses", _SUMMARY, ResponsesRequest, _RESPONSE, error_form=OPENAI_ERROR)

_COUNTED = named("ResponseTokens", object=Literal["response.input_tokens"], input_tokens=int)
_COUNTS = "OpenAI: the number of tokens of a conversation"
COUNT = Route("POST", "/v1/responses/input_tokens", _COUNTS, ResponsesRequest, _COUNTED, error_form=OPENAI_ERROR)


async def _responses(inference: Inference, request: HttpRequest, *, counts: bool = False) -> HttpResponse:
    """Answers POST /v1/responses, or, if it only `counts` tokens, /v1/responses/input_tokens."""
    body: ResponsesRequest = request.body
    model = inference.choose(request.model(body.model), "text_generation")
    tools, options = _tool_use(body), _options(body)
    facts, form = facts_of(inference, model), "text.format" if body.text.format else ""
    tools.set_form(options, "strict", form, facts)
    for name in ("summary", "generate_summary"):
        if name in body.reasoning.model_fields_set:
            ignore(f"reasoning.{name}", "is not supported: the reasoning comes as it is")
    said, fields = _messages_of(body)
    messages = [message.message() for message in said]
    input = TextGenerationInput(messages=messages, tools=tools.for_template, options=options)
    effort = body.reasoning.effort
    words = {"reasoning_effort": effort, "verbosity": body.text.verbosity}
    fields_of_words = {"reasoning.effort": effort_variables(effort), "text.verbosity": ("verbosity",)}
    given = {field: names for field, names in fields_of_words.items() if words[names[0]]}
    name_unread(facts, given)
    variables = switched(effort, {name: word for name, word in words.items() if word})
    if variables:
        input.template_arguments = json.dumps(variables)
    model_call = ModelCall(request.call, model, _FIELDS | fields | tools.fields("parameters", form))
    if counts:
        tokens = await inference.count_tokens(model_call, TaskInput(text_generation=input))
        return HttpResponse(write_body({"object": "response.input_tokens", "input_tokens": tokens}))

    def new_writer() -> _ResponseWriter:
        has_form, thinking = bool(form_of(options)), thinking_of(variables)
        reader = reader_of_answer(inference, model, tools, has_form=has_form, thinking=thinking)
        return _ResponseWriter(request.call.request_id, model.name, body, reader)

    if body.stream:
        events = await inference.stream(model_call, TaskInput(text_generation=input))
        writer = new_writer()
        return event_response(writer.events(events), replace(OPENAI_ERROR, write=writer.error))
    result = await inference.infer_one(model_call, TaskInput(text_generation=input))
    return HttpResponse(write_body(new_writer().whole(result)))


ANSWERS: Answers[Inference] = [(RESPONSES, _responses), (COUNT, partial(_responses, counts=True))]


_ONLY_REASONING = {"role", "reasoning_content"}


def _messages_of(body: ResponsesRequest) -> tuple[list[SaidMessage], dict[str, str]]:
    """Returns the messages of a chat, and the request's names of their fields.

    The reasoning, the words and the calls of an answer are a message of the assistant.
    """
    said: list[dict[str, Any]] = []
    fields: dict[str, str] = {}

    def say(message: dict[str, Any], place: str, text: str = "") -> None:
        ours = f"messages[{len(said)}]"
        fields.update({ours: place, f"{ours}.role": f"{place}.role", f"{ours}.content": place + text})
        said.append(message)

    if body.instructions is not None:
        say({"role": "system", "content": body.instructions}, "instructions")
    if isinstance(body.input, str):
        say({"role": "user", "content": body.input}, "input")
    for number, item in enumerate(body.input if isinstance(body.input, list) else ()):
        place = f"input[{number}]"
        if isinstance(item, SaidItem) and item.role == "assistant" and said and said[-1].keys() == _ONLY_REASONING:
            said[-1]["content"] = _text(item.content)
        elif isinstance(item, SaidItem):
            say({"role": item.role, "content": _text(item.content)}, place, ".content")
        elif isinstance(item, ReasoningItem):
            say({"role": "assistant", "reasoning_content": _text(item.content or [])}, place, ".content")
        elif isinstance(item, CallOutputItem):
            say({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}, place, ".output")
        else:
            if not said or said[-1]["role"] != "assistant":
                say({"role": "assistant"}, place)
            function = {"name": item.name, "arguments": item.arguments}
            said[-1].setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    return [SaidMessage.model_validate(message) for message in said], fields


def _tool_use(body: ResponsesRequest) -> ToolUse:
    functions = [tool.model_dump(exclude_unset=True, exclude={"type"}) for tool in body.tools or ()]
    tools = [{"type": "function", "function": function} for function in functions]
    return ToolUse.of(tools, _tool_choice(body.tool_choice), has_several=body.parallel_tool_calls is not False)


def _tool_choice(chosen: str | NamedFunction | AllowedFunctions | None) -> ToolChoice:
    if isinstance(chosen, NamedFunction):
        return ToolChoice(function=chosen.name, field="tool_choice.name")
    if isinstance(chosen, AllowedFunctions):
        names = [tool.name for tool in chosen.tools]
        return ToolChoice(chosen.mode, field="tool_choice.tools", allowed=names)
    return ToolChoice(chosen)


def _text(content: str | Sequence[SaidPart | RefusalPart | ReasoningPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _options(body: ResponsesRequest) -> GenerationOptions:
    options = with_drawing({name: value for name in _DRAWING if (value := getattr(body, name)) is not None})
    form = body.text.format
    if form and form.schema_ is not None:
        if form.type == "text":
            raise InvalidInput("text.format.type", "is text, with which there is no schema")
        options["json_schema"] = form.schema_
    elif form and form.type == "json_schema":
        raise InvalidInput("text.format.schema", "is missing")
    elif form and form.type == "json_object":
        options["json_object"] = True
    return GenerationOptions(**message_fields(options), max_new_tokens=body.max_output_tokens)


class _ResponseWriter:
    """Writes one response, whole or as events. A whole response is the end of its events."""

    def __init__(self, request_id: str, model: str, body: ResponsesRequest, reader: AnswerReader) -> None:
        choice, form = body.tool_choice, body.text.format or TextFormat(type="text")
        self._head = body.model_dump(include={"instructions", "max_output_tokens", *_DRAWING}) | {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "metadata": body.metadata or {},
            "model": model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "text": {"format": form.model_dump(by_alias=True, exclude_unset=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "truncation": "disabled",
        }
        self._request_id, self._reader = request_id, reader
        # The last item is open until it is closed; its text or arguments are in the pieces.
        self._output: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        self._number = -1

    def whole(self, result: InferenceResult) -> dict[str, Any]:
        """Returns the response with its items."""
        self._reader.count(result.texts[0].token_ids)
        *_, completed = self._end_response(result, result.texts[0].text)
        response: dict[str, Any] = completed["response"]
        return response

    async def events(self, events: AsyncGenerator[TextEvent, None]) -> AsyncGenerator[dict[str, Any], None]:
        """Yields OpenAI's events of a text."""
        began = self._head | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield self._event("created", response=began)
        yield self._event("in_progress", response=began)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, GeneratedPart):
                    self._reader.count(event.token_ids)
                    written = self._read(event.text)
                elif isinstance(event, InferenceResult):
                    written = self._end_response(event, "")
                else:
                    continue
                for part in written:
                    yield part

    def error(self, problem: Problem) -> dict[str, Any]:
        """Returns the event of an error, with its fields in `error` and beside it: clients of OpenAI read either."""
        self._number += 1
        written = OPENAI_ERROR.write(problem)
        return {**written["error"], **written, "type": "error", "sequence_number": self._number}

    def _read(self, text: str, *, is_last: bool = False) -> Iterator[dict[str, Any]]:
        """Yields the events of a part of the text."""
        for part in self._reader.read(text, is_last=is_last):
            if isinstance(part, str):
                yield from self._add_text(part, "reasoning" if isinstance(part, ReasoningText) else "message")
            elif "id" in part:
                call = {"call_id": part["id"], "name": part["function"]["name"], "arguments": ""}
                yield from self._begin_item("fc", {"type": "function_call", **call})
            else:
                self._pieces.append(part["function"]["arguments"])
                yield self._event("function_call_arguments.delta", **self._place(), delta=self._pieces[-1])

    def _add_text(self, text: str, kind: str = "message") -> Iterator[dict[str, Any]]:
        if not self._output or self._output[-1]["type"] != kind:
            id, fields = _SAID_ITEMS[kind]
            yield from self._begin_item(id, {"type": kind, **fields, "content": []})
            yield self._event("content_part.added", **self._place(), content_index=0, part=_part(kind, ""))
        if text:
            self._pieces.append(text)
            yield self._part_event(kind, "delta", delta=str(text))

    def _part_event(self, kind: str, step: str, **fields: Any) -> dict[str, Any]:
        place = {**self._place(), "content_index": 0}
        if kind == "reasoning":
            return self._event(f"reasoning_text.{step}", **place, **fields)
        return self._event(f"output_text.{step}", **place, **fields, logprobs=[])

    def _begin_item(self, kind: str, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close_item("completed")
        id = f"{kind}_{self._request_id}_{len(self._output)}"
        self._output.append({"id": id, **item, "status": "in_progress"})
        yield self._event("output_item.added", output_index=len(self._output) - 1, item=self._output[-1])

    def _close_item(self, status: str) -> Iterator[dict[str, Any]]:
        """Yields the events that close the open item."""
        if not self._output:
            return
        item, text, place = self._output[-1], "".join(self._pieces), self._place()
        if item["type"] != "function_call":
            part = _part(item["type"], text)
            yield self._part_event(item["type"], "done", text=text)
            yield self._event("content_part.done", **place, content_index=0, part=part)
            content: dict[str, Any] = {"content": [part]}
        else:
            yield self._event("function_call_arguments.done", **place, name=item["name"], arguments=text)
            content = {"arguments": text}
        self._output[-1], self._pieces = item | content | {"status": status}, []
        yield self._event("output_item.done", output_index=place["output_index"], item=self._output[-1])

    def _end_response(self, result: InferenceResult, rest: str) -> Iterator[dict[str, Any]]:
        """Yields the events of the rest of the text; the last event has the response."""
        is_cut = result.texts[0].finish_reason == FinishReason.FINISH_REASON_LENGTH
        status = "incomplete" if is_cut else "completed"
        yield from self._read(rest, is_last=True)
        if not self._output or (self._output[-1]["type"] == "reasoning" and not is_cut):
            yield from self._add_text("")
        yield from self._close_item(status)
        end = {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": _usage(result.usage, self._reader.reasoning_tokens),
        }
        yield self._event(status, response=self._head | end)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{name}", "sequence_number": self._number, **fields}


# Kinds of items with a text → the beginning of their ids, and their further fields.
_SAID_ITEMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "message": ("msg", {"role": "assistant"}),
    "reasoning": ("rs", {"summary": []}),
}


def _part(kind: str, text: str) -> dict[str, Any]:
    """Returns the part of an item that has its text."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.tokens + usage.generated_tokens,
    }
