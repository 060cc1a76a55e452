"""Text generation: continues a prompt, or a chat, token by token.

Equal to transformers' `generate` with the same options, which have the same names. The executor chooses the tokens
(stages/neuron_executor/generation/). This file encodes prompts, completes options, and turns tokens into text.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar, Literal, TypeVar, cast

import numpy as np
from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import (
    EarlyStopping,
    FinishReason,
    GenerationOptions,
    SummarizationInput,
    TextGenerationInput,
    TextGenerationResult,
    TokenLogprob,
    TokenSequence,
    TopLogprob,
    TranslationInput,
    Truncation,
)
from neuronpipe.core.errors import CUT, InvalidInput
from neuronpipe.core.generated import TokenLogprobs
from neuronpipe.core.generation_options import DRAWING, FORMS, OPTIONS, Option
from neuronpipe.core.model import ModelSpec, TaskFacts, with_fields
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

# The default of a model without its own value. transformers' pipeline has the same default.
_MAX_NEW_TOKENS = 256
_FINISH_REASONS = frozenset(FinishReason.values())
_MORE, _STOP_STRING = FinishReason.FINISH_REASON_UNSPECIFIED, FinishReason.FINISH_REASON_STOP_STRING
_MAX_MESSAGES, _MAX_ROLE_LENGTH = 1024, 64
_MAX_JSON = 1 << 18
_MESSAGE_FIELDS = ("tools", "template_arguments", "continue_final_message")
# The number of schemas and grammars whose last check is remembered.
_CHECKED_FORMS = 4
_MAX_LOGPROBS = int(OPTIONS["top_logprobs"].maximum)
_MODEL_DEFAULTS = {
    name: (type(option.default) if option.default is not None else int | None, option.default)
    for name, option in OPTIONS.items()
    if option.has_default
}


# Texts before and behind the reasoning of a model, where they are no special tokens: Qwen, DeepSeek; Magistral.
REASONING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))

# Texts before and behind a call of Hermes and Qwen.
CALL_MARKS = ("<tool_call>", "</tool_call>")


def reasoning_marks_of(template: str) -> tuple[str, str] | None:
    """Returns the texts before and behind the reasoning by a template; None for a template without reasoning."""
    return next((marks for marks in REASONING_MARKS if marks[1] in template), None)


@with_fields(_MODEL_DEFAULTS)
class GenerationFacts(TaskFacts):
    """Facts about a model that generates: its generation_config, with fields for all options, its chat template."""

    encoded: ClassVar[tuple[str, ...]] = ("chat_template", "template_variables", "prefix")
    public_fields: ClassVar[tuple[str, ...]] = ("has_chat_template",)

    chat_template: str = Field(
        "", description="jinja template that makes a prompt of messages; empty: the model takes none"
    )
    template_variables: Mapping[str, str] = Field({}, description="special tokens by their names in the template")
    end_token_ids: tuple[int, ...] = Field((), description="tokens that end a text (eos_token_id)")
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    max_length: int | None = Field(
        None, description="maximum number of tokens, prompt included, instead of max_new_tokens"
    )
    min_length: int = Field(0, description="minimum number of tokens, prompt included, instead of min_new_tokens")
    do_sample: bool = False
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    encoder_no_repeat_ngram_size: int = 0
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    exponential_decay_length_penalty: tuple[int, float] | None = None
    renormalize_logits: bool = False
    num_beams: int = 1
    early_stopping: bool | Literal["never"] = False
    decoder_start_token_ids: tuple[int, ...] = Field(
        (), description="tokens before every generated text, in a model with an encoder"
    )
    prefix: str = Field("", description="text that is put before every text, in a model with an encoder")
    max_text_tokens: int = Field(0, description="maximum number of tokens of a text, in a model with an encoder")

    opens_reasoning: tuple[Literal["default", "on", "off"], ...] = Field(
        (), description="settings of a template's thinking with which the prompt ends in the model's reasoning"
    )

    read_variables: tuple[str, ...] | None = Field(
        None, description="variables that the chat template reads; none: a bundle that does not say"
    )

    reasoning_end_id: int | None = Field(
        None, description="the token that is the mark behind the reasoning; none: several tokens, or unknown"
    )

    call_mark_ids: tuple[int, ...] | None = Field(
        None, description="the tokens that are CALL_MARKS; empty: several tokens each; none: unknown, or no such marks"
    )

    def reads_any(self, variables: Iterable[str]) -> bool:
        """Returns whether the chat template may read one of these variables."""
        return self.read_variables is None or not {*self.read_variables}.isdisjoint(variables)

    @property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """The texts before and behind the reasoning of a model, by its template; None for a model without reasoning."""
        return reasoning_marks_of(self.chat_template)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_template)

    def default_of(self, option: str) -> Any:
        return getattr(self, option)


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


def check_all_options(options: GenerationOptions, model: ModelSpec) -> None:
    check_options(options, model)
    facts = GenerationFacts.of(model)
    samples, beams, texts = _samples(options, facts), _num_beams(options, facts), options.num_return_sequences
    for name in DRAWING if not samples else ():
        if name in _given(options):
            problem = "has an effect only with do_sample; set do_sample to true"
            raise InvalidInput(f"options.{name}", problem, ["options.do_sample"] * 2)
    if form := form_of(options):
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            if name in _given(options):
                raise InvalidInput(f"options.{name}", f"cannot be combined with {form}", [f"options.{form}"])
        if not facts.end_token_ids:
            raise InvalidInput(f"options.{form}", f"model {model.name!r} has no token that ends a text")
    if options.prompt_logprobs:
        if not options.HasField("top_logprobs"):
            problem = "has an effect only with top_logprobs"
            raise InvalidInput("options.prompt_logprobs", problem, ["options.top_logprobs"])
        if texts > 1 or beams > 1 or options.stop_strings or facts.decoder_start_token_ids:
            problem = "is for one text of a prompt, without beams and stop_strings"
            raise InvalidInput("options.prompt_logprobs", problem, ["options.stop_strings"])
    if texts > 1 and beams == 1 and not samples:
        problem = "more than 1 text need do_sample or num_beams; set one"
        raise InvalidInput("options.num_return_sequences", problem, ["options.do_sample", "options.num_beams"])
    if texts > beams > 1:
        advice = "; with num_beams 1, each is drawn by itself" if samples else ""
        problem = f"{texts}, must be at most num_beams, {beams}{advice}"
        raise InvalidInput("options.num_return_sequences", problem, ["options.num_beams"] * (2 if samples else 1))


def form_of(options: GenerationOptions) -> str:
    """Returns the field that sets the form of the text, or an empty string. Raises InvalidInput if several are set."""
    forms = [name for name in FORMS if getattr(options, name)]
    if len(forms) > 1:
        raise InvalidInput(f"options.{forms[1]}", f"cannot be combined with {forms[0]}")
    return forms[0] if forms else ""


def _samples(options: GenerationOptions, facts: GenerationFacts) -> bool:
    """Returns whether tokens are drawn. A request for a search and for nothing else gets the best text."""
    return options.do_sample if options.HasField("do_sample") else facts.do_sample and options.num_beams <= 1


def is_drawn(options: GenerationOptions, model: ModelSpec) -> bool:
    """Returns whether equal requests get different texts: tokens are drawn, and no seed is set. Checks no option."""
    return _samples(options, GenerationFacts.of(model)) and not options.HasField("seed")


def _num_beams(options: GenerationOptions, facts: GenerationFacts) -> int:
    """Returns the number of texts that are searched side by side. Stop strings disable the model's own search."""
    default_beams = 1 if options.stop_strings else facts.num_beams
    return options.num_beams if options.HasField("num_beams") else default_beams


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


