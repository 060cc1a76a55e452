"""Text generation: continues a prompt, or a chat, token by token.

Equal to transformers' `generate` with the same options, which have the same names. The executor chooses the tokens
(stages/neuron_executor/generation/). text_options.py checks and completes the options. This file encodes prompts, and
turns tokens into text.
"""

import json
from collections.abc import Sequence
from datetime import date
from typing import Any, TypeVar, cast

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import (
    FinishReason,
    GenerationOptions,
    SummarizationInput,
    TextGenerationInput,
    TextGenerationResult,
    TokenLogprob,
    TopLogprob,
    TranslationInput,
    Truncation,
)
from neuronpipe.core.errors import CUT, InvalidInput
from neuronpipe.core.generated import Released, TokenLogprobs
from neuronpipe.core.generation_options import OPTIONS
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.parsing import check_depth
from neuronpipe.core.tensors import Array, Arrays, ArraySets
from neuronpipe.tasks.base import (
    Annotations,
    Encoded,
    EncodedText,
    Generation,
    Task,
    TextTokenizer,
    check_text,
    check_truncation,
    or_default,
    side_of,
)
from neuronpipe.tasks.generated_text import WINDOW_TOKENS, Detokenizer, release
from neuronpipe.tasks.text_options import GenerationFacts, check_all_options, complete_options, room_after

_FINISH_REASONS = frozenset(FinishReason.values())
_MORE, _STOP_STRING = FinishReason.FINISH_REASON_UNSPECIFIED, FinishReason.FINISH_REASON_STOP_STRING
_MAX_MESSAGES, _MAX_ROLE_LENGTH = 1024, 64
_MAX_JSON = 1 << 18
_MESSAGE_FIELDS = ("tools", "template_arguments", "continue_final_message")
_MAX_LOGPROBS = int(OPTIONS["top_logprobs"].maximum)


def check(input: TextGenerationInput, model: ModelSpec) -> None:
    check_truncation(input)
    if input.messages:
        _check_messages(input, model)
    elif given_fields := [name for name in _MESSAGE_FIELDS if getattr(input, name)]:
        raise InvalidInput(given_fields[0], "is for messages")
    elif not input.prompt_token_ids:
        check_text("prompt", input.prompt)
    elif input.prompt:
        raise InvalidInput("prompt_token_ids", "cannot be combined with a prompt")
    elif (largest := max(input.prompt_token_ids)) >= model.vocabulary_size:
        raise InvalidInput("prompt_token_ids", f"the id {largest}, the vocabulary has {model.vocabulary_size}")
    check_all_options(input.options, model)


def _check_messages(input: TextGenerationInput, model: ModelSpec) -> None:
    if not GenerationFacts.of(model).has_chat_template:
        raise InvalidInput("messages", f"model {model.name!r} has no chat template; send a prompt")
    if input.prompt or input.prompt_token_ids:
        raise InvalidInput("messages", "cannot be combined with a prompt")
    if or_default(input.truncation) != Truncation.TRUNCATION_ERROR:
        raise InvalidInput("truncation", "is for prompts; messages are never cut")
    if len(input.messages) > _MAX_MESSAGES:
        raise InvalidInput("messages", f"{len(input.messages)} messages, the limit is {_MAX_MESSAGES}")
    arguments = _read_json("template_arguments", input.template_arguments) if input.template_arguments else {}
    if not isinstance(arguments, dict) or {"messages", "tools"} & {*arguments}:
        raise InvalidInput("template_arguments", "must be a JSON object, without messages and tools")
    if input.continue_final_message and (not input.messages[-1].content or arguments.get("add_generation_prompt")):
        problem = "needs a last message with a text, and no add_generation_prompt"
        raise InvalidInput("continue_final_message", problem)
    if input.tools:
        if "tools" not in GenerationFacts.of(model).chat_template:
            raise InvalidInput("tools", f"the chat template of model {model.name!r} knows none")
        tools = _read_json("tools", input.tools)
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise InvalidInput("tools", "must be a JSON list of objects")
    for index, message in enumerate(input.messages):
        place = f"messages[{index}]"
        if not 1 <= len(message.role) <= _MAX_ROLE_LENGTH:
            problem = f"has {len(message.role)} characters, must have 1 to {_MAX_ROLE_LENGTH}"
            raise InvalidInput(f"{place}.role", problem)
        for name, text in ("role", message.role), ("content", message.content):
            if text:
                check_text(f"{place}.{name}", text)
        if message.fields and not isinstance(_read_json(place, message.fields), dict):
            raise InvalidInput(place, "further fields must be a JSON object")


