"""OpenAI's chat completions and completions, whole and as events."""

import json
import time
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NotRequired

from neuronpipe import __version__
from neuronpipe.api.v1 import tasks_pb2 as tasks
from neuronpipe.api.v1.inference_pb2 import GenerateStart, Usage
from neuronpipe.api.v1.tasks_pb2 import FinishReason, GeneratedText, GenerationOptions, TaskInput, TokenLogprob
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generation_options import DRAWING, OPTIONS, message_fields, with_drawing
from neuronpipe.core.packed import pack_texts
from neuronpipe.doors.http import openai_text_bodies as bodies
from neuronpipe.doors.http.bodies import ignore, write_body
from neuronpipe.doors.http.events import event_response
from neuronpipe.doors.http.exchange import Answers, HttpRequest, HttpResponse, Route, named
from neuronpipe.doors.http.problems import OPENAI_ERROR
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
from neuronpipe.doors.inference import Inference, Inputs, ModelName, kept_tokens
from neuronpipe.doors.vectors import listed
from neuronpipe.gateway.requests import GeneratedPart, InferenceResult, TextEvent
from neuronpipe.tasks.text_generation import form_of

# OpenAI's default for completions.
_MAX_TOKENS = 16
_SEEDS = 1 << 64
_FIELDS = {f"options.{name}": option.openai for name, option in OPTIONS.items() if option.openai}
# Fields of a chat that are variables of the model's template.
_VARIABLES = ("add_generation_prompt", "reasoning_effort", "verbosity")
# vLLM's names of forms of a text → our options.
_FORM_OPTIONS = {"json": "json_schema", "choice": "choices"}

_OBJECT = dict[str, Any]
_CACHED = named("CachedTokens", cached_tokens=int)
_REASONING = named("ReasoningTokens", reasoning_tokens=int)
_USAGE = named(
    "TextUsage",
    prompt_tokens=int,
    completion_tokens=int,
    total_tokens=int,
    prompt_tokens_details=_CACHED,
    completion_tokens_details=_REASONING,
)
_CALLS = NotRequired[list[_OBJECT] | None]
_REASONED: Any = {"reasoning_content": NotRequired[str]}
_MESSAGE = named(
    "Answered", role=Literal["assistant"], content=str | None, refusal=None, tool_calls=_CALLS, **_REASONED
)


def _answer(name: str, kind: Any, choice_name: str, reasons: Any, **text: Any) -> Any:
    ends: Any = {"finish_reason": reasons, "stop_reason": NotRequired[str | int]}
    choice: Any = named(choice_name, index=int, **text, logprobs=_OBJECT | None, **ends)
    head: Any = {"id": str, "object": kind, "created": int, "model": str, "system_fingerprint": str}
    return named(name, **head, choices=list[choice], usage=_USAGE)


_CHAT_REASONS = Literal["stop", "length", "tool_calls"]
_post = partial(Route, "POST", error_form=OPENAI_ERROR)
CHAT = _post(
    "/v1/chat/completions",
    "OpenAI: the next message of a chat; with `stream` as events, each a chunk in JSON, the last one [DONE]",
    bodies.ChatRequest,
    _answer("ChatCompletion", Literal["chat.completion"], "ChatChoice", _CHAT_REASONS, message=_MESSAGE),
)
COMPLETIONS = _post(
    "/v1/completions",
    "OpenAI: continues texts; with `stream` as events, each a chunk in JSON, the last one [DONE]",
    bodies.CompletionRequest,
    _answer("Completion", Literal["text_completion"], "CompletionChoice", Literal["stop", "length"], text=str),
)
# huggingface_hub puts OpenAI's paths behind the address of a model.
MODEL_CHAT, MODEL_COMPLETIONS = (
    replace(route, path=f"/models/{{name}}{route.path}", summary=f"Hugging Face: as {route.path} of this model")
    for route in (CHAT, COMPLETIONS)
)


@dataclass(frozen=True, slots=True)
class _AnswerWriter:
    """Writes the answers of chats or of completions.

    - `whole`: writes a text in a choice.
    - `part`: writes a part of a text in a choice of a chunk.
    - `logprobs`: writes log probabilities of tokens in a choice.
    - `begin`: the first choice of a stream.
    """

    id_prefix: str
    whole_object: str
    part_object: str
    whole: Callable[[str], dict[str, Any]]
    part: Callable[[str], dict[str, Any]]
    logprobs: Callable[[Sequence[TokenLogprob], "_Offsets"], dict[str, Any]]
    begin: Mapping[str, Any] | None = None


