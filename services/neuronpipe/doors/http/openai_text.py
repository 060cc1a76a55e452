"""OpenAI's chat completions and completions, whole and as events."""

import json
import time
from codecs import getincrementaldecoder
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from neuronpipe.api.v1.inference_pb2 import GenerateStart, Usage
from neuronpipe.api.v1.tasks_pb2 import (
    FinishReason,
    GeneratedText,
    GenerationOptions,
    TaskInput,
    TextGenerationInput,
    TokenLogprob,
    TopLogprob,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generation_options import DRAWING, OPTIONS, message_fields, with_drawing
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.events import event_response
from neuronpipe.doors.http.exchange import HttpHandlers, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.openai_text_bodies import (
    AllowedChoice,
    ChatCompletion,
    ChatRequest,
    ChosenTool,
    Completion,
    CompletionOptions,
    CompletionRequest,
    ResponseFormat,
    SaidMessage,
    StreamOptions,
)
from neuronpipe.doors.http.problems import OPENAI_ERROR
from neuronpipe.doors.http.tool_calls import CallReader, ToolUse
from neuronpipe.doors.inference import Inference, ModelChoice, kept_tokens
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.inference import GeneratedPart, TextEvent
from neuronpipe.tasks.text_generation import GenerationFacts

# OpenAI's default for completions.
_MAX_TOKENS = 16
_SEEDS = 1 << 64
_FIELDS = {f"options.{name}": one.openai for name, one in OPTIONS.items() if one.openai}
_REASONS = {FinishReason.FINISH_REASON_LENGTH: "length"}
_NO_TOOLS = ToolUse(())
# Fields of a chat that are variables of the model's template.
_VARIABLES = ("add_generation_prompt", "reasoning_effort", "verbosity")


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
# huggingface_hub puts OpenAI's paths behind the address of a model.
MODEL_CHAT, MODEL_COMPLETIONS = (
    replace(one, path=f"/models/{{name}}{one.path}", summary=f"Hugging Face: as {one.path} of this model")
    for one in (CHAT, COMPLETIONS)
)


@dataclass(frozen=True, slots=True)
class _Form:
    """How chats or completions write their answers.

    `whole`: a text in a choice. `part`: a part of a text in a choice of a chunk. `logprobs`: log probabilities of
    tokens in a choice; the bytes before them went to the decoder. `begin`: the first choice of a stream.
    """

    id: str
    whole_object: str
    part_object: str
    whole: Callable[[str], dict[str, Any]]
    part: Callable[[str], dict[str, Any]]
    logprobs: Callable[[Sequence[TokenLogprob], "_Offsets"], dict[str, Any]]
    begin: Mapping[str, Any] | None = None


class _Offsets:
    """Offsets of tokens in a text, in characters. A token that begins within a character has the offset of it."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of(self, logprobs: Sequence[TokenLogprob]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for one in logprobs:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(one.utf8))
        return offsets


def _token(one: TokenLogprob | TopLogprob) -> str:
    """A token in OpenAI's form: its text, or its bytes if they are no text."""
    is_text = one.text.encode() == one.utf8
    return one.text if is_text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.utf8)


def _chat_logprobs(logprobs: Sequence[TokenLogprob], offsets: _Offsets) -> dict[str, Any]:
    def written(one: TokenLogprob | TopLogprob) -> dict[str, Any]:
        return {"token": _token(one), "logprob": one.logprob, "bytes": list(one.utf8)}

    content = [written(one) | {"top_logprobs": [written(top) for top in one.top]} for one in logprobs]
    return {"content": content, "refusal": None}


