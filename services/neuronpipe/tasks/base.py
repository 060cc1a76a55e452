"""The contract of a task, and the checks that tasks share."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions, TaskInput, Truncation
from neuronpipe.core.errors import CUT, InvalidInput
from neuronpipe.core.model import ModelSpec, TaskFacts
from neuronpipe.core.tensors import Array, Arrays, ArraySets

TokenIds = NDArray[np.int32]
Side = Literal["left", "right"]

# Limit for one text.
_MAX_WINDOWS = 1024
# Limit for all windows of a text together, if less than a quarter of each window is new text. Otherwise a few KB of
# text with a large overlap, or a long question in every window, make 1,024 windows of 384 tokens. They take two CPUs 20
# s. 65,536 tokens are 170 such windows.
_MAX_REPEATED_TOKENS = 65_536

# An input of models that leave the prompt out of their pooling, int32 [tokens]: 1 for each token of the prompt.
PROMPT_TOKENS = "prompt_tokens"

_TRUNCATIONS = frozenset(Truncation.values())
_ERROR = Truncation.TRUNCATION_ERROR
_LEFT = Truncation.TRUNCATION_LEFT


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A sequence with its special tokens. `token_ids` and `token_type_ids`: int32 [tokens]."""

    token_ids: TokenIds
    token_type_ids: TokenIds
    truncated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Window(EncodedText):
    """A sequence of a pair whose second text is long: overlapping windows share the second text.

    `char_start` and `char_end`: int32 [tokens], for each token of the second text the range of its word in that text,
    in code points, end exclusive; -1 for every other token.
    """

    char_start: TokenIds = field(kw_only=True)
    char_end: TokenIds = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class LocatedText(EncodedText):
    """A text, or a window of a long text, with the offsets of each token.

    `char_start` and `char_end`: int32 [tokens], in code points of the text, end exclusive; -1 for special tokens.
    `continues_word`: int32 [tokens], 1 for a token in the same word as the token before it.
    """

    char_start: TokenIds = field(kw_only=True)
    char_end: TokenIds = field(kw_only=True)
    continues_word: TokenIds = field(kw_only=True)

    def truncated(self, max_tokens: int, side: Side) -> "LocatedText":
        """Cuts the text to at most `max_tokens` tokens, as TextTokenizer.encode_truncated does."""
        of_text = np.flatnonzero(self.char_start >= 0)
        room = max(max_tokens - (len(self.char_start) - len(of_text)), 0)
        dropped = of_text[room:] if side == "right" else of_text[: max(len(of_text) - room, 0)]
        names = ("token_ids", "token_type_ids", "char_start", "char_end", "continues_word")
        remaining = {name: np.delete(getattr(self, name), dropped) for name in names}
        return LocatedText(**remaining, truncated_tokens=len(dropped))


@dataclass(frozen=True, slots=True)
class TextTokens:
    """The tokens of a text. `names`: their spelling in the vocabulary. `char_start`, `char_end`: as in LocatedText."""

    token_ids: TokenIds
    names: Sequence[str]
    char_start: TokenIds
    char_end: TokenIds