def check_options(options: GenerationOptions, model: ModelSpec) -> None:
    """Checks the values of the fields that are set. Raises InvalidInput."""
    _check_lengths(options, model)
    for field, value in options.ListFields():
        _check_value(f"options.{field.name}", OPTIONS[field.name], value, model)
    if options.num_beams > 1 and options.stop_strings:
        problem = "cannot be combined with num_beams, which searches tokens and knows no text; use stop_token_ids"
        raise InvalidInput("options.stop_strings", problem, ["options.num_beams", "options.stop_token_ids"])


def _room(model: ModelSpec, prompt_tokens: int) -> int:
    """Returns the maximum number of tokens of a text after a prompt of `prompt_tokens` tokens."""
    return GenerationFacts.of(model).max_text_tokens or model.max_tokens - prompt_tokens


def _check_lengths(options: GenerationOptions, model: ModelSpec) -> None:
    room = _room(model, 1)
    if options.HasField("max_new_tokens") and not 1 <= options.max_new_tokens <= room:
        takes = f": the model takes {model.max_tokens} tokens, the prompt included" if room < model.max_tokens else ""
        raise InvalidInput("options.max_new_tokens", f"{options.max_new_tokens}, must be 1 to {room}{takes}")
    if options.HasField("max_new_tokens") and options.min_new_tokens > options.max_new_tokens:
        problem = f"{options.min_new_tokens}, more than max_new_tokens, {options.max_new_tokens}"
        raise InvalidInput("options.min_new_tokens", problem, ["options.max_new_tokens"])
    if options.min_new_tokens > room:
        raise InvalidInput("options.min_new_tokens", f"{options.min_new_tokens}, must be at most {room}")