def _read_json(name: str, text: str) -> Any:
    if len(text) > _MAX_JSON:
        raise InvalidInput(name, f"{len(text)} characters, the limit is {_MAX_JSON}")
    if "\\u0000" in text:
        raise InvalidInput(name, "has the character NUL")
    check_depth(name, text.encode())
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # half a pair of surrogates is not a text
        return value
    except (ValueError, RecursionError) as error:
        raise InvalidInput(name, "is no valid JSON") from error


def traits(input: TextGenerationInput) -> tuple[str | int, ...]:
    """Returns the values of an input on which its encoding depends."""
    # Templates may write the date.
    message_parts = [part for message in input.messages for part in (message.role, message.content, message.fields)]
    chat = [str(getattr(input, name)) for name in _MESSAGE_FIELDS]
    content = (date.today().isoformat(), *message_parts, *chat) if message_parts else (*input.prompt_token_ids,)
    return input.prompt, or_default(input.truncation), _reserved(input.options), *content


def encode(input: TextGenerationInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Encodes the prompt, or the prompt made of the messages, as one sequence that leaves room for the new tokens.

    Raises InvalidInput. The annotation is the end of the prompt, on which the first text may depend.
    """
    reserved = _reserved(input.options)
    room = model.max_tokens - reserved
    room = min(room, input.truncation_tokens or room)
    if input.messages:
        encoded = encode_messages(input, tokenizer)
    elif input.prompt_token_ids:
        ids = np.array(input.prompt_token_ids, np.int32)
        cut = 0 if or_default(input.truncation) == Truncation.TRUNCATION_ERROR else max(0, len(ids) - room)
        kept_ids = ids[cut:] if side_of(input.truncation) == "left" else ids[: len(ids) - cut]
        encoded = EncodedText(kept_ids, np.zeros(len(kept_ids), np.int32), cut)
    elif or_default(input.truncation) == Truncation.TRUNCATION_ERROR:
        encoded = tokenizer.encode(input.prompt)
    else:
        encoded = tokenizer.encode_truncated(input.prompt, None, max_tokens=room, side=side_of(input.truncation))
    tokens, name = len(encoded.token_ids), "messages" if input.messages else "prompt"
    if tokens >= model.max_tokens:
        advice, mentions = ("send less", []) if input.messages else (CUT, ["truncation"])
        problem = f"{tokens} tokens, which leave no room for a text: the model takes {model.max_tokens}; {advice}"
        raise InvalidInput(name, problem, mentions)
    if tokens > room:
        advice = "lower max_new_tokens" + ("" if input.messages else f", or {CUT}")
        problem = f"{tokens} tokens and {reserved} new ones, the model takes {model.max_tokens} together; {advice}"
        raise InvalidInput(name, problem, ["options.max_new_tokens", *([] if input.messages else ["truncation"])])
    if not tokens:
        raise InvalidInput(name, "has no tokens" if name == "prompt" else "have no tokens")
    window = window_arrays(encoded.token_ids[-WINDOW_TOKENS:].tolist())
    return Encoded([{"input_ids": encoded.token_ids}], window, encoded.truncated_tokens)


def encode_messages(input: TextGenerationInput, tokenizer: TextTokenizer) -> EncodedText:
    """Encodes the prompt that the template makes of the messages, however long it is. Raises InvalidInput."""
    messages = [
        {"role": message.role, "content": message.content, **json.loads(message.fields or "{}")}
        for message in input.messages
    ]
    tools, arguments = json.loads(input.tools or "null"), json.loads(input.template_arguments or "{}")
    return tokenizer.encode_chat(messages, tools, arguments, continues=input.continue_final_message)


def _reserved(options: GenerationOptions) -> int:
    """Returns the number of tokens that a prompt leaves free."""
    return max(1, options.max_new_tokens, options.min_new_tokens)


def complete(
    input: TextGenerationInput | SummarizationInput | TranslationInput, model: ModelSpec, tokens: int
) -> GenerationOptions:
    return complete_options(input.options, model, tokens)


def decode(
    input: TextGenerationInput | SummarizationInput | TranslationInput,
    model: ModelSpec,
    annotations: ArraySets,
    outputs: ArraySets,
    detokenizer: Detokenizer,
) -> TextGenerationResult:
    """Returns the part of a text that further tokens cannot change. The result's token_ids are the tokens of this part.

    - `annotations`: `window`, int32, the tokens before `token_ids`.
    - `outputs`: `token_ids`, int32 [tokens]; `finish_reason`, int32 [], which is FINISH_REASON_UNSPECIFIED if more
      tokens follow; `score`, float32 [], only for a text of a beam search.
    """
    token_ids, finish_reason = _read_part(outputs[0], model)
    is_last = finish_reason != _MORE
    window = annotations[0]["window"].tolist()
    detokenizer = _detokenizer_by(input.options, detokenizer)
    released = release(detokenizer, window, token_ids, input.options.stop_strings, is_last=is_last)
    result = TextGenerationResult()
    text = result.sequences.add(
        text=released.text,
        token_ids=token_ids[: released.tokens],
        finish_reason=_STOP_STRING if released.is_stopped else finish_reason,
        stop_string=released.stop_string,
    )
    if (score := outputs[0].get("score")) is not None:
        if score.dtype != np.float32 or score.shape:
            raise InvalidInput("outputs[0].score", "must be float32 []")
        text.score = float(score)
    if input.options.HasField("top_logprobs"):
        text.logprobs.extend(_logprobs(outputs[0], token_ids, window, detokenizer)[: released.tokens])
    if "prompt_ids" in outputs[0]:
        first, *others = _read_ids(outputs[0], "prompt_ids", model, 1, model.max_tokens)
        text.prompt_logprobs.append(_with_text(TokenLogprob(token_id=first), detokenizer, []))
        text.prompt_logprobs.extend(_logprobs(outputs[0], others, [first], detokenizer, "prompt_"))
    return result


def released_text(
    options: GenerationOptions, window: Sequence[int], token_ids: Sequence[int], detokenizer: Detokenizer
) -> Released:
    """Converts tokens to text as `decode` does, for a text that continues and needs nothing else."""
    return release(_detokenizer_by(options, detokenizer), window, token_ids, options.stop_strings, is_last=False)


def _detokenizer_by(options: GenerationOptions, detokenizer: Detokenizer) -> Detokenizer:
    if options.HasField("skip_special_tokens") and not options.skip_special_tokens:
        return detokenizer.with_special or detokenizer
    return detokenizer


def _read_part(arrays: Arrays, model: ModelSpec) -> "tuple[list[int], FinishReason.ValueType]":
    """Reads tokens and the reason why they end. Raises InvalidInput if no stage makes such arrays."""
    token_ids, reason = _read_ids(arrays, "token_ids", model, 0, room_after(model, 0)), arrays.get("finish_reason")
    if reason is None or reason.dtype != np.int32 or reason.shape or int(reason) not in _FINISH_REASONS:
        raise InvalidInput("outputs[0].finish_reason", "must be a FinishReason, int32 []")
    return token_ids, cast("FinishReason.ValueType", int(reason))


def _read_ids(arrays: Arrays, name: str, model: ModelSpec, min_tokens: int, max_tokens: int) -> list[int]:
    """Reads `min_tokens` to `max_tokens` tokens of the vocabulary. Raises InvalidInput."""
    ids = arrays.get(name)
    if ids is None or ids.dtype != np.int32 or ids.ndim != 1 or not min_tokens <= len(ids) <= max_tokens:
        raise InvalidInput(f"outputs[0].{name}", f"must be int32 [tokens], {min_tokens} to {max_tokens}")
    token_ids: list[int] = ids.tolist()
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < model.vocabulary_size:
        raise InvalidInput(f"outputs[0].{name}", f"has ids outside the vocabulary of {model.vocabulary_size}")
    return token_ids


def _logprobs(
    arrays: Arrays, token_ids: list[int], window: list[int], detokenizer: Detokenizer, prefix: str = ""
) -> list[TokenLogprob]:
    """Returns the log probabilities of tokens, and their texts behind the window. Raises InvalidInput."""
    logprobs, ids, tops = (arrays.get(prefix + name) for name in ("logprobs", "top_ids", "top_logprobs"))
    tokens, place = len(token_ids), f"outputs[0].{prefix}"
    if logprobs is None or logprobs.dtype != np.float32 or logprobs.shape != (tokens,):
        raise InvalidInput(f"{place}logprobs", "must be float32 [tokens]")
    if ids is None or ids.dtype != np.int32 or ids.shape[:1] != (tokens,) or ids.ndim != 2:
        raise InvalidInput(f"{place}top_ids", "must be int32 [tokens, n]")
    if tops is None or tops.dtype != np.float32 or tops.shape != ids.shape or ids.shape[1] > _MAX_LOGPROBS:
        raise InvalidInput(f"{place}top_logprobs", f"must be float32 [tokens, n], n of at most {_MAX_LOGPROBS}")
    if ids.size and ids.min() < 0:
        raise InvalidInput(f"{place}top_ids", "has ids below 0")
    token_logprobs = []
    before = [token for token in window if not detokenizer.is_skipped(token)][-1:]
    for row, (token_id, logprob) in enumerate(zip(token_ids, logprobs.tolist(), strict=True)):
        best = zip(ids[row].tolist(), tops[row].tolist(), strict=True)
        top = [_with_text(TopLogprob(token_id=top_id, logprob=value), detokenizer, before) for top_id, value in best]
        token_logprob = TokenLogprob(token_id=token_id, logprob=logprob, top=top)
        token_logprobs.append(_with_text(token_logprob, detokenizer, before))
        before = before if detokenizer.is_skipped(token_id) else [token_id]
    return token_logprobs


_LogprobT = TypeVar("_LogprobT", TokenLogprob, TopLogprob)


def _with_text(logprob: _LogprobT, detokenizer: Detokenizer, before: list[int]) -> _LogprobT:
    """Adds the text that the token has behind the tokens before it."""
    logprob.utf8 = detokenizer.bytes_of(logprob.token_id, before)
    logprob.text = logprob.utf8.decode(errors="replace")
    return logprob


def prompt_arrays(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Array]:
    """Returns the tokens of a prompt, and the log probabilities of all but the first token."""
    arrays = {f"prompt_{name}": array for name, array in logprob_arrays(logprobs).items()}
    return {"prompt_ids": np.array(token_ids, np.int32), **arrays}


def logprob_arrays(logprobs: Sequence[TokenLogprobs]) -> dict[str, Array]:
    """Returns the log probabilities of a part's tokens, in addition to `part_arrays`."""
    shape = len(logprobs), len(logprobs[0].top_token_ids) if logprobs else 0
    return {
        "logprobs": np.array([token.logprob for token in logprobs], np.float32),
        "top_ids": np.array([token.top_token_ids for token in logprobs], np.int32).reshape(shape),
        "top_logprobs": np.array([token.top_logprobs for token in logprobs], np.float32).reshape(shape),
    }


def read_logprobs(arrays: Arrays) -> list[TokenLogprobs]:
    columns = (arrays[name].tolist() for name in ("logprobs", "top_ids", "top_logprobs"))
    return [TokenLogprobs(*values) for values in zip(*columns, strict=True)]


def window_arrays(token_ids: list[int]) -> ArraySets:
    """Returns the tokens before a part, as `decode` reads them."""
    return [{"window": np.array(token_ids, np.int32)}]


def part_arrays(token_ids: list[int], finish_reason: int) -> ArraySets:
    """Returns the tokens of a part, as `decode` reads them."""
    return [{"token_ids": np.array(token_ids, np.int32), "finish_reason": np.array(finish_reason, np.int32)}]


def _decoded(options: GenerationOptions) -> GenerationOptions:
    """Copies the options that `decode` reads. The fields of a text's form may be long."""
    decoded = GenerationOptions(stop_strings=options.stop_strings)
    if options.HasField("top_logprobs"):
        decoded.top_logprobs = options.top_logprobs
    return decoded


ANNOTATIONS = Annotations({"window": "any"})
GENERATION = Generation(complete, _decoded)
TASK = Task(
    "text_generation",
    check,
    traits,
    encode,
    decode,
    ("options",),
    GenerationFacts,
    ANNOTATIONS,
    GENERATION,
    reads_date=lambda task_input: bool(task_input.messages),  # templates of chats may write the date
)
