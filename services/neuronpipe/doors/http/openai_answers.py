"""The answers of OpenAI's chat completions and completions, whole and as events."""

import time
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from neuronpipe import __version__
from neuronpipe.api.v1 import tasks_pb2 as tasks
from neuronpipe.api.v1.inference_pb2 import GenerateStart, Usage
from neuronpipe.api.v1.tasks_pb2 import FinishReason, GeneratedText, TokenLogprob
from neuronpipe.core.packed import pack_texts
from neuronpipe.doors.http import openai_text_bodies as bodies
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.events import event_response
from neuronpipe.doors.http.exchange import HttpRequest, HttpResponse
from neuronpipe.doors.http.problems import OPENAI_ERROR
from neuronpipe.doors.http.reasoning import AnswerReader, ReasoningText
from neuronpipe.doors.inference import Inference, Inputs, ModelName
from neuronpipe.gateway.requests import GeneratedPart, InferenceResult, TextEvent


@dataclass(frozen=True, slots=True)
class AnswerWriter:
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


CHAT_WRITER = AnswerWriter(
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


COMPLETION_WRITER = AnswerWriter(
    id_prefix="cmpl",
    whole_object="text_completion",
    part_object="text_completion",
    whole=_text,
    part=_text,
    logprobs=_completion_logprobs,
)


async def answer_texts(
    inference: Inference,
    request: HttpRequest,
    model: ModelName,
    writer: AnswerWriter,
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
    writer: AnswerWriter,
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
        writer: AnswerWriter,
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
