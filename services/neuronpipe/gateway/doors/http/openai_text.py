"""OpenAI's chat completions and completions, whole and as events."""

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import (
    ChatMessage,
    FinishReason,
    GeneratedText,
    GenerationOptions,
    TaskInput,
    TextGenerationInput,
    TokenLogprob,
    TopLogprob,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.gateway.doors.http.bodies import Body, Count, Many, Unsupported, only, write_body
from neuronpipe.gateway.doors.http.events import event_response
from neuronpipe.gateway.doors.http.exchange import HttpHandler, HttpRequest, HttpResponse, Route
from neuronpipe.gateway.doors.http.problems import OPENAI_ERROR
from neuronpipe.gateway.doors.inference import Inference
from neuronpipe.gateway.doors.text_stream import Event
from neuronpipe.gateway.inference import GeneratedPart, InferenceResult, Usage

# Of completions, as OpenAI has it.
_MAX_TOKENS = 16
_SEEDS = 1 << 64
_FIELDS = {
    "options.max_new_tokens": "max_tokens",
    "options.min_new_tokens": "min_tokens",
    "options.stop_strings": "stop",
    "options.num_return_sequences": "n",
    "options.top_logprobs": "top_logprobs",
    **{f"options.{name}": name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty")},
    "options.stop_token_ids": "stop_token_ids",
}
_REASONS = {FinishReason.FINISH_REASON_LENGTH: "length"}


class TextPart(Body):
    type: Literal["text"]
    text: str


class SaidMessage(Body):
    role: str
    content: Annotated[str | Many[TextPart] | None, Field(description="a text, or parts of it")] = None
    tool_calls: Annotated[Any, only([])] = None


class StreamOptions(Body):
    include_usage: bool = False


class _Completion(Body):
    """What both have. Of the fields after `stream_options`, OpenAI has none; as in vLLM.

    `user`, `metadata`, `store` and other fields of OpenAI's that do not change the text are ignored.
    """

    model: str
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Many[str] | None = None
    n: Annotated[Count | None, Field(description="so many texts, drawn at random")] = None
    frequency_penalty: Annotated[Any, only(0)] = None
    presence_penalty: Annotated[Any, only(0)] = None
    logit_bias: Annotated[Any, only({})] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Many[Annotated[int, Field(ge=0, lt=1 << 32)]] | None = None


class ChatRequest(_Completion):
    messages: Annotated[Many[SaidMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    functions: Annotated[Any, only([])] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Unsupported = None


class CompletionRequest(_Completion):
    prompt: Annotated[str | Many[str], Field(description="a text; or several, of which each gets a choice")]
    logprobs: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    echo: Annotated[Any, only(False)] = None
    best_of: Annotated[Any, only(1)] = None
    suffix: Annotated[Any, only("")] = None


class Answered(Body):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Body):
    index: int
    message: Answered
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class CompletionChoice(Body):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class CachedTokens(Body):
    cached_tokens: int


class TextUsage(Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ChatCompletion(Body):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TextUsage


class Completion(Body):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TextUsage


CHAT = Route(
    "POST",
    "/v1/chat/completions",
    "OpenAI: the next message of a chat; with `stream` as events, each a chunk in JSON, the last one [DONE]",
    ChatRequest,
    ChatCompletion,
    OPENAI_ERROR,
)
COMPLETIONS = Route(
    "POST",
    "/v1/completions",
    "OpenAI: continues texts; with `stream` as events, each a chunk in JSON, the last one [DONE]",
    CompletionRequest,
    Completion,
    OPENAI_ERROR,
)
ROUTES = (CHAT, COMPLETIONS)


@dataclass(frozen=True, slots=True)
class _Form:
    """How one of the two writes its answers.

    `whole`: a text in a choice. `part`: a part of it in a choice of a chunk. `logprobs`: those of tokens in a choice,
    before which there are so many characters. `begin`: the first choice of a stream.
    """

    id: str
    whole_object: str
    part_object: str
    whole: Callable[[str], dict[str, Any]]
    part: Callable[[str], dict[str, Any]]
    logprobs: Callable[[Sequence[TokenLogprob], int], dict[str, Any]]
    begin: Mapping[str, Any] | None = None


def _chat_logprobs(logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    def written(one: TokenLogprob | TopLogprob) -> dict[str, Any]:
        return {"token": one.text, "logprob": one.logprob, "bytes": list(one.text.encode())}

    content = [written(one) | {"top_logprobs": [written(top) for top in one.top]} for one in logprobs]
    return {"content": content, "refusal": None}


def _completion_logprobs(logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    ends = [*accumulate((len(one.text) for one in logprobs), initial=offset)]
    return {
        "tokens": [one.text for one in logprobs],
        "token_logprobs": [one.logprob for one in logprobs],
        "top_logprobs": [{top.text: top.logprob for top in one.top} for one in logprobs],
        "text_offset": ends[:-1],
    }


_CHAT = _Form(
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    lambda text: {"delta": {"content": text} if text else {}},
    _chat_logprobs,
    {"delta": {"role": "assistant", "content": ""}},
)
_COMPLETION = _Form(
    "cmpl",
    "text_completion",
    "text_completion",
    lambda text: {"text": text},
    lambda text: {"text": text},
    _completion_logprobs,
)


def openai_text_handlers(inference: Inference) -> dict[str, HttpHandler]:
    """The handlers, by route."""

    async def answer(request: HttpRequest, form: _Form, inputs: list[TextGenerationInput], name: str) -> HttpResponse:
        body: _Completion = request.body
        model, tasks = request.model(body.model), [TaskInput(text_generation=one) for one in inputs]
        head = {"id": f"{form.id}-{request.call.request_id}", "created": int(time.time()), "model": body.model}
        if body.stream:
            events = await inference.stream(request.call, model, tasks[0], _FIELDS)
            return event_response(_chunks(events, form, head, body), OPENAI_ERROR, "[DONE]")
        results = await inference.each(
            request.call,
            model,
            tasks,
            name,
            lambda index: _FIELDS | {name: f"{name}[{index}]"} if tasks[1:] else _FIELDS,
        )
        texts = [text for one in results for text in one.result.message.text_generation.sequences]
        choices = [
            _choice(index, form.whole(one.text), _reason(one), one.logprobs and form.logprobs(one.logprobs, 0))
            for index, one in enumerate(texts)
        ]
        usage = _usage([one.usage for one in results])
        return HttpResponse(write_body(head | {"object": form.whole_object, "choices": choices, "usage": usage}))

    async def chat(request: HttpRequest) -> HttpResponse:
        body: ChatRequest = request.body
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidInput("top_logprobs", "has an effect only with logprobs")
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        options = _options(body, body.max_completion_tokens or body.max_tokens, top_logprobs)
        messages = [ChatMessage(role=one.role, content=_content(one)) for one in body.messages]
        input = TextGenerationInput(messages=messages, options=options)
        return await answer(request, _CHAT, [input], "messages")

    async def completions(request: HttpRequest) -> HttpResponse:
        body: CompletionRequest = request.body
        options = _options(body, body.max_tokens or _MAX_TOKENS, body.logprobs)
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if body.stream and len(prompts) > 1:
            raise InvalidInput("prompt", f"{len(prompts)} texts, a stream takes one")
        inputs = [TextGenerationInput(prompt=prompt, options=options) for prompt in prompts]
        return await answer(request, _COMPLETION, inputs, "prompt")

    return {CHAT.key: chat, COMPLETIONS.key: completions}


async def _chunks(
    events: AsyncGenerator[Event, None], form: _Form, head: dict[str, Any], body: _Completion
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a stream."""
    has_usage = body.stream_options is not None and body.stream_options.include_usage
    head |= {"object": form.part_object} | ({"usage": None} if has_usage else {})
    offsets: Counter[int] = Counter()
    for index in range(body.n or 1) if form.begin else ():
        yield head | {"choices": [_choice(index, form.begin or {}, None)]}
    async with aclosing(events):
        async for event in events:
            if isinstance(event, GeneratedPart) and (event.text or event.logprobs):
                offset = offsets[event.sequence]
                offsets[event.sequence] += sum(len(one.text) for one in event.logprobs)
                logprobs = form.logprobs(event.logprobs, offset) if event.logprobs else None
                yield head | {"choices": [_choice(event.sequence, form.part(event.text), None, logprobs)]}
            elif isinstance(event, InferenceResult):
                for index, text in enumerate(event.result.message.text_generation.sequences):
                    yield head | {"choices": [_choice(index, form.part(""), _reason(text))]}
                if has_usage:
                    yield head | {"choices": [], "usage": _usage([event.usage])}


def _choice(index: int, text: Mapping[str, Any], reason: str | None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, **text, "logprobs": logprobs or None, "finish_reason": reason}


def _reason(text: GeneratedText) -> str:
    return _REASONS.get(text.finish_reason, "stop")


def _usage(used: list[Usage]) -> dict[str, Any]:
    prompt, completion = sum(one.tokens for one in used), sum(one.generated_tokens for one in used)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in used)},
    }


def _content(message: SaidMessage) -> str:
    content = message.content or ""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _options(body: _Completion, max_tokens: int | None, top_logprobs: int | None) -> GenerationOptions:
    """The options. Tokens are drawn where something says how; a temperature of 0 says that they are not."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    options = GenerationOptions(stop_strings=stops or (), stop_token_ids=body.stop_token_ids or ())
    drawn = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "seed": None if body.seed is None else body.seed % _SEEDS,
    }
    given: dict[str, Any] = {name: value for name, value in drawn.items() if value is not None}
    if body.temperature == 0:
        given = {"do_sample": False}
    elif given or (body.n or 1) > 1:
        given["do_sample"] = True
    given |= {"max_new_tokens": max_tokens, "min_new_tokens": body.min_tokens}
    given |= {"repetition_penalty": body.repetition_penalty, "num_return_sequences": body.n}
    given["top_logprobs"] = top_logprobs
    for name, value in given.items():
        if value is not None:
            try:
                setattr(options, name, value)
            except ValueError:
                raise InvalidInput(_FIELDS[f"options.{name}"], f"{value}, is out of range") from None
    return options
