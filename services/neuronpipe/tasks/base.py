"""What a task is: two functions, and the checks that tasks share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.tasks_pb2 import Truncation
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays

TokenIds = NDArray[np.int32]
Side = Literal["left", "right"]

_TRUNCATIONS = frozenset(Truncation.values())
# Looking it up in the enumeration takes a microsecond.
_ERROR = Truncation.TRUNCATION_ERROR


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


class TextTokenizer(Protocol):
    """A model's tokenizer, as tasks need it. Safe to call from several threads."""

    def count(self, text: str) -> int:
        """How many tokens a text has, without special tokens."""

    def special_tokens(self, *, pair: bool) -> int:
        """How many special tokens a sequence of one text, or of a pair, gets."""

    def encode(self, text: str, text_pair: str | None = None) -> EncodedText:
        """The whole text or pair as one sequence, however long."""

    def encode_truncated(self, text: str, text_pair: str | None, *, max_tokens: int, side: Side) -> EncodedText:
        """As encode, with at most `max_tokens` tokens; of a pair, the longer text loses tokens first."""

    def encode_windows(self, first: str, second: str, *, max_tokens: int, overlap_tokens: int) -> list[Window]:
        """The pair as sequences of at most `max_tokens` tokens that all hold the first text and together all of the second.

        Neighbours share `overlap_tokens` tokens of the second text, which must be fewer than there is room for.
        """


# The bytes of an image file to the pixels that the model takes, uint8 [3, height, width]. Raises InvalidInput; safe in several threads.
ImageReader: TypeAlias = Callable[[bytes], Array]


@dataclass(frozen=True, slots=True)
class Encoded:
    """An input as the model takes it: `sequences` for the executor, `annotations` (one a sequence, or none) for the task's decode."""

    sequences: Sequence[Arrays]
    annotations: Sequence[Arrays] = ()
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
    options(input) → all of the input that decode needs, for tasks whose inputs are too large to be sent once more; else None.
    """

    name: str
    # The message types differ by task and meet only here, where the field's name has chosen the right pair.
    check: Callable[[Any, ModelSpec], None]
    traits: Callable[[Any], tuple[str | int, ...]]
    encode: Callable[[Any, Any, ModelSpec], Encoded]
    decode: Callable[[Any, ModelSpec, Sequence[Arrays], Sequence[Arrays]], Any]
    options: Callable[[Any], Any] | None = None


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


def encode_text(
    tokenizer: TextTokenizer, model: ModelSpec, text: str, text_pair: str | None, truncation: "Truncation.ValueType"
) -> Encoded:
    """A text or a pair as one sequence, truncated only where the caller allows it. Raises InvalidInput naming both lengths."""
    encoded = tokenizer.encode(text, text_pair)
    if len(encoded.token_ids) > model.max_tokens:
        if or_default(truncation) == _ERROR:
            field_name = "text" if text_pair is None else "text and text_pair"
            raise InvalidInput(field_name, f"{len(encoded.token_ids)} tokens, the model takes {model.token_limit}; set truncation to cut")
        side: Side = "left" if truncation == Truncation.TRUNCATION_LEFT else "right"
        encoded = tokenizer.encode_truncated(text, text_pair, max_tokens=model.max_tokens, side=side)
    return Encoded([sequence(encoded, model)], truncated_tokens=encoded.truncated_tokens)


def sequence(encoded: EncodedText, model: ModelSpec) -> Arrays:
    """The arrays that the executor needs of a sequence: token_type_ids only where the model takes them and one is not zero."""
    arrays = {"input_ids": encoded.token_ids}
    if "token_type_ids" in model.inputs and encoded.token_type_ids.any():
        arrays["token_type_ids"] = encoded.token_type_ids
    return arrays