def _check_value(place: str, option: Option, value: Any, model: ModelSpec) -> None:
    """Checks the value of a field by the declaration of its option."""
    if option.bounds and not option.minimum <= value <= option.maximum:  # also true for NaN
        raise InvalidInput(place, f"{value:g}, must be {option.bounds}")
    if option.kind == "words" and value not in EarlyStopping.values():
        raise InvalidInput(place, f"{value} is not known")
    if option.kind in ("text", "json") and not 1 <= len(value) <= option.max_size:
        raise InvalidInput(place, f"{len(value)} characters, must be 1 to {option.max_size}")
    if option.kind == "json":
        _check_depth(place, value)
    if option.max_items and len(value) > option.max_items:
        raise InvalidInput(place, f"{len(value)}, the limit is {option.max_items}")
    sequences = [item.token_ids for item in value] if option.kind == "sequences" else []
    for item in value if option.kind == "texts" else sequences:
        if not 1 <= len(item) <= option.max_size:
            unit = "characters" if option.kind == "texts" else "tokens"
            raise InvalidInput(place, f"one has {len(item)} {unit}, must have 1 to {option.max_size}")
    biases = value if option.kind == "biases" else ()
    if wrong := [bias.bias for bias in biases if not option.minimum <= bias.bias <= option.maximum]:
        raise InvalidInput(place, f"{wrong[0]:g}, must be {option.minimum} to {option.maximum}")
    biased = (bias.token_id for bias in biases)
    ids = {"token": [value], "tokens": value, "sequences": chain(*sequences), "biases": biased}.get(option.kind, ())
    if (largest := max(ids, default=-1)) >= model.vocabulary_size:
        raise InvalidInput(place, f"the id {largest}, the vocabulary has {model.vocabulary_size}")


# The tokenizer and the engine check each request. A check of the largest schema takes 3.4 ms (2026-11-30). An error is
# not remembered.
@lru_cache(_CHECKED_FORMS)
def _check_depth(place: str, text: str) -> None:
    check_depth(place, text.encode())


def _given(options: GenerationOptions) -> set[str]:
    return {field.name for field, _ in options.ListFields()}


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