def _completion_logprobs(logprobs: Sequence[TokenLogprob], offsets: _Offsets) -> dict[str, Any]:
    def best(one: TokenLogprob) -> dict[str, float]:
        found: dict[str, float] = {}
        for top in one.top:  # two tokens may have one text: special ones have none
            found[f"token_id:{top.token_id}" if _token(top) in found else _token(top)] = top.logprob
        return found

    return {
        "tokens": [_token(one) for one in logprobs],
        "token_logprobs": [one.logprob for one in logprobs],
        "top_logprobs": [best(one) for one in logprobs],
        "text_offset": offsets.of(logprobs),
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


class OpenAiTextDoor:
    """Converts OpenAI's bodies of texts to calls of the pipeline and back."""

    def __init__(self, inference: Inference, models: ModelChoice, catalog: Catalog) -> None:
        self._inference = inference
        self._models = models
        self._catalog = catalog

    def handlers(self) -> HttpHandlers:
        """The routes with their handlers."""
        return [
            (CHAT, self.chat),
            (COMPLETIONS, self.completions),
            (MODEL_CHAT, self.chat),
            (MODEL_COMPLETIONS, self.completions),
        ]

    async def chat(self, request: HttpRequest) -> HttpResponse:
        """POST /v1/chat/completions."""
        body: ChatRequest = request.body
        if body.top_logprobs and not body.logprobs:
            raise InvalidInput("top_logprobs", "has an effect only with logprobs")
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        options = _options(body, body.max_completion_tokens or body.max_tokens, top_logprobs)
        tools = _tool_use(body)
        tools.force(options)
        named = {name: getattr(body, name) for name in _VARIABLES}
        variables = {name: value for name, value in named.items() if value is not None}
        variables |= body.chat_template_kwargs or {}

        def make(messages: Sequence[SaidMessage]) -> TextGenerationInput:
            return TextGenerationInput(
                messages=[message.message() for message in messages],
                tools=tools.for_template,
                template_arguments=json.dumps(variables, ensure_ascii=False) if variables else "",
                continue_final_message=bool(body.continue_final_message),
                options=options,
            )

        return await self._answer(request, _CHAT, [body.messages], make, "messages", tools)

    async def completions(self, request: HttpRequest) -> HttpResponse:
        """POST /v1/completions."""
        body: CompletionRequest = request.body
        if body.best_of not in (None, body.n or 1):
            raise InvalidInput(
                "best_of", f"{body.best_of}, must be n, {body.n or 1}: no more texts are made than asked"
            )
        is_one = isinstance(body.prompt, str) or isinstance(next(iter(body.prompt), None), int)
        prompts: Sequence[Any] = [body.prompt] if is_one else body.prompt
        options = _options(body, body.max_tokens or _MAX_TOKENS, body.logprobs)
        if body.echo and body.logprobs is not None:
            if body.stream:
                raise InvalidInput("echo", "with logprobs cannot be combined with stream")
            options.prompt_logprobs = True
        elif body.echo and not all(isinstance(prompt, str) for prompt in prompts):
            raise InvalidInput("echo", "of token ids needs logprobs")
        cuts = kept_tokens(body.truncate_prompt_tokens, "left")

        def make(prompt: str | Sequence[int]) -> TextGenerationInput:
            if isinstance(prompt, str):
                return TextGenerationInput(prompt=prompt, options=options, **cuts)
            return TextGenerationInput(prompt_token_ids=prompt, options=options, **cuts)

        return await self._answer(request, _COMPLETION, prompts, make, "prompt")

    async def _answer(
        self,
        request: HttpRequest,
        form: _Form,
        given: Sequence[Any],
        make: Callable[[Any], TextGenerationInput],
        name: str,
        tools: ToolUse = _NO_TOOLS,
    ) -> HttpResponse:
        """The texts of the inputs that `make` makes of the values in the field `name`."""
        body: CompletionOptions = request.body
        names = _fields(body) | tools.fields("function.parameters")
        model = self._models.choose(request.model(request.names.get("name") or body.model), "text_generation")
        head = {"id": f"{form.id}-{request.call.request_id}", "created": int(time.time()), "model": model.name}
        asked = (
            request.call,
            model,
            given,
            lambda value: TaskInput(text_generation=make(value)),
            name,
            lambda index: names | {name: f"{name}[{index}]"} if given[1:] else names,
        )
        begins = [value if _echoes(body) and isinstance(value, str) else "" for value in given]

        def new_reader() -> CallReader:
            template = GenerationFacts.of(self._catalog.spec(*model)).chat_template if tools.tools else ""
            return tools.reader(template)

        if body.stream:
            events = await self._inference.stream_each(*asked)
            chunks = _chunks(events, form, head, body, begins, new_reader)
            return event_response(chunks, OPENAI_ERROR, "[DONE]")
        results = await self._inference.each(*asked)
        texts = [
            (begin, text)
            for begin, result in zip(begins, results, strict=True)
            for text in result.result.message.text_generation.sequences
        ]
        choices = [_whole_choice(index, *text, form, body, new_reader()) for index, text in enumerate(texts)]
        usage = _usage([result.usage for result in results])
        return HttpResponse(write_body(head | {"object": form.whole_object, "choices": choices, "usage": usage}))


def _whole_choice(
    index: int, begin: str, text: GeneratedText, form: _Form, body: CompletionOptions, reader: CallReader
) -> dict[str, Any]:
    """A text that has ended, behind the text `begin`."""
    said, calls = reader.whole(text.text)
    said = (begin or _text_of(text.prompt_logprobs)) + said
    choice = form.whole(said)
    if calls:
        choice["message"] |= {"content": said or None, "tool_calls": calls}
    tokens = [*text.prompt_logprobs, *text.logprobs]
    logprobs = form.logprobs(tokens, _Offsets()) if tokens else None
    if logprobs and text.prompt_logprobs:  # nothing is before the first token
        logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
    if body.return_token_ids:
        choice["token_ids"] = list(text.token_ids)
    return _choice(index, choice, _reason(text, reader), logprobs)


def _echoes(body: CompletionOptions) -> bool:
    return isinstance(body, CompletionRequest) and bool(body.echo)


async def _chunks(
    events: AsyncGenerator[tuple[int, TextEvent], None],
    form: _Form,
    head: dict[str, Any],
    body: CompletionOptions,
    begins: Sequence[str],
    new_reader: Callable[[], CallReader],
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a stream; events with the place of their input. `begins`: what each input's texts begin with.

    As in vLLM, the first text of the input in a place is the choice of index place * n.
    """
    asked, texts = body.stream_options or StreamOptions(), body.n or 1
    head |= {"object": form.part_object} | ({"usage": None} if asked.include_usage else {})
    readers = defaultdict[int, CallReader](new_reader)
    offsets = defaultdict[int, _Offsets](_Offsets)
    # Tokens of the prompt of each input, and of the text of each choice so far.
    read, written = Counter[int](), Counter[int]()
    used: list[Usage] = []

    def chunk(index: int, text: Mapping[str, Any], reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        so_far = Usage(tokens=read[index // texts], generated_tokens=written[index])
        usage = {"usage": _usage([so_far])} if asked.include_usage and asked.continuous_usage_stats else {}
        return head | {"choices": [_choice(index, text, reason, logprobs)]} | usage

    async with aclosing(events):
        for index in range(texts * len(begins)):
            if begin := form.begin or (form.part(begins[index // texts]) if begins[index // texts] else None):
                yield chunk(index, begin)
        async for place, event in events:
            if isinstance(event, GenerateStart):
                read[place] = event.prompt_tokens
            elif isinstance(event, GeneratedPart):
                index = place * texts + event.sequence
                written[index] += len(event.token_ids)
                logprobs = form.logprobs(event.logprobs, offsets[index]) if event.logprobs else None
                ids = {"token_ids": event.token_ids} if body.return_token_ids else {}
                for part in [*readers[index].read(event.text)] or ([""] if logprobs or ids else []):
                    yield chunk(index, _told(part, form) | ids, None, logprobs)
                    logprobs, ids = None, {}
            else:
                used.append(event.usage)
                for number, whole in enumerate(event.result.message.text_generation.sequences):
                    index = place * texts + number
                    for part in readers[index].read("", is_last=True):
                        yield chunk(index, _told(part, form))
                    yield chunk(index, form.part(""), _reason(whole, readers[index]))
        if asked.include_usage:
            yield head | {"choices": [], "usage": _usage(used)}


def _text_of(logprobs: Sequence[TokenLogprob]) -> str:
    return b"".join(one.utf8 for one in logprobs).decode(errors="replace")


def _choice(index: int, text: Mapping[str, Any], reason: str | None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, **text, "logprobs": logprobs or None, "finish_reason": reason}


def _told(part: str | dict[str, Any], form: _Form) -> dict[str, Any]:
    """A part of a text, or of a call, in a choice of a chunk."""
    return form.part(part) if isinstance(part, str) else {"delta": {"tool_calls": [part]}}


def _reason(text: GeneratedText, reader: CallReader) -> str:
    """Why a text that was read has ended."""
    reason = _REASONS.get(text.finish_reason, "stop")
    return "tool_calls" if reason == "stop" and reader.ends_with_calls else reason


def _tool_use(body: ChatRequest) -> ToolUse:
    """The tools that a text may call. Raises InvalidInput."""
    tools = [one.model_dump(exclude_unset=True) for one in body.tools or ()]
    choice, several = body.tool_choice, body.parallel_tool_calls is not False
    if isinstance(choice, ChosenTool):
        return ToolUse.of(tools, None, choice.function.name, "tool_choice.function.name", several)
    if isinstance(choice, AllowedChoice):
        allowed = [one.function.name for one in choice.allowed_tools.tools]
        return ToolUse.of(tools, choice.allowed_tools.mode, None, "tool_choice.allowed_tools", several, allowed)
    return ToolUse.of(tools, choice, None, "tool_choice", several)


def _usage(used: list[Usage]) -> dict[str, Any]:
    prompt, completion = sum(one.tokens for one in used), sum(one.generated_tokens for one in used)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in used)},
    }


def _fields(body: CompletionOptions) -> dict[str, str]:
    """A request's names of fields."""
    names = _FIELDS | {f"options.{name}": place for name, place, _ in _forms(body)}
    most, best = "max_tokens", "logprobs"
    if isinstance(body, ChatRequest):
        most = "max_completion_tokens" if body.max_completion_tokens else most
        best = "top_logprobs" if body.top_logprobs else best
    else:
        names["truncation"] = names["truncation_tokens"] = "truncate_prompt_tokens"
    names |= {"template_arguments": "chat_template_kwargs", "prompt_token_ids": "prompt"}
    return names | {"options.max_new_tokens": most, "options.top_logprobs": best, "options.prompt_logprobs": "echo"}


def _forms(body: CompletionOptions) -> Iterator[tuple[str, str, Any]]:
    """The form that the text must have, unless an option has its name: option, field and value.

    Raises InvalidInput.
    """
    given = body.response_format or ResponseFormat(type="text")
    schemas = [one for one in (given.json_schema, given.schema_, given.value) if one is not None]
    if len(schemas) > 1:
        raise InvalidInput("response_format", "has several of json_schema, schema and value; give one")
    if given.type in ("json", "regex") or (given.type == "json_object" and given.value):
        if given.value is None or (given.type == "regex" and not isinstance(given.value, str)):
            raise InvalidInput("response_format.value", "must be a text" + " or an object" * (given.type != "regex"))
        yield ("regex" if given.type == "regex" else "json_schema"), "response_format.value", given.value
    else:
        named, place = given.json_schema, "response_format.json_schema.schema"
        schema = named.schema_ if named else given.schema_
        if given.type == "text" and schemas:
            raise InvalidInput("response_format.type", "is text, with which there is no schema")
        if schema is not None:
            yield "json_schema", place if named else "response_format.schema", schema
        elif given.type == "json_schema" or named:
            raise InvalidInput(place if named else "response_format.json_schema", "is missing")
        elif given.type == "json_object":
            yield "json_object", "response_format", True
    if outputs := body.structured_outputs:
        for theirs, value in outputs.model_dump(exclude_none=True, by_alias=True).items():
            yield (
                {"json": "json_schema", "choice": "choices"}.get(theirs, theirs),
                f"structured_outputs.{theirs}",
                value,
            )


def _options(body: CompletionOptions, max_tokens: int | None, top_logprobs: int | None) -> GenerationOptions:
    """Raises InvalidInput."""
    named = {name: getattr(body, one.openai) for name, one in OPTIONS.items() if one.openai}
    given = {name: value for name, value in named.items() if value is not None}
    stops = given.get("stop_strings", ())  # OpenAI ignores empty ones
    if "" in ([stops] if isinstance(stops, str) else stops):
        given["stop_strings"] = [one for one in stops if one]
    for name, place, value in _forms(body):
        if name in given:
            raise InvalidInput(place, "is given twice")
        given[name] = value
    if body.ignore_eos:
        if max_tokens is None:
            raise InvalidInput("ignore_eos", "needs max_tokens, which the text then has")
        given["min_new_tokens"] = max_tokens
    drawn = [name for name in DRAWING if name in given]
    texts, beams = body.n or 1, given.get("num_beams", 1)
    if given.get("temperature") == 0 and texts > 1 and beams == 1:
        raise InvalidInput("n", "must be 1 with a temperature of 0, which gives the same text each time")
    if drawn and beams > 1 and given.get("temperature") != 0:
        raise InvalidInput(drawn[0], "cannot be combined with num_beams, which draws nothing")
    given = with_drawing(given, is_drawn=texts > 1 and beams == 1)
    if "seed" in given:
        given["seed"] %= _SEEDS
    if given.get("top_k") == -1:
        given["top_k"] = 0
    return GenerationOptions(**message_fields(given), max_new_tokens=max_tokens, top_logprobs=top_logprobs)
