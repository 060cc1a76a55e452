"""What a task is: two functions, and the checks that tasks share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.tasks_pb2 import TaskInput, Truncation
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec, TaskFacts
from neuronpipe.core.tensors import Array, Arrays, ArraySets

TokenIds = NDArray[np.int32]
Side = Literal["left", "right"]

# Of one text.
_MAX_WINDOWS = 1024
# Of all windows of a text together, where less than a quarter of each is new. Without it a few KB of text with a large overlap, or with a
# long question before every window, are 1,024 windows of 384 tokens: 20 s of two CPUs. 65,536 tokens are 170 such windows.
_MAX_REPEATED_TOKENS = 65_536

_TRUNCATIONS = frozenset(Truncation.values())
# Looking it up in the enumeration takes a microsecond.
_ERROR = Truncation.TRUNCATION_ERROR
_LEFT = Truncation.TRUNCATION_LEFT


@dataclass(frozen=True, slots=True)
class EncodedText:
    """One sequence with its special tokens. `token_ids` and `token_type_ids`: int32 [tokens]."""

    token_ids: TokenIds
    token_type_ids: TokenIds
    truncated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Window(EncodedText):
    """One of the overlapping sequences of a long second text.

    `char_start` and `char_end`: int32 [tokens], for each token of the second text the range of the word that it is part of, in code
    points of that text, end exclusive; -1 for every other token.
    """

    char_start: TokenIds = field(kw_only=True)
    char_end: TokenIds = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class LocatedText(EncodedText):
    """A text, or one of its overlapping windows, with the place of each token.

    `char_start` and `char_end`: int32 [tokens], in code points of the text, end exclusive; -1 for special tokens. `continues_word`: int32
    [tokens], 1 for a token that is part of the same word as the one before it.
    """

    char_start: TokenIds = field(kw_only=True)
    char_end: TokenIds = field(kw_only=True)
    continues_word: TokenIds = field(kw_only=True)

    def truncated(self, max_tokens: int, side: Side) -> "LocatedText":
        """The text with at most `max_tokens` tokens, as TextTokenizer.encode_truncated cuts it."""
        of_text = np.flatnonzero(self.char_start >= 0)
        room = max(max_tokens - (len(self.char_start) - len(of_text)), 0)
        dropped = of_text[room:] if side == "right" else of_text[: max(len(of_text) - room, 0)]
        return LocatedText(
            np.delete(self.token_ids, dropped),
            np.delete(self.token_type_ids, dropped),
            len(dropped),
            char_start=np.delete(self.char_start, dropped),
            char_end=np.delete(self.char_end, dropped),
            continues_word=np.delete(self.continues_word, dropped),
        )


class TextTokenizer(Protocol):
    """A model's tokenizer, as tasks need it. Safe to call from several threads.

    What a text holds is text, also where it spells a special token ("[SEP]", "<s>"); only a model for fill-mask knows its mask in a text.
    """

    def token_id(self, token: str) -> int | None:
        """A token's number, as the vocabulary spells the token; None where it has no such token."""

    def count(self, text: str) -> int:
        """How many tokens a text has, without special tokens."""

    def special_tokens(self, *, pair: bool) -> int:
        """How many special tokens a sequence of one text, or of a pair, gets."""

    def encode(self, text: str, text_pair: str | None = None) -> EncodedText:
        """The whole text or pair as one sequence, however long."""

    def encode_truncated(self, text: str, text_pair: str | None, *, max_tokens: int, side: Side, only_first: bool = False) -> EncodedText:
        """As encode, with at most `max_tokens` tokens, special ones included; of a pair, the longer text loses tokens first.

        `only_first`: of a pair, only the first text does, but for one token: where the second leaves no room for it, there are too many.
        """

    def encode_windows(self, first: str, second: str, *, max_tokens: int, overlap_tokens: int) -> list[Window]:
        """The pair as sequences of at most `max_tokens` tokens that all hold the first text and together all of the second.

        Neighbours share `overlap_tokens` tokens of the second text, which must be fewer than there is room for.
        """

    def locate(self, text: str) -> LocatedText:
        """The whole text as one sequence, however long."""

    def locate_windows(self, text: str, *, max_tokens: int, overlap_tokens: int) -> list[LocatedText]:
        """The text as sequences of at most `max_tokens` tokens that together hold all of it; neighbours share `overlap_tokens`."""


# The bytes of an image file to the pixels that the model takes, uint8 [3, height, width]. Raises InvalidInput; safe in several threads.
ImageReader: TypeAlias = Callable[[bytes], Array]