class _Offsets:
    """Offsets of tokens in a text, in characters. A token that begins within a character has the character's offset."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def advance(self, logprobs: Sequence[TokenLogprob]) -> list[int]:
        """Returns the offsets of the next tokens."""
        offsets = []
        for token in logprobs:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.utf8))
        return offsets


def _text_of_token(token: TokenLogprob | tasks.TopLogprob) -> str:
    """Returns a token as OpenAI writes it: its text, or its bytes if they are no text."""
    is_text = token.text.encode() == token.utf8
    return token.text if is_text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.utf8)


def _chat_logprobs(logprobs: Sequence[TokenLogprob], offsets: _Offsets) -> dict[str, Any]:
    def written(token: TokenLogprob | tasks.TopLogprob) -> dict[str, Any]:
        return {"token": _text_of_token(token), "logprob": token.logprob, "bytes": list(token.utf8)}

    content = [written(token) | {"top_logprobs": [written(top) for top in token.top]} for token in logprobs]
    return {"content": content, "refusal": None}


def _completion_logprobs(logprobs: Sequence[TokenLogprob], offsets: _Offsets) -> dict[str, Any]:
    def best(token: TokenLogprob) -> dict[str, float]:
        """Returns the best tokens and, as OpenAI does, the token that was drawn."""
        by_text: dict[str, float] = {}
        is_among = any(top.token_id == token.token_id for top in token.top)
        tokens: list[TokenLogprob | tasks.TopLogprob] = [*token.top, *(() if is_among else (token,))]
        for top in tokens:
            text = _text_of_token(top)  # several tokens may have one text: the text of a special token is empty
            by_text[f"token_id:{top.token_id}" if text in by_text else text] = top.logprob
        return by_text

    return {
        "tokens": [_text_of_token(token) for token in logprobs],
        "token_logprobs": [token.logprob for token in logprobs],
        "top_logprobs": [best(token) for token in logprobs],
        "text_offset": offsets.advance(logprobs),
    }


_CHAT = _AnswerWriter(
    id_prefix="chatcmpl",
    whole_object="chat.completion",
    part_object="chat.completion.chunk",
    whole=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    part=lambda text: {"delta": {"content": text} if text else {}},
    logprobs=_chat_logprobs,
    begin={"delta": {"role": "assistant", "content": ""}},
)


def _text(text: str) -> dict[str, Any]:
    return {"text": text}


_COMPLETION = _AnswerWriter(
    id_prefix="cmpl",
    whole_object="text_completion",
    part_object="text_completion",
    whole=_text,
    part=_text,
    logprobs=_completion_logprobs,
)


async def chat(inference: Inference, request: HttpRequest) -> HttpResponse:
    """Answers POST /v1/chat/completions."""
    body: bodies.ChatRequest = request.body
    model = _model(inference, request)
    if body.top_logprobs and not body.logprobs:
        raise InvalidInput("top_logprobs", "has an effect only with logprobs")
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    options = _options(body, body.max_completion_tokens or body.max_tokens, top_logprobs)
    tools = _tool_use(body)
    facts = facts_of(inference, model)
    form = "response_format" if body.response_format and body.response_format.type != "text" else ""
    tools.set_form(options, "function.strict", form, facts)
    variables = {name: value for name in _VARIABLES if (value := getattr(body, name)) is not None}
    variables |= switched(body.reasoning_effort, body.chat_template_kwargs or {})
    name_unread(facts, _read_variables(body))
    for place in bodies.unread_fields(body.messages, body.tools or (), facts.chat_template) if facts else ():
        ignore(place)

    def make(messages: Sequence[bodies.SaidMessage]) -> TaskInput:
        input = tasks.TextGenerationInput(
            messages=[message.message() for message in messages],
            tools=tools.for_template,
            template_arguments=json.dumps(variables, ensure_ascii=False) if variables else "",
            continue_final_message=bool(body.continue_final_message),
            options=options,
        )
        return TaskInput(text_generation=input)

    fields = _fields(body) | tools.fields("function.parameters", form)
    inputs = Inputs("messages", [body.messages], make, fields, is_list=False)
    has_form, thinking = bool(form_of(options)), _thinking(body)

    def new_reader() -> AnswerReader:
        begun = body.messages[-1].message().content if body.continue_final_message else ""
        return reader_of_answer(inference, model, tools, has_form=has_form, thinking=thinking, begun=begun)

    return await _answer_texts(inference, request, model, _CHAT, inputs, new_reader)


async def completions(inference: Inference, request: HttpRequest) -> HttpResponse:
    """Answers POST /v1/completions."""
    body: bodies.CompletionRequest = request.body
    model = _model(inference, request)
    texts = body.n or 1
    if body.best_of not in (None, texts):
        raise InvalidInput("best_of", f"{body.best_of}, must be n, {texts}: no more texts are made than asked")
    prompts, _ = listed(body.prompt)
    if body.max_tokens == 0 and not (body.echo and body.logprobs is not None):
        raise InvalidInput("max_tokens", "0, must be at least 1 without echo and logprobs")
    # A prompt is scored by the steps that generate a token behind it.
    max_tokens = _MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    options = _options(body, max_tokens, body.logprobs)
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise InvalidInput("echo", "with logprobs cannot be combined with stream")
        options.prompt_logprobs = True
    elif body.echo and not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidInput("echo", "of token ids needs logprobs")
    cuts = kept_tokens(body.truncate_prompt_tokens, "left")

    def make(prompt: str | Sequence[int]) -> TaskInput:
        field = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        prompt_fields: dict[str, Any] = {field: prompt}
        return TaskInput(text_generation=tasks.TextGenerationInput(**prompt_fields, **cuts, options=options))

    inputs = Inputs("prompt", prompts, make, _fields(body), is_list=len(prompts) > 1)
    begins = [prompt if body.echo and isinstance(prompt, str) else "" for prompt in prompts]
    return await _answer_texts(inference, request, model, _COMPLETION, inputs, _reader_of_words, begins)


def _reader_of_words() -> AnswerReader:
    return AnswerReader(ToolUse(()).reader(""))


ANSWERS: Answers[Inference] = [
    (CHAT, chat),
    (COMPLETIONS, completions),
    (MODEL_CHAT, chat),
    (MODEL_COMPLETIONS, completions),
]


async def _answer_texts(
    inference: Inference,
    request: HttpRequest,
    model: ModelName,
    writer: _AnswerWriter,
    inputs: Inputs,
    new_reader: Callable[[], AnswerReader],
    begins: Sequence[str] = ("",),
) -> HttpResponse:
    """Answers with the texts of all inputs. `begins`: the beginning of each input's texts."""
    body: bodies.CompletionOptions = request.body
    head = {"id": f"{writer.id_prefix}-{request.call.request_id}", "created": int(time.time()), "model": model.name}
    if body.stream:
        events = await inference.stream_each(request.call, model, inputs)
        chunks = _ChunkWriter(writer, head, body, begins, new_reader).chunks(events)
        return event_response(chunks, OPENAI_ERROR, "[DONE]")
    results = await inference.each(request.call, model, inputs)
    if body.max_tokens == 0:
        results = [_prompt_alone(result) for result in results]
    texts = [(begin, text) for begin, result in zip(begins, results, strict=True) for text in result.texts]
    head |= _fingerprint(results[0].model.version)
    readers = [new_reader() for _ in texts]
    choices = [
        _whole_choice(index, *text, writer, body, reader)
        for index, (text, reader) in enumerate(zip(texts, readers, strict=True))
    ]
    usage = _usage([result.usage for result in results], readers)
    return HttpResponse(write_body(head | {"object": writer.whole_object, "choices": choices, "usage": usage}))


