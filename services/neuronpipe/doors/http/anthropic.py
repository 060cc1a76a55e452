"""Anthropic's messages, whole and as events, and the number of their tokens."""

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from functools import partial
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field

from neuronpipe.api.v1.inference_pb2 import GenerateStart
from neuronpipe.api.v1.tasks_pb2 import FinishReason, GenerationOptions, TaskInput, TextGenerationInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generation_options import OPTIONS, message_fields, with_drawing
from neuronpipe.core.model import with_fields
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.body_types import Body, Count, Many, ModelBody, only, option_field
from neuronpipe.doors.http.events import event_response
from neuronpipe.doors.http.exchange import Answers, HttpRequest, HttpResponse, Route, named
from neuronpipe.doors.http.openai_text_bodies import FunctionName, Parameters, SaidMessage
from neuronpipe.doors.http.problems import ANTHROPIC_ERROR
from neuronpipe.doors.http.reasoning import (
    THINKING_VARIABLES,
    AnswerReader,
    ReasoningText,
    facts_of,
    name_unread,
    reader_of_answer,
    thinking_of,
)
from neuronpipe.doors.http.tool_calls import ToolChoice, ToolUse
from neuronpipe.doors.http.unknown_fields import HARMLESS
from neuronpipe.doors.inference import Inference, ModelCall
from neuronpipe.gateway.requests import GeneratedPart, InferenceResult, TextEvent
from neuronpipe.tasks.text_options import form_of

_DRAWING = ("temperature", "top_p", "top_k")
_FIELDS = {
    "prompt": "messages",
    "options.max_new_tokens": "max_tokens",
    "options.stop_strings": "stop_sequences",
    "options.json_schema": "output_config.format.schema",
    **{f"options.{name}": name for name in _DRAWING},
}
_CHOICES = {"any": "required", "auto": "auto", "none": "none"}
_REASONS = {FinishReason.FINISH_REASON_LENGTH: "max_tokens", FinishReason.FINISH_REASON_STOP_STRING: "stop_sequence"}
# Kinds of blocks → the field of their content, and the type of its deltas.
_DELTAS = {
    "thinking": ("thinking", "thinking_delta"),
    "text": ("text", "text_delta"),
    "tool_use": ("partial_json", "input_json_delta"),
}


def _without_media(block: Any) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in ("image", "document"):
        raise ValueError(f"{kind}s are not supported; send texts")
    return block


_NO_MEDIA = BeforeValidator(_without_media)


class TextBlock(Body):
    harmless = HARMLESS | {"citations"}

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    harmless = HARMLESS | {"signature"}

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """Reasoning that only Anthropic can read. The template does not get it."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Body):
    harmless = HARMLESS | {"caller"}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Body):
    harmless = HARMLESS | {"is_error"}

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[Annotated[TextBlock, _NO_MEDIA]] = ""


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Discriminator("type"), _NO_MEDIA
]


class Message(Body):
    role: Literal["user", "assistant"]
    content: str | Many[Block]


class InputTool(Body):
    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: Parameters = None
    strict: bool | None = None


class InputToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """The variables `enable_thinking` and `thinking` of the model's template."""

    harmless = HARMLESS | {"budget_tokens", "display"}

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = Field(None, description="the form of the text")
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="a variable of the model's template: reasoning_effort"
    )


class CountedMessages(ModelBody):
    messages: Annotated[Many[Message], Field(min_length=1)]
    system: str | Many[TextBlock] = ""
    tools: Annotated[Many[InputTool], Field(max_length=128)] | None = None
    tool_choice: InputToolChoice = InputToolChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    # With a thread a client sends new turns only.
    thread: Annotated[Any, only(advice="send the whole conversation; tool_runner(thread=False)")] = None


@with_fields({name: option_field(OPTIONS[name]) for name in _DRAWING})
class MessagesRequest(CountedMessages):
    """Without an option of drawing, the most probable tokens are taken."""

    max_tokens: Count
    stop_sequences: Many[str] | None = None
    stream: bool = False


_MESSAGE = named(
    "AnthropicMessage",
    id=str,
    type=Literal["message"],
    role=Literal["assistant"],
    model=str,
    content=list[dict[str, Any]],
    stop_reason=Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None,
    stop_sequence=str | None,
    usage=dict[str, Any],
)
# Anthropic's clients read the request's id from this header.
_post = partial(Route, "POST", error_form=ANTHROPIC_ERROR, id_headers=(b"request-id",))
MESSAGES = _post("/v1/messages", "Anthropic: the next message, whole or as events", MessagesRequest, _MESSAGE)
COUNT = _post(
    "/v1/messages/count_tokens",
    "Anthropic: the number of tokens of messages",
    CountedMessages,
    named("MessageTokens", input_tokens=int),
)