@dataclass(frozen=True, slots=True)
class Encoded:
    """An input as the model takes it: `sequences` for the executor, `annotations` (one a sequence, or none) for the task's decode."""

    sequences: ArraySets
    annotations: ArraySets = ()
    truncated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Task:
    """A task. `name` is the name of its field in TaskInput and TaskResult.

    check(input, model) comes first, and with encode it checks the whole input, so that nothing is computed for one that would fail later.
    encode(input, reader, model) → Encoded, with the model's TextTokenizer, or its ImageReader where it takes images. It depends on nothing
    of the input but what traits(input) gives, nor on anything of the model but what core/model.py's `encoding_traits` gives: inputs that
    are equal in these have the same encoding, which caches rely on.
    decode(input, model, annotations, outputs) → the task's result message; `outputs` holds one set of arrays a sequence, as the
    model's OutputSpec says. All raise InvalidInput. They are pure, and run in any process that has the model's spec.
    `decoded_fields`: those that decode reads, None for all, where it needs the text. Texts and images can be large, and these travel once
    more.
    `facts`: what the task knows of a model; `facts.of(model)` gives it.
    """

    name: str
    # The message types differ by task and meet only here, where the field's name has chosen the right pair.
    check: Callable[[Any, ModelSpec], None]
    traits: Callable[[Any], tuple[str | int, ...]]
    encode: Callable[[Any, Any, ModelSpec], Encoded]
    decode: Callable[[Any, ModelSpec, ArraySets, ArraySets], Any]
    decoded_fields: tuple[str, ...] | None
    facts: type[TaskFacts] = TaskFacts

    def decoding_part(self, input: TaskInput) -> TaskInput:
        """The input with what decode reads, numbers and lists, and nothing else; written in place, which takes least time."""
        if self.decoded_fields is None:
            return input
        part = TaskInput()
        whole, options = getattr(input, self.name), getattr(part, self.name)
        options.SetInParent()
        for name in self.decoded_fields:
            value = getattr(whole, name)
            if isinstance(value, int):
                setattr(options, name, value)
            else:
                getattr(options, name).extend(value)
        return part


def check_text(name: str, text: str) -> None:
    """Refuses a text that is empty or holds the character NUL, which tokenizers drop without a word."""
    if not text:
        raise InvalidInput(name, "is empty")
    position = text.find("\0")
    if position >= 0:
        raise InvalidInput(name, f"has the character NUL at position {position}")


def check_truncation(truncation: "Truncation.ValueType") -> None:
    """Refuses what a newer caller may mean something by: to guess would drop text without a word."""
    if truncation not in _TRUNCATIONS:
        raise InvalidInput("truncation", f"{truncation} is not known")


def or_default(truncation: "Truncation.ValueType") -> "Truncation.ValueType":
    """What is meant where nothing is said: an error."""
    return truncation or _ERROR


def check_windows(
    field_name: str, text: str, tokenizer: TextTokenizer, *, window_tokens: int, room_tokens: int, overlap_tokens: int
) -> None:
    """Refuses a text of too many windows before any is made. A window has room for `room_tokens` tokens of the text."""
    new_tokens = room_tokens - overlap_tokens
    is_repeated = 4 * new_tokens < window_tokens

    def problem(tokens: int) -> str:
        windows = max(1, -(-(tokens - overlap_tokens) // new_tokens))
        if windows > _MAX_WINDOWS:
            return f"makes {windows} windows with an overlap of {overlap_tokens} tokens, the limit is {_MAX_WINDOWS}"
        computed = tokens + (windows - 1) * overlap_tokens + windows * (window_tokens - room_tokens)
        if windows > 1 and is_repeated and computed > _MAX_REPEATED_TOKENS:
            described = f"makes {computed} tokens in {windows} windows that advance by {new_tokens}"
            return f"{described}; the limit is {_MAX_REPEATED_TOKENS} where they advance by less than a quarter of a window"
        return ""

    # Hardly ever are there more tokens than bytes, so most texts are not counted.
    if problem(len(text.encode())) and (found := problem(tokenizer.count(text))):
        raise InvalidInput(field_name, found)


def encode_text(
    tokenizer: TextTokenizer,
    model: ModelSpec,
    text: str,
    text_pair: str | None,
    truncation: "Truncation.ValueType",
    field_name: str = "",
) -> Encoded:
    """A text or a pair as one sequence, truncated only where the caller allows it. Raises InvalidInput naming both lengths.

    `field_name`: what errors call the text; default: text, or text and text_pair.
    """
    field_name = field_name or ("text" if text_pair is None else "text and text_pair")
    if or_default(truncation) == _ERROR:
        encoded = tokenizer.encode(text, text_pair)
    else:
        encoded = tokenizer.encode_truncated(text, text_pair, max_tokens=model.max_tokens, side=side_of(truncation))
    tokens = len(encoded.token_ids)
    if encoded.truncated_tokens:
        special_tokens = tokenizer.special_tokens(pair=text_pair is not None)
        if special_tokens >= model.max_tokens:
            raise InvalidInput(field_name, f"{special_tokens} special tokens leave no room for text, the model takes {model.token_limit}")
    elif tokens > model.max_tokens:
        raise InvalidInput(field_name, f"{tokens} tokens, the model takes {model.token_limit}; set truncation to cut")
    return Encoded([sequence(encoded, model)], truncated_tokens=encoded.truncated_tokens)


def cut_located(whole: LocatedText, model: ModelSpec, truncation: "Truncation.ValueType", advice: str = "") -> LocatedText:
    """A text that was located whole, truncated only where the caller allows it.

    `advice`: what else the caller could do. Raises InvalidInput naming both lengths.
    """
    tokens = len(whole.token_ids)
    if tokens <= model.max_tokens:
        return whole
    if or_default(truncation) == _ERROR:
        raise InvalidInput("text", f"{tokens} tokens, the model takes {model.token_limit}; set truncation to cut{advice}")
    return whole.truncated(model.max_tokens, side_of(truncation))


def side_of(truncation: "Truncation.ValueType") -> Side:
    """The end at which a text that may be cut loses tokens."""
    return "left" if truncation == _LEFT else "right"


def sequence(encoded: EncodedText, model: ModelSpec) -> Arrays:
    """The arrays that the executor needs of a sequence: token_type_ids only where the model takes them and one is not zero."""
    arrays = {"input_ids": encoded.token_ids}
    if "token_type_ids" in model.inputs and encoded.token_type_ids.any():
        arrays["token_type_ids"] = encoded.token_type_ids
    return arrays