def _prompt_alone(result: InferenceResult) -> InferenceResult:
    """Returns a result without the token that was generated behind the prompt."""
    end = FinishReason.FINISH_REASON_LENGTH
    texts = [GeneratedText(prompt_logprobs=text.prompt_logprobs, finish_reason=end) for text in result.texts]
    usage = Usage()
    usage.CopyFrom(result.usage)
    usage.generated_tokens = 0
    return result._replace(value=pack_texts("text_generation", texts), usage=usage)


def _whole_choice(
    index: int,
    begin: str,
    text: GeneratedText,
    writer: _AnswerWriter,
    body: bodies.CompletionOptions,
    reader: AnswerReader,
) -> dict[str, Any]:
    """Returns the choice of a text that has ended, behind the text `begin`."""
    reader.count(text.token_ids)
    reasoning, said, calls = reader.whole(text.text)
    said = (begin or b"".join(token.utf8 for token in text.prompt_logprobs).decode(errors="replace")) + said
    choice = writer.whole(said)
    if calls or reasoning:
        choice["message"]["content"] = said or None
    if reasoning:
        choice["message"]["reasoning_content"] = reasoning
    if calls:
        choice["message"]["tool_calls"] = calls
    tokens = [*text.prompt_logprobs, *text.logprobs]
    logprobs = writer.logprobs(tokens, _Offsets()) if tokens else None
    if logprobs and text.prompt_logprobs:  # the first token follows no other token
        logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
    if body.return_token_ids:
        choice["token_ids"] = list(text.token_ids)
    return _choice(index, choice, _reason(text, reader), logprobs) | _stop_reason(text, body)