async def _messages(inference: Inference, request: HttpRequest) -> HttpResponse:
    body: MessagesRequest = request.body
    model = inference.choose(request.model(body.model), "text_generation")
    options = {name: value for name in _DRAWING if (value := getattr(body, name)) is not None}
    options |= {"stop_strings": body.stop_sequences} if body.stop_sequences else {}
    options |= {"json_schema": form.schema_} if (form := body.output_config.format) else {}
    tools = _tool_use(body)
    generation = GenerationOptions(**message_fields(with_drawing(options)), max_new_tokens=body.max_tokens)
    facts = facts_of(inference, model)
    if body.thinking is not None:
        name_unread(facts, {"thinking": THINKING_VARIABLES})
    if body.output_config.effort:
        name_unread(facts, {"output_config.effort": ("reasoning_effort",)})
    tools.set_form(generation, "strict", _form(body), facts)
    input, fields = _input(body, tools, generation)
    model_call = ModelCall(request.call, model, fields)

    def new_writer() -> _MessageWriter:
        chat, thinking, begun = input.text_generation, thinking_of(_variables(body)), ""
        if chat.continue_final_message:
            thinking, begun = "", chat.messages[-1].content
        has_form = bool(form_of(generation))
        reader = reader_of_answer(inference, model, tools, has_form=has_form, thinking=thinking, begun=begun)
        return _MessageWriter(request.call.request_id, model.name, reader)

    if body.stream:
        events = await inference.stream(model_call, input)
        return event_response(new_writer().events(events), ANTHROPIC_ERROR)
    result = await inference.infer_one(model_call, input)
    return HttpResponse(write_body(new_writer().whole(result)))


async def _count(inference: Inference, request: HttpRequest) -> HttpResponse:
    """Answers POST /v1/messages/count_tokens."""
    body: CountedMessages = request.body
    model = inference.choose(request.model(body.model), "text_generation")
    input, fields = _input(body, _tool_use(body), GenerationOptions())
    tokens = await inference.count_tokens(ModelCall(request.call, model, fields), input)
    return HttpResponse(write_body({"input_tokens": tokens}))


ANSWERS: Answers[Inference] = [(MESSAGES, _messages), (COUNT, _count)]


def _form(body: CountedMessages) -> str:
    """Returns the field that sets the form of the answer, or an empty string."""
    return "output_config.format" if body.output_config.format else ""


def _tool_use(body: CountedMessages) -> ToolUse:
    tools = []
    for tool in body.tools or ():
        function: dict[str, Any] = {"name": tool.name, "description": tool.description}
        function |= {"parameters": tool.input_schema, "strict": tool.strict}
        present = {name: value for name, value in function.items() if value is not None}
        tools.append({"type": "function", "function": present})
    chosen, choice = body.tool_choice, ToolChoice(_CHOICES.get(body.tool_choice.type))
    if chosen.type == "tool":
        if chosen.name is None:
            raise InvalidInput("tool_choice.name", "is missing")
        choice = ToolChoice(function=chosen.name, field="tool_choice.name")
    elif chosen.name is not None:
        raise InvalidInput("tool_choice.name", f'has an effect only with the type "tool", not with "{chosen.type}"')
    return ToolUse.of(tools, choice, has_several=not chosen.disable_parallel_tool_use)


def _variables(body: CountedMessages) -> dict[str, Any]:
    """Returns the variables of the template that a request sets."""
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables = dict.fromkeys(THINKING_VARIABLES, body.thinking.type != "disabled")
    if effort := body.output_config.effort:
        variables["reasoning_effort"] = effort
    return variables


def _input(body: CountedMessages, tools: ToolUse, options: GenerationOptions) -> tuple[TaskInput, dict[str, str]]:
    """Returns the input of a request, and its names of the input's fields."""
    said: list[dict[str, Any]] = []
    fields: dict[str, str] = {}

    def say(place: str, role: str, content: str, content_place: str = "", **further: Any) -> None:
        ours = f"messages[{len(said)}]"
        fields.update({ours: place, f"{ours}.role": place, f"{ours}.content": content_place or place})
        said.append({"role": role, "content": content, **further})

    if system := _text(body.system):
        say("system", "system", system)
    # Consecutive messages of a role are one turn, as in Anthropic's API: many templates refuse them otherwise.
    for role, turn in groupby(enumerate(body.messages), key=lambda numbered: numbered[1].role):
        numbers, messages = zip(*turn, strict=True)
        place = f"messages[{numbers[0]}]" + (f" to messages[{numbers[-1]}]" if numbers[1:] else "")
        blocks = [
            (f"messages[{number}].content[{index}]", block)
            for number, message in zip(numbers, messages, strict=True)
            for index, block in enumerate(message.content if isinstance(message.content, list) else ())
        ]
        results = [(at, block) for at, block in blocks if isinstance(block, ToolResultBlock)]
        for at, block in results:
            say(at, "tool", _text(block.content), f"{at}.content", tool_call_id=block.tool_use_id)
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            for _, block in blocks
            if isinstance(block, ToolUseBlock)
        ]
        thoughts = "".join(block.thinking for _, block in blocks if isinstance(block, ThinkingBlock))
        further: dict[str, Any] = {"tool_calls": calls} if calls else {}
        further |= {"reasoning_content": thoughts} if thoughts else {}
        text = "\n".join(filter(None, (_text(message.content) for message in messages)))
        if text or further or not results:
            say(place, role, text, "" if numbers[1:] else f"{place}.content", **further)
    variables = _variables(body)
    input = TextGenerationInput(
        messages=[SaidMessage.model_validate(message).message() for message in said],
        tools=tools.for_template,
        template_arguments=json.dumps(variables) if variables else "",
        continue_final_message=said[-1]["role"] == "assistant" and "tool_calls" not in said[-1],
        options=options,
    )
    return TaskInput(text_generation=input), _FIELDS | fields | tools.fields("input_schema", _form(body))