class TextTokenizer(Protocol):
    """A model's tokenizer, as tasks need it. Safe to call from several threads.

    Special tokens that a text spells ("[SEP]", "<s>") are plain text. In a `prompt`, which belongs to the model, they
    are special. Only fill-mask models recognize their mask in a text.
    """

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token by its spelling in the vocabulary; None if there is no such token."""

    def count(self, text: str) -> int:
        """Returns the number of tokens of a text, without special tokens."""

    def tokens(self, text: str, *, special_tokens: bool, max_tokens: float = math.inf) -> TextTokens:
        """Returns a text's tokens, with or without special tokens. Raises InvalidInput beyond `max_tokens`."""

    def text_of(self, token_ids: Iterable[int], *, special_tokens: bool) -> str:
        """Returns the text of tokens of the vocabulary, with or without the special tokens among them."""

    def special_tokens(self, *, pair: bool) -> int:
        """Returns the number of special tokens in a sequence of one text, or of a pair."""

    def encode(self, text: str, text_pair: str | None = None, *, prompt: str = "") -> EncodedText:
        """Encodes the whole text or pair behind the prompt as one sequence of any length."""

    def encode_each(self, texts: Sequence[str], *, prompt: str = "") -> Iterator[EncodedText]:
        """Encodes each of several whole texts behind the prompt, as `encode` does, in less time."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
    ) -> EncodedText:
        """Encodes the prompt that the model's chat template makes of messages and tools.

        - `messages`: each has a role, a content and the further fields that the template reads.
        - `tools`: tools that the model may call.
        - `arguments`: further arguments of the template. No text in them contains NUL.
        - `continues`: the model's text continues the last message, whose content is a text.

        Only special tokens that the template writes are special. Raises InvalidInput for messages that the template
        refuses.
        """

    def encode_truncated(
        self,
        text: str,
        text_pair: str | None,
        *,
        max_tokens: int,
        side: Side,
        only_first: bool = False,
        prompt: str = "",
    ) -> EncodedText:
        """Encodes a text or a pair with at most `max_tokens` tokens, including special tokens.

        In a pair, the longer text loses tokens first. With `only_first`, only the first text of a pair loses tokens and
        keeps at least one token: if the second text leaves no room, the result is too long.
        """

    def encode_windows(self, first: str, second: str, *, max_tokens: int, overlap_tokens: int) -> list[Window]:
        """Encodes the pair as sequences with the whole first text, and overlapping parts of the second."""

    def encode_words(self, words: Sequence[str]) -> tuple[TokenIds, TokenIds]:
        """Encodes words one by one, without special tokens. Returns their tokens, and the word of each token."""

    def locate(self, text: str) -> LocatedText:
        """Encodes the whole text as one sequence of any length."""

    def locate_windows(self, text: str, *, max_tokens: int, overlap_tokens: int) -> list[LocatedText]:
        """Encodes the text as sequences of at most `max_tokens` tokens that share `overlap_tokens` tokens."""


# Converts the bytes of an image file to the pixels that the model takes, uint8 [3, height, width]. Raises InvalidInput;
# thread-safe.
ImageReader: TypeAlias = Callable[[bytes], Array]
# The contents of a task's inputs.
Reads = Literal["texts", "images", "both"]


@dataclass(frozen=True, slots=True)
class Readers:
    tokenizer: TextTokenizer
    read_image: ImageReader


class Encoded(NamedTuple):
    """An encoded input: `sequences` for the executor, `annotations` for decode, one set for each sequence or none."""

    sequences: ArraySets
    annotations: ArraySets = ()
    truncated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Annotations:
    """The arrays that a task's decode reads for each sequence, beside the model's outputs.

    - `sizes`: the length of each array, which is int32 [n]: a number, "tokens" or "any".
    - `may_be_missing`: encode leaves them out if decode needs none.
    - `may_stand_alone`: encode may make annotations and no sequence. Then decode gets no outputs.
    """

    sizes: Mapping[str, str | int] = field(default_factory=dict)
    may_be_missing: bool = False
    may_stand_alone: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    """The options of a task whose texts come token by token (stages/neuron_executor/generation/).

    - `complete(input, model, tokens)`: the options with every field set. `tokens`: the number of tokens of the encoded
      input.
    - `decoded(options)`: a copy with only the options that decode reads.
    """

    complete: Callable[[Any, ModelSpec, int], GenerationOptions]
    decoded: Callable[[GenerationOptions], GenerationOptions]


@dataclass(frozen=True, slots=True)
class Task:
    """A task. `name`: the name of its field in TaskInput and TaskResult.

    - `check(input, model)` runs first. It and encode check the whole input, so that nothing is computed for an invalid
      input.
    - `encode(input, reader, model)` → Encoded. The encoder limits `model.max_tokens` to the input's
      `truncation_tokens`; the encode of a task that generates keeps room behind the prompt instead. The reader is the
      model's TextTokenizer, its ImageReader, or its Readers for both; `reads` says which. The encoding depends only on
      the results of `traits(input)`, and of `encoding_traits` of the model (core/model.py). Inputs with equal traits
      have the same encoding; caches rely on this.
    - `decode(input, model, annotations, outputs)` → the task's result message. `outputs` contains a set of arrays for
      each sequence, as the model's OutputSpec declares them. If the task generates, it also gets the model's
      Detokenizer (tasks/generated_text.py).
    - `decoded_fields`: the fields of the input that decode reads; None for all, if it needs the text. Only these are
      sent to the postprocessor, because texts and images can be large.
    - `facts`: the class of the task's facts about a model. `facts.of(model)` returns them.
    - `generation`: None for a task that does not generate.
    - `reads_date(input)`: whether the encoding may depend on the day.

    The functions raise InvalidInput. They are pure, and run in any process that has the model's spec.
    """

    name: str
    # Typed as Any: the message types differ by task, and the field's name has chosen the right pair.
    check: Callable[[Any, ModelSpec], None]
    traits: Callable[[Any], tuple[str | int, ...]]
    encode: Callable[[Any, Any, ModelSpec], Encoded]
    decode: Callable[..., Any]
    decoded_fields: tuple[str, ...] | None
    facts: type[TaskFacts] = TaskFacts
    annotations: Annotations = Annotations()
    generation: Generation | None = None
    reads: Reads = "texts"
    reads_date: Callable[[Any], bool] = lambda task_input: False

    @property
    def generates(self) -> bool:
        """Whether the task makes text. Its models run in steps (generation/) instead of batches."""
        return self.generation is not None

    def decoding_part(self, input: TaskInput) -> TaskInput:
        """Copies the fields that decode reads: numbers, lists, messages. Copying field by field is fastest."""
        if self.decoded_fields is None:
            return input
        part = TaskInput()
        whole, options = getattr(input, self.name), getattr(part, self.name)
        options.SetInParent()
        for name in self.decoded_fields:
            value = getattr(whole, name)
            if isinstance(value, int):
                setattr(options, name, value)
            elif self.generation:
                getattr(options, name).CopyFrom(self.generation.decoded(value))
            else:
                getattr(options, name).extend(value)
        return part


def traits_of(*names: str) -> Callable[[Any], tuple[str | int, ...]]:
    """Makes a task's `traits` from fields of its inputs: an image counts by its digest, a list by its elements."""

    def traits(input: Any) -> tuple[str | int, ...]:
        values: list[str | int] = []
        for name in names:
            value = getattr(input, name)
            if isinstance(value, bytes):
                values.append(blake2b(value, digest_size=32).hexdigest())
            elif isinstance(value, str | int):
                values.append(or_default(value) if name == "truncation" else value)  # type: ignore[arg-type]
            else:
                values += value
        return tuple(values)

    return traits