@dataclass(slots=True)
class _OpenChoice:
    """A choice of a stream. `tokens`: the tokens of its text up to now."""

    reader: AnswerReader
    offsets: _Offsets = field(default_factory=_Offsets)
    tokens: int = 0


class _ChunkWriter:
    """Writes the chunks of a stream. As in vLLM, the first text of the input number i is the choice of index i * n.

    `begins`: the beginning of each input's texts, which comes before the events.
    """

    def __init__(
        self,
        writer: _AnswerWriter,
        head: dict[str, Any],
        body: bodies.CompletionOptions,
        begins: Sequence[str],
        new_reader: Callable[[], AnswerReader],
    ) -> None:
        self._writer, self._body, self._begins = writer, body, begins
        self._options, self._texts = body.stream_options or bodies.StreamOptions(), body.n or 1
        self._head = head | {"object": writer.part_object} | ({"usage": None} if self._options.include_usage else {})
        self._choices = [_OpenChoice(new_reader()) for _ in range(self._texts * len(begins))]
        self._prompt_tokens = [0] * len(begins)
        self._begun: set[int] = set()
        self._usages: list[Usage] = []

    async def chunks(self, events: AsyncGenerator[tuple[int, TextEvent], None]) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the chunks."""
        async with aclosing(events):
            async for number, event in events:
                for chunk in self._write_event(number, event):
                    yield chunk
        if self._options.include_usage:
            usage = _usage(self._usages, [choice.reader for choice in self._choices])
            yield self._head | {"choices": [], "usage": usage}

    def _write_event(self, number: int, event: TextEvent) -> Iterator[dict[str, Any]]:
        """Yields the chunks of an event of an input's texts."""
        if number not in self._begun:
            self._begun.add(number)
            yield from self._write_begins(number, event)
        if isinstance(event, GeneratedPart):
            yield from self._write_part(number * self._texts + event.sequence, event)
        elif isinstance(event, InferenceResult):
            yield from self._write_ends(number * self._texts, event)

    def _write_begins(self, number: int, event: TextEvent) -> Iterator[dict[str, Any]]:
        """Yields the first chunks of an input's texts, at its first event, which tells the tokens of the prompt."""
        if isinstance(event, GenerateStart):
            self._prompt_tokens[number] = event.prompt_tokens
            self._head |= _fingerprint(event.version)
        elif isinstance(event, InferenceResult):
            self._prompt_tokens[number] = event.usage.tokens
            self._head |= _fingerprint(event.model.version)
        if first := self._writer.begin or (self._writer.part(self._begins[number]) if self._begins[number] else None):
            for index in range(number * self._texts, (number + 1) * self._texts):
                yield self._chunk(index, first)

    def _write_part(self, index: int, part: GeneratedPart) -> Iterator[dict[str, Any]]:
        choice = self._choices[index]
        choice.tokens += len(part.token_ids)
        choice.reader.count(part.token_ids)
        logprobs = self._writer.logprobs(part.logprobs, choice.offsets) if part.logprobs else None
        ids = {"token_ids": part.token_ids} if self._body.return_token_ids else {}
        for piece in [*choice.reader.read(part.text)] or ([""] if logprobs or ids else []):
            yield self._chunk(index, self._write_piece(piece) | ids, None, logprobs)
            logprobs, ids = None, {}

    def _write_ends(self, first_index: int, result: InferenceResult) -> Iterator[dict[str, Any]]:
        """Yields the last chunks of an input's texts."""
        self._usages.append(result.usage)
        for index, text in enumerate(result.texts, first_index):
            reader = self._choices[index].reader
            for piece in reader.read("", is_last=True):
                yield self._chunk(index, self._write_piece(piece))
            end = self._chunk(index, self._writer.part(""), _reason(text, reader))
            end["choices"][0] |= _stop_reason(text, self._body)
            yield end

    def _write_piece(self, piece: str | dict[str, Any]) -> dict[str, Any]:
        if isinstance(piece, ReasoningText):
            return {"delta": {"reasoning_content": piece}}
        return self._writer.part(piece) if isinstance(piece, str) else {"delta": {"tool_calls": [piece]}}

    def _chunk(
        self, index: int, text: Mapping[str, Any], reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        chunk = self._head | {"choices": [_choice(index, text, reason, logprobs)]}
        if self._options.include_usage and self._options.continuous_usage_stats:
            prompt_tokens, choice = self._prompt_tokens[index // self._texts], self._choices[index]
            chunk["usage"] = _usage([Usage(tokens=prompt_tokens, generated_tokens=choice.tokens)], [choice.reader])
        return chunk


def _fingerprint(version: int | str) -> dict[str, str]:
    """Returns the field that says what made a text: neuronpipe's version, and the model's version."""
    return {"system_fingerprint": f"neuronpipe-{__version__}-{version}"}


def _choice(index: int, text: Mapping[str, Any], reason: str | None, logprobs: Any) -> dict[str, Any]:
    return {"index": index, **text, "logprobs": logprobs or None, "finish_reason": reason}


def _reason(text: GeneratedText, reader: AnswerReader) -> str:
    """Returns the reason for the end of a text that the reader has read."""
    if text.finish_reason == FinishReason.FINISH_REASON_LENGTH:
        return "length"
    return "tool_calls" if reader.ends_with_calls else "stop"


def _stop_reason(text: GeneratedText, body: bodies.CompletionOptions) -> dict[str, Any]:
    """Returns vLLM's field of a choice that a stop string or a stop token of the request ended."""
    stop_ids = getattr(body, "stop_token_ids", None) or ()
    if text.finish_reason == FinishReason.FINISH_REASON_END and text.token_ids and text.token_ids[-1] in stop_ids:
        return {"stop_reason": text.token_ids[-1]}
    return {"stop_reason": text.stop_string} if text.stop_string else {}


def _model(inference: Inference, request: HttpRequest) -> ModelName:
    return inference.choose(request.model(request.names.get("name") or request.body.model), "text_generation")


def _read_variables(body: bodies.ChatRequest) -> dict[str, Sequence[str]]:
    """Returns the variables of the template that each field of a chat sets."""
    fields: dict[str, Sequence[str]] = {
        f"chat_template_kwargs.{name}": (name,) for name in body.chat_template_kwargs or ()
    }
    if body.reasoning_effort:
        fields["reasoning_effort"] = effort_variables(body.reasoning_effort)
    if body.verbosity:
        fields["verbosity"] = ("verbosity",)
    return fields


def _thinking(body: bodies.ChatRequest) -> str:
    """Returns the setting of the template's thinking; empty for a prompt that ends in the answer."""
    if body.continue_final_message or body.add_generation_prompt is False:
        return ""
    return thinking_of(switched(body.reasoning_effort, body.chat_template_kwargs or {}))


def _tool_use(body: bodies.ChatRequest) -> ToolUse:
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
    return ToolUse.of(tools, _tool_choice(body.tool_choice), has_several=body.parallel_tool_calls is not False)


def _tool_choice(chosen: str | bodies.ChosenTool | bodies.AllowedChoice | None) -> ToolChoice:
    if isinstance(chosen, bodies.ChosenTool):
        return ToolChoice(function=chosen.function.name, field="tool_choice.function.name")
    if isinstance(chosen, bodies.AllowedChoice):
        names = [tool.function.name for tool in chosen.allowed_tools.tools]
        return ToolChoice(chosen.allowed_tools.mode, field="tool_choice.allowed_tools", allowed=names)
    return ToolChoice(chosen)


def _usage(usages: Sequence[Usage], readers: Sequence[AnswerReader]) -> dict[str, Any]:
    prompt = sum(usage.tokens for usage in usages)
    completion = sum(usage.generated_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        "completion_tokens_details": {"reasoning_tokens": sum(reader.reasoning_tokens for reader in readers)},
    }


def _fields(body: bodies.CompletionOptions) -> dict[str, str]:
    """Returns a request's names of fields."""
    names = _FIELDS | {f"options.{option}": field for option, field, _ in _forms(body)}
    limit, best = "max_tokens", "logprobs"
    if isinstance(body, bodies.ChatRequest):
        limit = "max_completion_tokens" if body.max_completion_tokens else limit
        best = "top_logprobs" if body.top_logprobs else best
        names |= {"prompt": "messages"}
    else:
        names |= {
            "prompt": "prompt…",
            "truncation": "truncate_prompt_tokens",
            "truncation_tokens": "truncate_prompt_tokens",
        }
    names |= {"template_arguments": "chat_template_kwargs", "prompt_token_ids": "prompt"}
    return names | {"options.max_new_tokens": limit, "options.top_logprobs": best, "options.prompt_logprobs": "echo"}


def _forms(body: bodies.CompletionOptions) -> Iterator[tuple[str, str, Any]]:
    """Yields the forms of the text that are no options by name: option, field and value. Raises InvalidInput."""
    response_format = body.response_format or bodies.ResponseFormat(type="text")
    schemas = [
        schema
        for schema in (response_format.json_schema, response_format.schema_, response_format.value)
        if schema is not None
    ]
    if len(schemas) > 1:
        raise InvalidInput("response_format", "has several of json_schema, schema and value; give one")
    if response_format.type == "regex":
        if not isinstance(response_format.value, str):
            raise InvalidInput("response_format.value", "must be a text")
        yield "regex", "response_format.value", response_format.value
    elif response_format.type == "json" or (response_format.type == "json_object" and response_format.value):
        if response_format.value is None:
            raise InvalidInput("response_format.value", "must be a text or an object")
        yield "json_schema", "response_format.value", response_format.value
    elif response_format.type == "text":
        if schemas:
            raise InvalidInput("response_format.type", "is text, with which there is no schema")
    elif named := response_format.json_schema:
        if named.schema_ is None:
            raise InvalidInput("response_format.json_schema.schema", "is missing")
        yield "json_schema", "response_format.json_schema.schema", named.schema_
    elif response_format.schema_ is not None:
        yield "json_schema", "response_format.schema", response_format.schema_
    elif response_format.type == "json_schema":
        raise InvalidInput("response_format.json_schema", "is missing")
    else:
        yield "json_object", "response_format", True
    if outputs := body.structured_outputs:
        for name, value in outputs.model_dump(exclude_none=True, by_alias=True).items():
            yield _FORM_OPTIONS.get(name, name), f"structured_outputs.{name}", value


def _options(body: bodies.CompletionOptions, max_tokens: int | None, top_logprobs: int | None) -> GenerationOptions:
    named = {name: getattr(body, option.openai) for name, option in OPTIONS.items() if option.openai}
    options = {name: value for name, value in named.items() if value is not None}
    stops = options.get("stop_strings", ())
    if "" in ([stops] if isinstance(stops, str) else stops):  # OpenAI ignores empty strings
        options["stop_strings"] = [stop for stop in stops if stop]
    choices_field = OPTIONS["choices"].openai
    for name, form_field, value in _forms(body):
        if name in options:
            raise InvalidInput(form_field, "is given twice")
        options[name] = value
        choices_field = form_field if name == "choices" else choices_field
    if options.get("choices") == []:
        raise InvalidInput(choices_field, "is empty; a text must have a choice")
    if body.ignore_eos:
        if max_tokens is None:
            raise InvalidInput("ignore_eos", "needs max_tokens, which the text then has")
        options["min_new_tokens"] = max_tokens
    drawn = [name for name in DRAWING if name in options]
    texts, beams = body.n or 1, options.get("num_beams", 1)
    if options.get("temperature") == 0 and texts > 1 and beams == 1:
        raise InvalidInput("n", "must be 1 with a temperature of 0, which gives the same text each time")
    if drawn and beams > 1 and options.get("temperature") != 0:
        raise InvalidInput(drawn[0], "cannot be combined with num_beams, which draws nothing")
    options = with_drawing(options, is_drawn=texts > 1 and beams == 1)
    if "seed" in options:
        options["seed"] %= _SEEDS
    if options.get("top_k") == -1:
        options["top_k"] = 0
    return GenerationOptions(**message_fields(options), max_new_tokens=max_tokens, top_logprobs=top_logprobs)