def _text(content: Any) -> str:
    """Returns the text of blocks."""
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content if isinstance(block, TextBlock))


class _MessageWriter:
    """Writes a message, whole or as events. A whole message has the blocks of its events."""

    def __init__(self, request_id: str, model: str, reader: AnswerReader) -> None:
        self._head = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "stop_sequence": None,
        }
        self._reader = reader
        # The last block is open until it is closed; its content is in the pieces.
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] = []

    def whole(self, result: InferenceResult) -> dict[str, Any]:
        """Returns the message with its blocks."""
        self._reader.count(result.texts[0].token_ids)
        *_, end, _ = self._end_message(result, result.texts[0].text)
        usage = {"input_tokens": result.usage.tokens, **end["usage"]}
        return self._head | {"content": self._blocks, **end["delta"], "usage": usage}

    async def events(self, events: AsyncGenerator[TextEvent, None]) -> AsyncGenerator[dict[str, Any], None]:
        """Yields Anthropic's events of a text."""
        async with aclosing(events):
            async for event in events:
                if isinstance(event, GenerateStart):
                    usage = {"input_tokens": event.prompt_tokens, "output_tokens": 0}
                    message: dict[str, Any] = self._head | {"content": [], "stop_reason": None, "usage": usage}
                    yield {"type": "message_start", "message": message}
                    continue
                if isinstance(event, GeneratedPart):
                    self._reader.count(event.token_ids)
                written = self._read(event.text) if isinstance(event, GeneratedPart) else self._end_message(event, "")
                for part in written:
                    yield part

    def _read(self, text: str, *, is_last: bool = False) -> Iterator[dict[str, Any]]:
        for part in self._reader.read(text, is_last=is_last):
            if isinstance(part, ReasoningText):
                yield from self._add_text("thinking", part, {"thinking": "", "signature": ""})
            elif isinstance(part, str):
                yield from self._add_text("text", part, {"text": ""})
            elif "id" in part:
                yield from self._begin_block(
                    {"type": "tool_use", "id": part["id"], "name": part["function"]["name"], "input": {}}
                )
            else:
                yield self._delta(part["function"]["arguments"])

    def _add_text(self, kind: str, text: str, empty: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not self._blocks or self._blocks[-1]["type"] != kind:
            yield from self._begin_block({"type": kind, **empty})
        yield self._delta(text)

    def _begin_block(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close_block()
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _delta(self, piece: str) -> dict[str, Any]:
        self._pieces.append(piece)
        name, kind = _DELTAS[self._blocks[-1]["type"]]
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": {"type": kind, name: piece}}

    def _close_block(self) -> Iterator[dict[str, Any]]:
        """Yields the event that closes the open block."""
        if not self._blocks:
            return
        block, text = self._blocks[-1], "".join(self._pieces)
        content: Any = {block["type"]: text}
        if block["type"] == "tool_use":
            content = {"input": {}}
            with suppress(ValueError):  # arguments that were cut
                # Half a surrogate pair, which no answer may have, becomes a question mark.
                written = json.dumps(json.loads(text or "{}"), ensure_ascii=False).encode(errors="replace")
                content["input"] = json.loads(written)
        self._blocks[-1], self._pieces = block | content, []
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _end_message(self, result: InferenceResult, rest: str) -> Iterator[dict[str, Any]]:
        """Yields the events of the rest of the text; the `message_delta` has the reason for the end."""
        yield from self._read(rest, is_last=True)
        yield from self._close_block()
        reason = _REASONS.get(result.texts[0].finish_reason, "end_turn")
        if reason == "end_turn" and any(block["type"] == "tool_use" for block in self._blocks):
            reason = "tool_use"
        details = {"thinking_tokens": self._reader.reasoning_tokens}
        usage = {"output_tokens": result.usage.generated_tokens, "output_tokens_details": details}
        delta = {"stop_reason": reason, "stop_sequence": result.texts[0].stop_string or None}
        yield {"type": "message_delta", "delta": delta, "usage": usage}
        yield {"type": "message_stop"}