def complete_options(options: GenerationOptions, model: ModelSpec, prompt_tokens: int) -> GenerationOptions:
    """Sets every field of checked options. Raises InvalidInput if the prompt is as long as the model's max_length."""
    facts, room = GenerationFacts.of(model), _room(model, prompt_tokens)
    complete = GenerationOptions()
    complete.CopyFrom(options)
    if not options.HasField("max_new_tokens"):
        complete.max_new_tokens = min(_default_new_tokens(options, facts, prompt_tokens), room)
    named = _given(options)
    for name in _MODEL_DEFAULTS:
        if name not in named and (value := facts.default_of(name)) is not None:
            setattr(complete, name, value)
    if "min_new_tokens" not in named and not facts.min_new_tokens:
        complete.min_new_tokens = max(0, facts.min_length - prompt_tokens)
    # A model's own minimum may be above the maximum of the request.
    complete.min_new_tokens = min(complete.min_new_tokens, complete.max_new_tokens)
    complete.do_sample, complete.num_beams = _samples(options, facts), _num_beams(options, facts)
    if not options.early_stopping:
        complete.early_stopping = EarlyStopping.Value(f"EARLY_STOPPING_{str(facts.early_stopping).upper()}")
    if not options.bad_words_ids:
        complete.bad_words_ids.extend(TokenSequence(token_ids=word) for word in facts.bad_words_ids)
    if not options.HasField("seed"):
        complete.seed = random.getrandbits(64)
    return complete


def most_generated(options: GenerationOptions, model: ModelSpec, prompt_tokens: int = 1) -> int:
    """Returns the maximum number of tokens that a request, which may be unchecked, generates in all texts or beams."""
    facts, max_new_tokens = GenerationFacts.of(model), options.max_new_tokens
    if not options.HasField("max_new_tokens"):
        max_new_tokens = _default_new_tokens(options, facts, prompt_tokens)
    texts = max(_num_beams(options, facts), options.num_return_sequences, 1)
    return min(max_new_tokens, _room(model, prompt_tokens)) * min(texts, int(OPTIONS["num_beams"].maximum))


def _default_new_tokens(options: GenerationOptions, facts: GenerationFacts, prompt_tokens: int) -> int:
    """Returns the maximum number of new tokens for a request without max_new_tokens."""
    if facts.max_new_tokens or facts.max_length is None:
        return facts.max_new_tokens or max(_MAX_NEW_TOKENS, options.min_new_tokens)
    if prompt_tokens >= facts.max_length:
        raise InvalidInput(
            "options.max_new_tokens",
            f"is missing, and the prompt has {prompt_tokens} tokens: the model's own max_length is {facts.max_length}, "
            "the prompt included",
        )
    return facts.max_length - prompt_tokens


def decode(
    input: TextGenerationInput | SummarizationInput | TranslationInput,
    model: ModelSpec,
    annotations: ArraySets,
    outputs: ArraySets,
    detokenizer: Detokenizer,
) -> TextGenerationResult:
    """Returns the text of `token_ids`, int32 [tokens], as far as it cannot change any more.

    `window` in the annotation: int32, the tokens before them. `finish_reason`, int32 []: the reason why the last token
    ends the text; FINISH_REASON_UNSPECIFIED if more tokens follow. `score`, float32 []: only for a text of a beam
    search. The result's token_ids are the tokens of its text.
    """
    token_ids, finish_reason = _read_part(outputs[0], model)
    is_last = finish_reason != _MORE
    window = annotations[0]["window"].tolist()
    if input.options.HasField("skip_special_tokens") and not input.options.skip_special_tokens:
        detokenizer = detokenizer.with_special or detokenizer
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


def _read_part(arrays: Arrays, model: ModelSpec) -> "tuple[list[int], FinishReason.ValueType]":
    """Reads tokens and the reason why they end. Raises InvalidInput if no stage makes such arrays."""
    token_ids, reason = _read_ids(arrays, "token_ids", model, 0, _room(model, 0)), arrays.get("finish_reason")
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
