"""OpenAI's responses: a text that continues a conversation. Nothing is stored, and no tools are called."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import Field

from neuronpipe.api.v1.inference_pb2 import Usage
from neuronpipe.api.v1.tasks_pb2 import (
    ChatMessage,
    FinishReason,
    GeneratedText,
    GenerationOptions,
    TaskInput,
    TextGenerationInput,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generation_options import OPTIONS, message_fields, with_drawing
from neuronpipe.core.model import with_fields
from neuronpipe.doors.http.bodies import Body, Count, Many, Role, Unsupported, only, option_field, write_body
from neuronpipe.doors.http.events import event_response
from neuronpipe.doors.http.exchange import HttpHandler, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.problems import OPENAI_ERROR
from neuronpipe.doors.inference import Inference, ModelChoice
from neuronpipe.doors.text_stream import Event
from neuronpipe.gateway.inference import GeneratedPart, InferenceResult

_DRAWING = ("temperature", "top_p")
_FIELDS = {
    "messages": "input",
    "options.max_new_tokens": "max_output_tokens",
    "options.json_schema": "text.format.schema",
    **{f"options.{name}": name for name in _DRAWING},
}


class SaidPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str


class SaidItem(Body):
    type: Literal["message"] = "message"
    role: Role
    content: str | Many[SaidPart]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Annotated[Any, only("medium")] = None


@with_fields({name: option_field(OPTIONS[name]) for name in _DRAWING})
class ResponsesRequest(Body):
    """`store`, `user`, `parallel_tool_calls` and other fields that do not change the text are ignored."""

    model: str | None = None
    input: str | Annotated[Many[SaidItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    text: TextOptions = TextOptions()
    metadata: dict[str, Any] | None = None
    # What needs what is not here: stored responses, tools, thoughts.
    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    background: Annotated[Any, only(False)] = None
    include: Annotated[Any, only([], ["reasoning.encrypted_content"])] = None
    reasoning: Annotated[Any, only({}, {"effort": "none"})] = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    top_logprobs: Annotated[Any, only(0)] = None
    truncation: Annotated[Any, only("disabled")] = None


class Response(Body):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "in_progress"]
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


RESPONSES = Route(
    "POST",
    "/v1/responses",
    "OpenAI: a text that continues a conversation, whole or as events",
    ResponsesRequest,
    Response,
    OPENAI_ERROR,
)
ROUTES = (RESPONSES,)


def openai_responses_handlers(inference: Inference, models: ModelChoice) -> dict[str, HttpHandler]:
    """The handler, by route."""

    async def responses(request: HttpRequest) -> HttpResponse:
        body: ResponsesRequest = request.body
        model = models.choose(request.model(body.model), "text_generation")
        input = TaskInput(text_generation=TextGenerationInput(messages=_messages(body), options=_options(body)))
        answer = _Answer(request.call.request_id, model.name, body)
        if body.stream:
            return event_response(
                answer.events(await inference.stream(request.call, model, input, _FIELDS)), OPENAI_ERROR
            )
        return HttpResponse(write_body(answer.whole(await inference.one(request.call, model, input, _FIELDS))))

    return {RESPONSES.key: responses}


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    said = [SaidItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    if body.instructions is not None:
        said = [SaidItem(role="system", content=body.instructions), *said]
    return [ChatMessage(role=one.role, content=_text(one.content)) for one in said]


def _text(content: str | list[SaidPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _options(body: ResponsesRequest) -> GenerationOptions:
    """Raises InvalidInput."""
    given = with_drawing({name: value for name in _DRAWING if (value := getattr(body, name)) is not None})
    form = body.text.format
    if form and form.type == "json_object":
        given["json_object"] = True
    elif form and form.type == "json_schema":
        if form.schema_ is None:
            raise InvalidInput("text.format.schema", "is missing")
        given["json_schema"] = form.schema_
    return GenerationOptions(**message_fields(given), max_new_tokens=body.max_output_tokens)


class _Answer:
    """Writes one response."""

    def __init__(self, request_id: str, model: str, body: ResponsesRequest) -> None:
        self._message_id = f"msg_{request_id}"
        self._head = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": getattr(body, "temperature"),  # noqa: B009, a field that is made
            "text": {"format": {"type": body.text.format.type if body.text.format else "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": getattr(body, "top_p"),  # noqa: B009
            "truncation": "disabled",
        }
        self._number = -1

    def whole(self, result: InferenceResult) -> dict[str, Any]:
        """The response with its text."""
        text: GeneratedText = result.result.message.text_generation.sequences[0]
        is_cut = text.finish_reason == FinishReason.FINISH_REASON_LENGTH
        status = "incomplete" if is_cut else "completed"
        return self._head | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(status, [_part(text.text)])],
            "usage": _usage(result.usage),
        }

    async def events(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[dict[str, Any], None]:
        """OpenAI's events of a text."""
        began = self._head | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        yield self._event("created", response=began)
        yield self._event("in_progress", response=began)
        yield self._event("output_item.added", output_index=0, item=self._item("in_progress", []))
        yield self._event("content_part.added", **place, part=_part(""))
        async with aclosing(events):
            async for event in events:
                if isinstance(event, GeneratedPart) and event.text:
                    yield self._event("output_text.delta", **place, delta=event.text, logprobs=[])
                elif isinstance(event, InferenceResult):
                    whole = self.whole(event)
                    [item] = whole["output"]
                    [part] = item["content"]
                    yield self._event("output_text.done", **place, text=part["text"], logprobs=[])
                    yield self._event("content_part.done", **place, part=part)
                    yield self._event("output_item.done", output_index=0, item=item)
                    yield self._event(whole["status"], response=whole)

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{name}", "sequence_number": self._number, **fields}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.tokens + usage.generated_tokens,
    }