def check_text(name: str, text: str, *, may_be_empty: bool = False) -> None:
    """Refuses a text that is empty, unless `may_be_empty`, or has NUL, which tokenizers drop silently."""
    if not (text or may_be_empty):
        raise InvalidInput(name, "is empty")
    position = text.find("\0")
    if position >= 0:
        raise InvalidInput(name, f"has the character NUL at position {position}")


def check_token_ids(token_ids: Sequence[int], model: ModelSpec) -> None:
    if not token_ids:
        raise InvalidInput("token_ids", "is empty")
    largest = max(token_ids)
    if largest >= model.vocabulary_size:
        raise InvalidInput("token_ids", f"the id {largest}, the vocabulary has {model.vocabulary_size}")


def check_truncation(input: Any) -> None:
    """Refuses an unknown value, which a newer client may send: a guess could drop text silently."""
    if input.truncation not in _TRUNCATIONS:
        raise InvalidInput("truncation", f"{input.truncation} is not known")
    if truncation_tokens(input) and or_default(input.truncation) == _ERROR:
        raise InvalidInput("truncation_tokens", "is for truncation right or left")


def truncation_tokens(input: Any) -> int:
    return getattr(input, "truncation_tokens", 0)


def or_default(truncation: "Truncation.ValueType") -> "Truncation.ValueType":
    """Returns the truncation, or TRUNCATION_ERROR if it is not set."""
    return truncation or _ERROR


def check_windows(
    field_name: str, text: str, tokenizer: TextTokenizer, *, window_tokens: int, room_tokens: int, overlap_tokens: int
) -> None:
    """Refuses a text with too many windows before any is made. A window has room for `room_tokens` tokens of text."""
    new_tokens = room_tokens - overlap_tokens
    is_repeated = 4 * new_tokens < window_tokens

    def problem(tokens: int) -> str:
        windows = max(1, -(-(tokens - overlap_tokens) // new_tokens))
        if windows > _MAX_WINDOWS:
            return f"makes {windows} windows with an overlap of {overlap_tokens} tokens, the limit is {_MAX_WINDOWS}"
        computed = tokens + (windows - 1) * overlap_tokens + windows * (window_tokens - room_tokens)
        if windows > 1 and is_repeated and computed > _MAX_REPEATED_TOKENS:
            limit = f"the limit is {_MAX_REPEATED_TOKENS} where they advance by less than a quarter of a window"
            return f"makes {computed} tokens in {windows} windows that advance by {new_tokens}; {limit}"
        return ""

    # A text rarely has more tokens than bytes, so the tokens of most texts need not be counted.
    if problem(len(text.encode())) and (excess := problem(tokenizer.count(text))):
        raise InvalidInput(field_name, excess)


def encode_text(
    tokenizer: TextTokenizer,
    model: ModelSpec,
    text: str,
    text_pair: str | None,
    truncation: "Truncation.ValueType",
    field_name: str = "",
    prompt: str = "",
) -> Encoded:
    """Encodes a text or a pair behind the model's prompt. Raises InvalidInput if it must not be truncated."""
    field_name = field_name or ("text" if text_pair is None else "text and text_pair")
    if or_default(truncation) == _ERROR:
        encoded = tokenizer.encode(text, text_pair, prompt=prompt)
    else:
        encoded = tokenizer.encode_truncated(
            text, text_pair, max_tokens=model.max_tokens, side=side_of(truncation), prompt=prompt
        )
    tokens = len(encoded.token_ids)
    if encoded.truncated_tokens:
        special_tokens = tokenizer.special_tokens(pair=text_pair is not None)
        if special_tokens >= model.max_tokens:
            problem = f"{special_tokens} special tokens leave no room for text, the limit is {model.token_limit}"
            raise InvalidInput(field_name, problem)
    elif tokens > model.max_tokens:
        raise too_many_tokens(field_name, tokens, model)
    return Encoded([text_sequence(encoded, tokenizer, model, field_name, prompt)], (), encoded.truncated_tokens)


def text_sequence(
    encoded: EncodedText, tokenizer: TextTokenizer, model: ModelSpec, field_name: str, prompt: str
) -> Arrays:
    """Returns the arrays of a sequence that begins with a prompt, which may be empty. Raises InvalidInput."""
    if not len(encoded.token_ids):
        raise InvalidInput(field_name, "is empty, and has no tokens, as the model adds no special ones")
    arrays = sequence(encoded, model)
    if prompt and PROMPT_TOKENS in model.inputs:
        # sentence-transformers counts the special tokens before the prompt, and leaves out the special token behind it.
        is_closed = tokenizer.tokens(prompt, special_tokens=True).char_start[-1] < 0
        count = len(tokenizer.encode("", prompt=prompt).token_ids) - int(is_closed)
        arrays = {**arrays, PROMPT_TOKENS: (np.arange(len(encoded.token_ids)) < count).astype(np.int32)}
    return arrays


def cut_tokens(field_name: str, token_ids: TokenIds, model: ModelSpec, truncation: "Truncation.ValueType") -> TokenIds:
    """Cuts tokens to the model's limit, if the caller allows it. Raises InvalidInput."""
    excess = max(len(token_ids) - model.max_tokens, 0)
    if excess and or_default(truncation) == _ERROR:
        raise too_many_tokens(field_name, len(token_ids), model)
    return token_ids[excess:] if side_of(truncation) == "left" else token_ids[: model.max_tokens]


def cut_located(
    whole: LocatedText,
    model: ModelSpec,
    truncation: "Truncation.ValueType",
    advice: str = "",
    mentions: Sequence[str] = (),
) -> LocatedText:
    """Cuts a located text, or raises InvalidInput with `advice`: what else to do, by the fields in `mentions`."""
    tokens = len(whole.token_ids)
    if tokens <= model.max_tokens:
        return whole
    if or_default(truncation) == _ERROR:
        raise too_many_tokens("text", tokens, model, advice, mentions)
    return whole.truncated(model.max_tokens, side_of(truncation))


def too_many_tokens(
    field: str, tokens: int, model: ModelSpec, advice: str = "", mentions: Sequence[str] = ()
) -> InvalidInput:
    """Returns the error of an input that has too many tokens and may be cut. `advice`, `mentions`: see cut_located."""
    problem = f"{tokens} tokens, the model takes {model.token_limit}; {CUT}{advice}"
    return InvalidInput(field, problem, ("truncation", *mentions))


def side_of(truncation: "Truncation.ValueType") -> Side:
    """Returns the side at which truncation drops tokens."""
    return "left" if truncation == _LEFT else "right"


def sequence(encoded: EncodedText, model: ModelSpec) -> Arrays:
    """Returns the arrays of a sequence for the executor, with token_type_ids if the model takes them and any is 1."""
    arrays = {"input_ids": encoded.token_ids}
    if "token_type_ids" in model.inputs and np.count_nonzero(encoded.token_type_ids):
        arrays["token_type_ids"] = encoded.token_type_ids
    return arrays


def check_image(image: bytes) -> None:
    if not image:
        raise InvalidInput("image", "is empty")


def encode_image(image: bytes, read_image: ImageReader) -> Encoded:
    return Encoded([{"pixels": read_image(image)}])
